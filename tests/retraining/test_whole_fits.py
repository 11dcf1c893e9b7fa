"""ShadowShapley trains each coalition alone: random numbers, failures, doubts, and ends that are one coalition's."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from flsv import FederatedLoop, Reporting
from flsv.games.members import Members
from flsv.metrics import ShadowShapley
from flsv.metrics.coalitions.design import coalition_masks, design_within, equivalent_runs
from helpers.coalition_kinds import Manual, Module
from helpers.coalitions_by_hand import FIT_ROUNDS, SEED, make_three_clients
from helpers.fits import trainer_for
from helpers.hidden_state import Base
from helpers.recorded import Recorded

QUIET = Reporting(table=False)


def fit(
    folder: Path,
    metrics: dict[str, Any],
    module: Callable[[], L.LightningModule] = Module,
    callbacks: Sequence[L.Callback] = (),
) -> FederatedLoop:
    loop = FederatedLoop(
        metrics=metrics,
        seed=SEED,
        reporting=QUIET,
    )
    trainer = trainer_for(loop, folder, FIT_ROUNDS, callbacks=list(callbacks))
    trainer.fit(module(), make_three_clients())
    return loop


@pytest.mark.parametrize(
    ("max_fits", "clients", "costs"),
    [(10, 4, 7.0), (10, 5, 9.0), (15, 5, 15.0), (10, 6, 6.0), (10, 12, 1.0)],
)
def test_design_within_max_fits_has_the_expected_cost(max_fits, clients, costs):
    assert equivalent_runs(coalition_masks(design_within(max_fits, clients), clients)) == costs


def federated_loop_of(trainer: L.Trainer) -> Any:
    callbacks = trainer.callbacks
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


def test_divergence_of_one_coalition_changes_no_other_coalitions_score(tmp_path):
    utilities_by_module: dict[Any, dict[Members, float]] = {}
    for module in (Manual, DivergesForClient1Alone):
        recorded = Recorded(coalitions="all", performance="negative_loss")
        loop = fit(tmp_path, {"shadow": recorded}, module)
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
    def validation_step(self, batch, batch_idx):
        self.log("luck", torch.rand(()))


def test_all_coalitions_are_scored_with_the_same_random_numbers(tmp_path):
    recorded = Recorded(coalitions="all", performance="luck", mode="max")
    loop = fit(tmp_path, {"shadow": recorded}, DrawsItsScore)
    metric: Any = loop.metrics["shadow"]

    utilities_of_trained = metric.game[1:]  # those of the seven coalitions but the empty one
    assert len(utilities_of_trained) == 7
    assert (utilities_of_trained == utilities_of_trained[0]).all()


class FailsWithoutClient0(L.Callback):
    """Fails when client 1 trains, in coalitions without client 0, after the first round."""

    def on_train_batch_end(self, trainer, *args):
        loop = federated_loop_of(trainer)
        is_alone = loop.current_client == 1 and 0 not in loop.state.cohort
        if is_alone and loop.round_index:
            raise ZeroDivisionError("nobody there")


def test_failed_coalitions_end_no_run(tmp_path):
    metrics: dict[str, Any] = {"shadow": ShadowShapley(coalitions="all")}
    failed = "2 coalitions failed to train, client 1, clients 1 and 2"

    with pytest.warns(UserWarning, match=f"no values. {failed}: ZeroDivisionError"):
        loop = fit(tmp_path, metrics, callbacks=[FailsWithoutClient0()])

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
    tmp_path,
):
    message = "shadow: the coalition of all clients.*came to another model than the run.*first in"
    with pytest.warns(UserWarning, match=message):
        loop = fit(tmp_path, {"shadow": ShadowShapley()}, WeighsByUnseededNumbers)

    assert not loop.contributions["shadow"].isnan().any()


#: An object of a library, which is not put back.
CACHE = SimpleNamespace(losses={})


class ReadsCache(Base):
    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        first_loss = CACHE.losses.setdefault(self.current_epoch, float(loss))
        return loss / (1 + first_loss)


@pytest.mark.slow
@pytest.mark.long
def test_fresh_process_tells_what_a_cache_of_the_run_has_changed(
    tmp_path,
):
    CACHE.losses.clear()
    metric = ShadowShapley(coalitions="singles", verify="all")

    with pytest.warns(UserWarning, match="trained in a fresh process, has another score.*a cache"):
        loop = fit(tmp_path, {"shadow": metric}, ReadsCache)

    assert not loop.contributions["shadow"].isnan().any()


class StopsAlone(L.Callback):
    """Ends the training of a coalition after its first round, as an early stopping of one's own may."""

    def on_train_epoch_end(self, trainer, pl_module):
        if len(federated_loop_of(trainer).state.cohort) == 1:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = 0


def test_coalition_trains_as_many_rounds_as_the_run_whatever_stops_it(tmp_path):
    games = []
    for callbacks in ([], [StopsAlone()]):
        metric = Recorded(coalitions="all", performance="negative_loss")
        loop = fit(tmp_path, {"shadow": metric}, callbacks=callbacks)
        metric_of_run: Any = loop.metrics["shadow"]
        games.append(metric_of_run.game)

    game, game_with_stops = games
    assert torch.equal(game_with_stops, game)
