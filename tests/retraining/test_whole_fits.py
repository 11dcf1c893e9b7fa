"""ShadowShapley trains each coalition alone: its costs, random numbers, and ends that are one coalition's."""

import lightning as L
import pytest
import torch
from retraining.recorded import Recorded

from flsv.metrics.coalitions.design import coalition_masks, design_within, equivalent_runs
from helpers.models import loop_of
from zoo.program import Base, fit_valued


@pytest.mark.parametrize(
    ("max_fits", "clients", "costs"),
    [
        (10, 4, 7.0),
        (10, 5, 9.0),
        (15, 5, 15.0),
        (10, 6, 6.0),
        (10, 12, 1.0),
    ],
)
def test_design_within_max_fits_has_the_expected_cost(max_fits, clients, costs):
    design = design_within(max_fits, clients)
    masks = coalition_masks(design, clients)
    assert equivalent_runs(masks) == costs


class DrawsItsScore(Base):
    def validation_step(self, batch, batch_idx):
        self.log("luck", torch.rand(()))


@pytest.mark.slow
def test_all_coalitions_are_scored_with_the_same_random_numbers(tmp_path):
    recorded = Recorded(coalitions="all", performance="luck", mode="max")
    fit_valued(tmp_path, DrawsItsScore(), metric=recorded)

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
        fit_valued(tmp_path, Base(), metric=metric, callbacks=callbacks)
        games.append(metric.utilities)

    game, game_with_stops = games
    assert torch.equal(game_with_stops, game)
