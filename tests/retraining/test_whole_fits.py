"""ShadowShapley trains each coalition alone: its costs, random numbers, and ends that are one coalition's."""

import lightning as L
import pytest
import torch
from retraining.recorded import ShadowShapleyThatKeepsUtilities

from helpers.models import loop_of
from zoo.program import Base, fit_valued


class ModuleThatDrawsItsScore(Base):
    def validation_step(self, batch, batch_idx):
        self.log("luck", torch.rand(()))


@pytest.mark.slow
def test_all_coalitions_are_scored_with_the_same_random_numbers(tmp_path):
    metric = ShadowShapleyThatKeepsUtilities(coalitions="all", performance="luck", mode="max")
    fit_valued(tmp_path, ModuleThatDrawsItsScore(), metric=metric)

    _utility_of_untrained, *utilities = metric.utilities.tolist()
    num_coalitions_of_three_clients = 2**3 - 1
    different_utilities = set(utilities)
    assert len(utilities) == num_coalitions_of_three_clients
    assert len(different_utilities) == 1


class CallbackThatStopsSingleClients(L.Callback):
    """Ends the training of a single client after its first round, as an early stopping of one's own may."""

    def on_train_epoch_end(self, trainer, pl_module):
        if len(loop_of(pl_module).state.cohort) == 1:
            trainer.should_stop = True
            trainer.fit_loop.min_epochs = 0


def utilities_of_run(folder, *callbacks):
    metric = ShadowShapleyThatKeepsUtilities(coalitions="all", performance="negative_loss")
    fit_valued(folder, Base(), metric=metric, callbacks=callbacks)
    return metric.utilities


@pytest.mark.slow
def test_coalition_trains_as_many_rounds_as_the_run_if_a_callback_stops_it(tmp_path):
    utilities = utilities_of_run(tmp_path)
    utilities_with_stops = utilities_of_run(tmp_path, CallbackThatStopsSingleClients())

    # With a callback of the program, coalitions are trained one by one, else at once.
    torch.testing.assert_close(utilities_with_stops, utilities, rtol=1e-5, atol=1e-6)
