"""ShadowShapley trains each coalition alone: random numbers, failures, warnings, and one coalition ends early."""

import lightning as L
import pytest
import torch

from flsv.metrics.coalitions.design import coalition_masks, design_within, equivalent_runs
from helpers.coalition_kinds import Manual, Module
from helpers.coalitions_by_hand import FIT_ROUNDS, make_shadow_loop, make_three_clients
from helpers.fits import fit
from helpers.models import loop_of
from helpers.recorded import Recorded


def fit_module(folder, metric, module=None, callbacks=()):
    loop = make_shadow_loop(metric)
    fit(
        loop,
        folder,
        module or Module(),
        make_three_clients(),
        FIT_ROUNDS,
        callbacks=callbacks,
    )
    return loop


@pytest.mark.parametrize(
    ("max_fits", "clients", "costs"),
    [(10, 4, 7.0), (10, 5, 9.0), (15, 5, 15.0), (10, 6, 6.0), (10, 12, 1.0)],
)
def test_design_within_max_fits_has_the_expected_cost(max_fits, clients, costs):
    assert equivalent_runs(coalition_masks(design_within(max_fits, clients), clients)) == costs


class DrawsItsScore(Manual):
    def validation_step(self, batch, batch_idx):
        self.log("luck", torch.rand(()))


@pytest.mark.slow
def test_all_coalitions_are_scored_with_the_same_random_numbers(tmp_path):
    recorded = Recorded(coalitions="all", performance="luck", mode="max")
    fit_module(tmp_path, recorded, DrawsItsScore())

    utilities_of_trained = recorded.utilities[1:]  # those of the seven coalitions but the empty one
    assert len(utilities_of_trained) == 7
    assert (utilities_of_trained == utilities_of_trained[0]).all()


class StopsAlone(L.Callback):
    """Ends the training of a coalition after its first round, as an early stopping of one's own may."""

    def on_train_epoch_end(self, trainer, pl_module):
        if len(loop_of(pl_module).state.cohort) == 1:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = 0


@pytest.mark.slow
def test_coalition_trains_as_many_rounds_as_the_run_whatever_stops_it(tmp_path):
    games = []
    for callbacks in ([], [StopsAlone()]):
        metric = Recorded(coalitions="all", performance="negative_loss")
        fit_module(tmp_path, metric, callbacks=callbacks)
        games.append(metric.utilities)

    game, game_with_stops = games
    assert torch.equal(game_with_stops, game)
