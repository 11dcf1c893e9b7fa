"""DecayedShapley, BlendedContribution, OneRoundShapley: by formulas, and on the models of a federation's rounds."""

from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from numpy.testing import assert_allclose
from torch import Tensor
from torch.testing import assert_close

from flsv.federation import FederatedLoop
from flsv.functional import decayed_shapley, exact_shapley
from flsv.metrics import BlendedContribution, DecayedShapley, OneRoundShapley
from flsv.sampling import UniformSampler
from helpers.data import toy_data
from helpers.fits import KeepsRounds, fit, validation_loss
from helpers.models import Plain, network

NAN = float("nan")


class AdditiveGame:
    """A coalition's utility is the sum of its members' values, ``[k]``."""

    def __init__(self, values: Tensor):
        self.values = values
        self.is_evaluated = False

    def __call__(self, masks: Tensor) -> Tensor:
        self.is_evaluated = True
        return masks.to(self.values) @ self.values


def update_with_additive_games(metric: DecayedShapley, values_by_round: Tensor) -> list[int]:
    """The rounds whose games the metric evaluates. A client whose value is NaN is absent."""
    metric.set_dtype(torch.float64)
    evaluated_rounds = []
    for index, values in enumerate(values_by_round):
        client_ids = (~values.isnan()).nonzero().flatten()
        game = AdditiveGame(values[client_ids])
        metric.update(client_ids, game, round_index=index)
        if game.is_evaluated:
            evaluated_rounds.append(index)
    return evaluated_rounds


@pytest.mark.parametrize(
    ("values_by_round", "options", "num_skipped", "num_flagged"),
    [
        (
            [[0.4, 0.3], [-0.1, 0.0], [NAN, 0.2], [0.0, 0.0]],
            {"decay": 0.5, "normalize": False},
            1,
            1,
        ),
        ([[0.1, -0.3], [0.0, 0.0], [-0.1, -0.1]], {}, 1, 2),
    ],
)
def test_decayed_shapley_equals_the_function_and_counts_rounds_without_gain(
    values_by_round, options, num_skipped, num_flagged
):
    values_by_round = torch.tensor(values_by_round).double()
    metric = DecayedShapley(num_clients=2, **options)

    update_with_additive_games(metric, values_by_round)

    expected = decayed_shapley(values_by_round, **options)
    assert_close(metric.compute(), expected, equal_nan=True)
    assert int(metric.skipped) == num_skipped
    assert int(metric.flagged) == num_flagged


def test_decayed_shapley_evaluates_no_round_whose_weight_is_below_the_threshold():
    values_by_round = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]).double()
    options = {"decay": 0.5, "threshold": 0.2}
    metric = DecayedShapley(num_clients=2, **options)

    evaluated_rounds = update_with_additive_games(metric, values_by_round)

    assert evaluated_rounds == [0, 1]  # with the weights 0.5 and 0.25, before 0.125
    assert_close(metric.compute(), decayed_shapley(values_by_round, **options))


class KeepsUtilities:
    """An estimator that keeps the round's utilities of all coalitions. Bit i of a coalition's number is client i."""

    def __init__(self):
        self.tables: list[torch.Tensor] = []

    def __call__(self, utility, players: int, generator=None):
        masks = (torch.arange(2**players)[:, None] >> torch.arange(players)) & 1
        self.tables.append(utility(masks.bool()))
        return exact_shapley(utility, players)


def is_member(client: int, number_of_coalition: int) -> bool:
    return bool(number_of_coalition >> client & 1)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "server_lr"),
    [("fixed", 1.0), ("renormalized", 0.5)],
)
def test_coalition_models_of_decayed_shapley_have_the_rounds_aggregation_weights(
    tmp_path, kind, server_lr
):
    estimator = KeepsUtilities()
    recorder = KeepsRounds(server_lr=server_lr)
    metric = DecayedShapley(
        decay=0.5, estimator=estimator, performance="negative_loss", coalition_weights=kind
    )
    data = toy_data((3, 2, 2), server_val=0.3)
    loop = FederatedLoop(recorder, {"guo": metric}, seed=4)
    # Without BatchNorm, whose buffers are always averages.
    module = fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=2)

    for round, table in zip(recorder.rounds, estimator.tables):
        weights = round.aggregation_weights
        updates = round.client_vectors - round.global_vector
        for number, utility in enumerate(table.tolist()):
            members = [client for client in range(3) if is_member(client, number)]
            member_weights = weights[members].float()
            if kind == "renormalized" and members:
                member_weights = member_weights / member_weights.sum()
            model = round.global_vector + server_lr * member_weights @ updates[members]
            loss = validation_loss(module, loop.space, model, data)
            assert -loss == pytest.approx(utility, abs=1e-5)


def normalized_shares(values: np.ndarray) -> np.ndarray:
    positive = np.maximum(values, 0)
    return positive / positive.sum()


