"""A user's callback that averages weights batch by batch, as in a Trainer's own loop, is named."""

import copy
import warnings

import lightning as L
import pytest
from lightning.pytorch.callbacks import LearningRateMonitor

from flsv.federation import FederatedLoop
from helpers import warns
from helpers.fits import fit

pytestmark = pytest.mark.slow


class AveragesInList(L.Callback):
    """Averages the weights after each batch, as in a Trainer's own loop."""

    average = None

    def copy_weights(self, module):
        return list(module.parameters())

    def averaged_tensors(self):
        return self.average

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.average is None:
            self.average = copy.deepcopy(self.copy_weights(pl_module))
        for average, parameter in zip(self.averaged_tensors(), pl_module.parameters()):
            average.data.lerp_(parameter.detach(), 0.1)


class AveragesByName(AveragesInList):
    def copy_weights(self, module):
        return dict(module.named_parameters())

    def averaged_tensors(self):
        return self.average.values()


class AveragesInNetwork(AveragesInList):
    def copy_weights(self, module):
        return module.net

    def averaged_tensors(self):
        return self.average.parameters()


@pytest.mark.by_turn
@pytest.mark.parametrize("make_callback", [AveragesInList, AveragesByName, AveragesInNetwork])
def test_callback_that_averages_weights_of_clients_in_turn_is_named(make_callback, tmp_path):
    with warns(
        r"Averages\w+ changes weights of its own while a client trains.* one chain over all"
    ):
        fit(FederatedLoop(seed=1), tmp_path, rounds=1, callbacks=[make_callback()])


class RemembersTheStart(L.Callback):
    """Keeps the weights with which each client begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.initial_weights = copy.deepcopy(list(pl_module.parameters()))


@pytest.mark.parametrize("make_callback", [RemembersTheStart, LearningRateMonitor])
def test_callback_without_an_average_is_not_named(make_callback, tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*weights of its own")
        fit(FederatedLoop(seed=1), tmp_path, rounds=1, callbacks=[make_callback()], logger=True)
