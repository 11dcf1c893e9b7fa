"""Checks of aggregators and client algorithms in tiny fits."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from flsv.aggregation import Aggregator, FedAvg
from flsv.attacks import Scaling
from flsv.configuration.federation_config import ClientEvaluation
from flsv.core.parameter_space import ParameterSpace
from flsv.models.classifier import ClassifierClient
from flsv.testing.checks import ensure, equal, pickles
from flsv.testing.fits import (
    COHORTS,
    FEATURES,
    NUM_CLASSES,
    NUM_CLIENTS,
    NUM_SAMPLES_OF_CLIENTS,
    SERVER_ID,
    Fit,
    FitCase,
    TinyClassifier,
    resumes,
    samples_of,
    tiny_data,
)
from flsv.training.algorithms import ClientAlgorithm


class TinyNormalized(ClassifierClient):
    """Classifier with BatchNorm, whose statistics are buffers."""

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(FEATURES)
        linear = nn.Linear(FEATURES, NUM_CLASSES)
        network = nn.Sequential(norm, linear)
        optimizer = partial(torch.optim.SGD, lr=0.1)
        super().__init__(network, num_classes=NUM_CLASSES, optimizer=optimizer)


class TinyStill(TinyClassifier):
    """Classifier whose gradients are 0, so that clients do not move."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0 * super().training_step(batch, batch_idx)


class AggregatorCase(FitCase):
    """Aggregator under test."""

    role = "aggregator"
    base = Aggregator


class ClientAlgorithmCase(FitCase):
    """Client algorithm under test."""

    role = "client_algorithm"
    base = ClientAlgorithm


def odd_rounds_end(case: FitCase) -> None:
    """Check that rounds of one client, without a move, and with BatchNorm end with finite models and weights, and
    variances of at least 0. Divide by no length and no number of others, and average buffers with weights that sum to
    1, as round.combine does."""
    one_client = COHORTS[0][:1]
    expect_finite(case, one_client)
    if case.has_own_module():
        return

    cohort = COHORTS[1]
    expect_finite(case, cohort, module=TinyStill())

    one_batch_per_client = tiny_data(batch_size=max(NUM_SAMPLES_OF_CLIENTS))
    module = TinyNormalized()
    fit = expect_finite(case, cohort, module=module, data=one_batch_per_client)
    fit.loop.space.write(module, fit.models[0])
    variances = module.state_dict()["network.0.running_var"]  # of BatchNorm
    ensure((variances >= 0).all(), f"the variances {variances.tolist()}")


def expect_finite(case: FitCase, cohort: Sequence[int], **options: Any) -> Fit:
    """Train one round. Raise AssertionError if a model, or the weight of a client of the cohort, is not finite."""
    loop = case.make([cohort])
    fit = case.fit(loop, rounds=1, **options)
    state = loop.state
    weights: Any = state.weights
    weights_of_cohort = weights[list(cohort)]
    ensure(weights_of_cohort.isfinite().all(), f"the weights {weights.tolist()}")
    ensure(state.is_aggregate_finite, "an aggregate that is not finite")
    models = {"the global model": fit.models[0]}
    for client, model in state.starts.items():
        models[f"the start of client {client}"] = model
    for name, model in models.items():
        ensure(model.isfinite().all(), f"{name} with entries that are not finite")
    return fit


def fit_of_all(
    case: FitCase,
    rounds: int = 1,
    data: Any = None,
    **changes: Any,
) -> Fit:
    """Train rounds in which all clients take part."""
    loop = case.make([range(NUM_CLIENTS)], **changes)
    return case.fit(loop, rounds=rounds, data=data)


def validation_loss(case: FitCase, model: Tensor | None = None) -> float:
    """Return the cross-entropy of a model ``[P]`` on the server's samples, None: of the initial one."""
    module = case.module()
    if model is not None:
        ParameterSpace(module).write(module, model)
    x, y = samples_of(SERVER_ID)
    module.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module(x), y)
    return float(loss)


def loss_after_rounds(case: FitCase) -> float:
    """Return the validation loss of the global model after eight rounds of all clients."""
    fit = fit_of_all(case, rounds=8)
    return validation_loss(case, fit.models[-1])


@cache
def reference_loss() -> float:
    """Return the validation loss after as many rounds with FedAvg, trained once for all parts."""
    return loss_after_rounds(AggregatorCase(FedAvg()))


def learns(case: FitCase) -> None:
    """Check that the validation loss falls in eight rounds by at least a third of what it falls with FedAvg. Look for a
    wrong sign, or a weight or step that is much too small or large."""
    loop = case.make()
    if case.has_own_module() or loop.config.share != "all":
        return
    initial_loss = validation_loss(case)
    loss = loss_after_rounds(case)
    loss_of_fedavg = reference_loss()
    highest_loss = initial_loss - (initial_loss - loss_of_fedavg) / 3
    ensure(
        loss <= highest_loss,
        f"a loss of {loss:.3f}, at first {initial_loss:.3f}, with FedAvg {loss_of_fedavg:.3f}",
    )


def equal_clients_weigh_the_same(case: AggregatorCase) -> None:
    """Check that clients with equal samples and models have equal weights. Do not use a client's number or its position
    in the cohort."""
    fit = fit_of_all(case, data=tiny_data(equal_clients=True))
    weights: Any = fit.loop.state.weights
    mean_weights = weights.mean().expand_as(weights)
    ensure(equal(weights, mean_weights, rtol=1e-4), weights.tolist())


def attack_moves_little(case: AggregatorCase) -> None:
    """Check that a robust aggregator's step stays as long if one client's update is a million, not a thousand, times as
    long. Bound every client's influence, or set robust = False."""
    if not case.part.robust:
        return
    module = case.module()
    lengths = []
    for factor in (-1e3, -1e6):
        fit = fit_of_all(case, uploads=[Scaling(factor, clients=[1])])
        space = fit.loop.space
        initial_model = space.read(module).to(fit.models[0])
        lengths.append((fit.models[0] - initial_model).norm())
    length, length_of_far = lengths
    ensure(length_of_far <= 2 * length, f"steps of {length} and {length_of_far}")


def trains_alone(case: ClientAlgorithmCase) -> None:
    """Check that a client's training does not depend on the clients that train before it. Keep a client's state in
    context.state, and undo changes of the module in leave_client."""
    cohort = COHORTS[0]
    last_client = cohort[-1]
    models = []
    for clients in ([last_client], cohort):
        loop = case.make([clients], evaluation=ClientEvaluation(keep_trained=True))
        fit = case.fit(loop, rounds=1)
        models.append(fit.loop.trained[last_client])
    alone, together = models
    ensure(equal(alone, together), f"{together.tolist()} after others and {alone.tolist()} alone")


AggregatorCase.checks = (
    pickles,
    odd_rounds_end,
    equal_clients_weigh_the_same,
    learns,
    attack_moves_little,
    resumes,
)
ClientAlgorithmCase.checks = (pickles, odd_rounds_end, trains_alone, learns, resumes)