def test_blended_contribution_equals_its_formula_with_an_absent_client():
    """Client 2 misses the first round: it gains nothing there, and its cosine is that of its own round."""
    gains_by_round = [[3.0, 1.0], [1.0, -4.0, 2.0]]
    updates_by_round = [
        [[2.0, 0.0], [1.0, 1.0]],
        [[1.0, 0.0], [0.0, -1.0], [3.0, 4.0]],
    ]
    weights_by_round = [[0.75, 0.25], [0.5, 0.25, 0.25]]
    metric = BlendedContribution(num_clients=4, decay=0.5)
    gain = np.zeros(3)
    cosine = np.zeros(3)
    num_rounds = np.zeros(3)
    for index in range(2):
        gains = torch.tensor(gains_by_round[index])
        updates = torch.tensor(updates_by_round[index])
        weights = torch.tensor(weights_by_round[index])
        cohort = torch.arange(len(gains))
        metric.update(
            cohort, AdditiveGame(gains), updates, round_index=index, aggregation_weights=weights
        )
        directions = updates / updates.norm(dim=1, keepdim=True)
        mean_direction = weights @ directions
        gain[cohort] += 0.5 ** (index + 1) * gains.numpy()
        cosine[cohort] += (directions @ mean_direction / mean_direction.norm()).numpy()
        num_rounds[cohort] += 1

    values = metric.compute()

    expected = normalized_shares(gain) / 2 + normalized_shares(cosine / num_rounds) / 2
    assert_allclose(values[:3].numpy(), expected, rtol=1e-5)
    assert values[3].isnan()
    assert_allclose(metric.diagnostics()["gain"][:3].numpy(), gain, rtol=1e-5)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("kind", "server_lr", "cohort_size"),
    [("renormalized", 0.7, 3), ("fixed", 0.7, 2)],
)
def test_one_round_shapley_models_are_the_start_plus_members_updates(
    tmp_path, kind, server_lr, cohort_size
):
    """Algorithm 1 of Song et al. 2019, with all updates of all rounds kept; fixed weights whoever is drawn."""
    estimator = KeepsUtilities()
    recorder = KeepsRounds(server_lr=server_lr)
    data = toy_data((3, 2, 2), server_val=0.3)
    metric = OneRoundShapley(
        3, estimator=estimator, performance="negative_loss", coalition_weights=kind
    )
    sampler = UniformSampler(cohort_size)
    loop = FederatedLoop(recorder, {"or": metric}, sampler=sampler, seed=4)

    module = fit(loop, tmp_path, Plain(network(batch_norm=False)), data, rounds=3)

    (table,) = estimator.tables
    for number, utility in enumerate(table.tolist()):
        model = recorder.rounds[0].global_vector.clone()
        for round in recorder.rounds:
            are_members = [is_member(client, number) for client in round.client_ids.tolist()]
            weights = round.aggregation_weights * torch.tensor(are_members)
            if kind == "renormalized" and weights.sum() > 0:
                weights = weights / weights.sum()
            updates = round.client_vectors - round.global_vector
            model += server_lr * weights.float() @ updates
        loss = validation_loss(module, loop.space, model, data)
        assert -loss == pytest.approx(utility, abs=1e-5)


def stop_after_round_2(trainer: L.Trainer, module: L.LightningModule):
    trainer.should_stop = trainer.current_epoch == 1


def fit_two_of(num_rounds: int, folder: Path) -> FederatedLoop:
    loop = FederatedLoop(metrics={"or": OneRoundShapley(num_rounds)}, seed=0)
    fit(
        loop,
        folder,
        data=toy_data(server_val=0.3),
        rounds=num_rounds,
        callbacks=[LambdaCallback(on_train_epoch_end=stop_after_round_2)],
    )
    return loop


@pytest.mark.slow
def test_one_round_shapley_evaluates_the_game_of_a_shorter_run_at_its_end(tmp_path):
    complete_loop = fit_two_of(2, tmp_path / "complete")
    stopped_loop = fit_two_of(4, tmp_path / "stopped")

    values = stopped_loop.contributions["or"]
    assert_close(values, complete_loop.contributions["or"], rtol=0, atol=0)
    rows = stopped_loop.history().query("metric == 'or'")
    assert rows["round"].tolist() == [1] * 3  # a row of each client, of the second round alone
    assert stopped_loop.metrics["or"].diagnostics()["evaluations"] == 2**3


def test_one_round_shapley_refuses_a_run_without_round_0():
    metric = OneRoundShapley(3, num_clients=2)

    with pytest.raises(ValueError, match="was not updated with round 0"):
        metric.update(
            client_ids=torch.arange(2),
            round_index=1,
            global_vector=torch.zeros(4),
            client_updates=torch.zeros(2, 4),
            aggregation_weights=torch.ones(2),
            utility=lambda *_: None,
        )
