"""ShadowShapley on ordinary kinds of modules: every coalition against a plain loop that trains it alone, by hand."""

import copy
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.functional import few_coalitions_shapley
from flsv.games.members import Members, members_of
from flsv.metrics import ShadowShapley
from flsv.metrics.coalitions.design import coalition_masks, design_within, equivalent_runs
from helpers import slow_except
from helpers.coalition_kinds import KINDS, Kind, Manual
from helpers.coalitions_by_hand import FIT_ROUNDS, SEED, CoalitionByHand, make_three_clients
from helpers.fits import state_vector, trainer_for
from helpers.kinds_of_attributes import GlobalCache
from helpers.recorded import Recorded

QUIET = Reporting(table=False)


def fit_kind(
    kind: Kind,
    folder: Path,
    metrics: dict[str, Any],
) -> tuple[FederatedLoop, Any]:
    loop = FederatedLoop(
        metrics=metrics,
        seed=SEED,
        reporting=QUIET,
    )
    module = kind.module()
    callbacks = []
    if kind.callback is not None:
        callbacks.append(kind.callback())

    trainer = trainer_for(loop, folder, FIT_ROUNDS, callbacks=callbacks)
    trainer.fit(module, make_three_clients())
    return loop, module


#: One of each reason.
FAST = ("a plain MLP", "manual optimization")


