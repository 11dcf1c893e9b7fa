"""FedCM against its algorithm in plain PyTorch, and the checks of client algorithms."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from flsv.aggregation import FedAvg
from flsv.contrib.fedcm import FedCM
from flsv.federation import FederatedLoop
from flsv.sampling import UniformSampler
from flsv.testing import parametrize_with_checks
from helpers import refused
from helpers.data import toy_data
from helpers.fits import fit
from helpers.loops_by_hand import (
    COHORT,
    LOCAL_EPOCHS,
    PROPORTIONS,
    ROUNDS,
    SEED,
    assert_same_state,
    copy_parameters,
    fedavg_by_hand,
    set_parameters,
)
from helpers.models import Plain, network

LR, ALPHA = 0.1, 0.3
#: Clients of unequal and of equal numbers of samples, and so of local steps.
UNEQUAL, EQUAL = PROPORTIONS, (1,) * len(PROPORTIONS)
sgd = partial(torch.optim.SGD, lr=LR)


def make_data(proportions):
    data = toy_data(proportions)
    data.setup("fit")
    return data


def step_with_momentum(model, batch, direction):
    features, labels = batch
    loss = nn.functional.cross_entropy(model(features), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        for parameter, gradient, momentum in zip(model.parameters(), gradients, direction):
            parameter -= LR * (ALPHA * gradient + (1 - ALPHA) * momentum)


def fedcm_by_hand(net, data, weighting, server_lr):
    """The global model after the last round, and the next round's direction."""
    direction = [torch.zeros_like(parameter) for parameter in net.parameters()]
    num_steps = {}
    is_uniform = weighting == "uniform"

    def train(model, visit):
        for batch in visit.batches:
            step_with_momentum(model, batch, direction)
        num_steps[visit.client] = len(visit.batches)

    def merge(server, models, mean):
        sizes = {
            client: 1.0 if is_uniform else float(data.num_samples[client]) for client in models
        }
        weighted_steps = [size * num_steps[client] for client, size in sizes.items()]
        mean_steps = sum(weighted_steps) / sum(sizes.values())

        anchors = copy_parameters(server)
        update = [new - anchor for new, anchor in zip(copy_parameters(mean), anchors)]
        direction[:] = [-moved / (mean_steps * LR) for moved in update]
        set_parameters(mean, [old + server_lr * moved for old, moved in zip(anchors, update)])
        return mean

    server, _ = fedavg_by_hand(net, train, data=data, uniform=is_uniform, merge=merge)
    return server, torch.cat([part.flatten() for part in direction])


def make_loop(aggregator, alpha=ALPHA):
    return FederatedLoop(
        aggregator,
        client_algorithm=FedCM(alpha),
        sampler=UniformSampler(COHORT),
        local_epochs=LOCAL_EPOCHS,
        seed=SEED,
    )


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("proportions", "batch_norm", "weighting", "server_lr"),
    [
        (EQUAL, False, "uniform", 1.0),
        (UNEQUAL, False, "uniform", 1.0),
        (UNEQUAL, True, "samples", 1.0),
        (UNEQUAL, True, "uniform", 0.5),
    ],
)
def test_fedcm_equals_its_algorithm_by_hand(
    tmp_path, proportions, batch_norm, weighting, server_lr
):
    net = network(batch_norm)
    expected, direction = fedcm_by_hand(net, make_data(proportions), weighting, server_lr)

    loop = make_loop(FedAvg(weighting, server_lr=server_lr))
    module = Plain(copy.deepcopy(net), sgd)
    fit(loop, tmp_path, module, make_data(proportions), rounds=ROUNDS)

    assert_same_state(module.net, expected)

    state = loop.state_dict()["strategies"]["client_algorithm"]
    torch.testing.assert_close(state["direction"], direction, rtol=1e-4, atol=1e-4)
    assert direction.norm() > 0.1


@pytest.mark.parametrize("alpha", [0.0, 1.5])
def test_fedcm_refuses_an_alpha_out_of_range(alpha):
    with refused("alpha"):
        FedCM(alpha)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(torch.optim.SGD, lr=LR, momentum=0.9),
        partial(torch.optim.Adam, lr=LR),
    ],
)
def test_fedcm_refuses_optimizers_whose_steps_are_no_gradients(tmp_path, optimizer):
    with refused("one torch.optim.SGD with momentum=0"):
        fit(make_loop(FedAvg()), tmp_path, Plain(optimizer=optimizer), make_data(UNEQUAL))


@pytest.mark.by_turn
@pytest.mark.fast_rows("*pickles", "*trains_alone")
@parametrize_with_checks([FedCM()])
def test_fedcm_passes_the_checks_of_client_algorithms(check):
    check()
