"""A user's callback that averages weights batch by batch, as in a Trainer's own loop, is named."""

import copy
import warnings

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor

from flsv.federation import FederatedLoop
from helpers import warns
from helpers.fits import fit


def copies_in_list(module):
    return copy.deepcopy(list(module.parameters()))


def copies_by_name(module):
    return copy.deepcopy(dict(module.named_parameters()))


def copied_network(module):
    return copy.deepcopy(module.net)


class OwnAverage(L.Callback):
    """Averages the weights after each batch, as in a Trainer's own loop, in tensors that ``copies_of`` makes."""

    def __init__(self, copies_of):
        self.copies_of = copies_of
        self.average = None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if self.average is None:
            self.average = self.copies_of(pl_module)
        averages = self.average
        if isinstance(averages, torch.nn.Module):
            averages = averages.parameters()
        elif isinstance(averages, dict):
            averages = averages.values()
        for average, parameter in zip(averages, pl_module.parameters()):
            average.data.lerp_(parameter.detach(), 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("copies_of", [copies_in_list, copies_by_name, copied_network])
def test_callback_that_averages_weights_of_clients_in_turn_is_named(copies_of, tmp_path):
    average = OwnAverage(copies_of)

    with warns("OwnAverage changes weights of its own while a client trains.* one chain over all"):
        fit(FederatedLoop(seed=1), tmp_path, rounds=1, callbacks=[average])


class RemembersTheStart(L.Callback):
    """Keeps the weights with which each client begins."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 0:
            self.initial_weights = copy.deepcopy(list(pl_module.parameters()))


@pytest.mark.slow
@pytest.mark.parametrize("make_callback", [RemembersTheStart, LearningRateMonitor])
def test_callback_without_an_average_is_not_named(make_callback, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(FederatedLoop(seed=1), tmp_path, rounds=1, callbacks=[make_callback()], logger=True)

    assert not any("weights of its own" in str(warning.message) for warning in caught)