@pytest.mark.parametrize("name", slow_except(FAST, KINDS))
def test_every_coalitions_fit_equals_a_plain_loop(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    metric = Recorded(coalitions="all", performance="negative_loss")
    untrained = kind.module()

    loop, module = fit_kind(kind, tmp_path, {"shadow": metric})

    masks = coalition_masks("all", 3)
    utilities_by_hand = []
    for members in members_of(masks):
        coalition = CoalitionByHand(copy.deepcopy(untrained.net), untrained.optimizer)
        utilities_by_hand.append(coalition.utility(members))

    expected = torch.tensor(utilities_by_hand, dtype=torch.float64)
    metric_of_run: Any = loop.metrics["shadow"]
    utilities = metric_of_run.game.flatten()
    torch.testing.assert_close(utilities, expected, rtol=0, atol=1e-5)

    expected_values = few_coalitions_shapley(masks, expected).values
    values = loop.contributions["shadow"].double()
    torch.testing.assert_close(values, expected_values, rtol=0, atol=1e-5)

    _, module_without_metric = fit_kind(kind, tmp_path, {})
    assert torch.equal(state_vector(module), state_vector(module_without_metric))


@pytest.mark.parametrize(
    ("max_fits", "clients", "costs"),
    [(10, 4, 7.0), (10, 5, 9.0), (15, 5, 15.0), (10, 6, 6.0), (10, 12, 1.0)],
)
def test_design_within_max_fits_has_the_expected_cost(
    max_fits: float, clients: int, costs: float
) -> None:
    assert equivalent_runs(coalition_masks(design_within(max_fits, clients), clients)) == costs


def federated_loop_of(trainer: L.Trainer) -> Any:
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    (loop,) = (callback for callback in callbacks if isinstance(callback, FederatedLoop))
    return loop


class DivergesForClient1Alone(Manual):
    """Where client 1 trains alone, its loss is NaN in the second round."""

    def loss(self, batch: Any) -> Tensor:
        loop = federated_loop_of(self.trainer)
        loss = super().loss(batch)
        is_second_round = loop.round_index == 1
        is_client_1_alone = loop.state.cohort == [1]
        if self.training and is_second_round and is_client_1_alone:
            return loss * float("nan")
        return loss


def test_divergence_of_one_coalition_changes_no_other_coalitions_score(tmp_path: Path) -> None:
    utilities_by_module: dict[Any, dict[Members, float]] = {}
    for module in (Manual, DivergesForClient1Alone):
        loop, _ = fit_kind(
            Kind(module),
            tmp_path,
            {"shadow": Recorded(coalitions="all", performance="negative_loss")},
        )
        metric: Any = loop.metrics["shadow"]
        utilities = metric.game.flatten().tolist()
        utilities_by_module[module] = dict(zip(metric.members, utilities, strict=True))

    finite_utilities = utilities_by_module[Manual]
    utilities_with_a_divergence = utilities_by_module[DivergesForClient1Alone]
    different_coalitions = [
        members
        for members, utility in finite_utilities.items()
        if utilities_with_a_divergence[members] != utility
    ]

    assert different_coalitions == [(1,)]


class DrawsItsScore(Manual):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("luck", torch.rand(()))


def test_all_coalitions_are_scored_with_the_same_random_numbers(tmp_path: Path) -> None:
    loop, _ = fit_kind(
        Kind(DrawsItsScore),
        tmp_path,
        {"shadow": Recorded(coalitions="all", performance="luck", mode="max")},
    )
    metric: Any = loop.metrics["shadow"]

    utilities_of_trained = metric.game[1:]  # those of the seven coalitions but the empty one
    assert len(utilities_of_trained) == 7
    assert (utilities_of_trained == utilities_of_trained[0]).all()


class FailsWithoutClient0(L.Callback):
    """Fails when client 1 trains, in coalitions without client 0."""

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        loop = federated_loop_of(trainer)
        if loop.current_client == 1 and 0 not in loop.state.cohort:
            raise ZeroDivisionError("nobody there")


def test_failed_coalitions_end_no_run(tmp_path: Path) -> None:
    metrics: dict[str, Any] = {"shadow": ShadowShapley(coalitions="all")}
    failed = "2 coalitions failed to train, client 1, clients 1 and 2"

    with pytest.warns(UserWarning, match=f"no values. {failed}: ZeroDivisionError"):
        loop, _ = fit_kind(Kind(callback=FailsWithoutClient0), tmp_path, metrics)

    assert loop.contributions["shadow"].isnan().all()
    assert loop.round_index == FIT_ROUNDS


class WeighsByUnseededNumbers(Manual):
    """Draws from what no seed sets."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if not self.training:
            return loss
        (random_byte,) = os.urandom(1)
        return loss * (1 + random_byte / 100)


def test_doubt_is_said_beside_the_values_if_the_full_coalition_differs_from_the_run(
    tmp_path: Path,
) -> None:
    message = "shadow: the coalition of all clients.*came to another model than the run.*first in"
    with pytest.warns(UserWarning, match=message):
        loop, _ = fit_kind(Kind(WeighsByUnseededNumbers), tmp_path, {"shadow": ShadowShapley()})

    assert not loop.contributions["shadow"].isnan().any()


@pytest.mark.slow
@pytest.mark.long
def test_fresh_process_tells_what_a_cache_of_the_run_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("helpers.kinds_of_attributes.LOSSES_BY_ROUND", {})
    metric = ShadowShapley(coalitions="singles", verify="all")

    with pytest.warns(UserWarning, match="trained in a fresh process, has another score.*a cache"):
        loop, _ = fit_kind(Kind(GlobalCache), tmp_path, {"shadow": metric})

    assert not loop.contributions["shadow"].isnan().any()


class StopsAlone(L.Callback):
    """Ends the training of a coalition after its first round, as an early stopping of one's own may."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if len(federated_loop_of(trainer).state.cohort) == 1:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = 0


def test_coalition_trains_as_many_rounds_as_the_run_whatever_stops_it(tmp_path: Path) -> None:
    games = []
    for callback in (None, StopsAlone):
        metric = Recorded(coalitions="all", performance="negative_loss")
        loop, _ = fit_kind(Kind(callback=callback), tmp_path, {"shadow": metric})
        metric_of_run: Any = loop.metrics["shadow"]
        games.append(metric_of_run.game)

    game, game_with_stops = games
    assert torch.equal(game_with_stops, game)
