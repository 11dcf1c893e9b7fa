"""What a copy of the module logs is compared with what the run's own validation logs."""

import warnings
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedLoop
from flsv.metrics import CumulativeShapley, ShadowShapley
from flsv.results.round_result import UNLIKE_RUN
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import all_samples, fit
from helpers.models import Plainest


class LogsLoss(Plainest):
    """Logs its loss when it validates."""

    def validation_loss(self, batch):
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.validation_loss(batch))


class AddsUpInputs(nn.Module):
    """Adds the mean of all inputs since the last reset. A list of the class has each layer, and no copy of it."""

    layers: ClassVar[list[tuple["AddsUpInputs"]]] = []

    def __init__(self):
        super().__init__()
        self.reset()
        self.layers.append((self,))

    def reset(self):
        self.register_buffer("total", torch.zeros(1), persistent=False)

    def forward(self, x):
        self.total = self.total + x.detach().mean(0, keepdim=True)
        return x + self.total


class ResetsListedLayers(LogsLoss):
    """Its forward resets the layers in the list of their class, so the layer of a copy is never reset."""

    def __init__(self):
        super().__init__()
        self.adding_layer = AddsUpInputs()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), self.adding_layer, nn.Tanh(), nn.Linear(8, CLASSES)
        )

    def forward(self, x):
        for (layer,) in AddsUpInputs.layers:
            layer.reset()
        return self.net(x) + self.net(x)


class ResetsListedLayersFromRound3(ResetsListedLayers):
    """Before, it resets its own layer, and a copy does the same with its own."""

    def forward(self, x):
        if self.current_epoch < 2:
            self.adding_layer.reset()
            return self.net(x) + self.net(x)
        return super().forward(x)


class LogsNoiseAndCounts(LogsLoss):
    """Its values depend on random numbers, the epoch, and the numbers of rounds and validations so far."""

    num_rounds = 1
    num_validations = 0

    def on_train_epoch_end(self):
        self.num_rounds += 1

    def on_validation_start(self):
        self.num_validations += 1

    def validation_loss(self, batch):
        factor = self.current_epoch + self.num_rounds + self.num_validations
        return factor * super().validation_loss(batch) + torch.rand(())


class AddsNoiseToInputs(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x + torch.randn_like(x), y


class ValidatesOnNoisyInputs(LogsLoss):
    """Its validation has other batches in every round."""

    def on_fit_start(self):
        data = self.trainer.datamodule
        x, y = all_samples(data.val_dataloader())
        loader = DataLoader(AddsNoiseToInputs(x, y), batch_size=8)
        data.val_dataloader = lambda: loader


def fit_module(module, folder, performance, metric=CumulativeShapley, rounds=4, **options):
    """Return the loop, and the warnings about copies."""
    mode = "min" if performance == "val_loss" else None
    metrics = {"value": metric(performance=performance, mode=mode)}
    loop = FederatedLoop(metrics=metrics, seed=1)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        fit(loop, folder, module, toy_data(server_val=0.2), rounds, **options)

    messages = [str(warning.message) for warning in caught_warnings]
    return loop, [message for message in messages if "scored in copies" in message]


@pytest.mark.by_turn
@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("make", "performance", "round_number"),
    [
        (ResetsListedLayers, "val_loss", 1),
        (ResetsListedLayers, "negative_loss", 1),
        (ResetsListedLayersFromRound3, "val_loss", 3),
        (ResetsListedLayersFromRound3, "negative_loss", 4),
    ],
)
def test_copy_that_logs_another_value_than_the_run_is_reported_once(
    make, performance, round_number, tmp_path
):
    loop, messages = fit_module(make(), tmp_path, performance)

    (message,) = messages
    assert f"round {round_number}, a copy logs val_loss" in message
    events = [event for event in loop._fit.reports._events() if event.what == UNLIKE_RUN]
    assert len(events) == 1
    assert "a copy logs val_loss" in events[0].text


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "performance"), [(CumulativeShapley, "val_loss"), (ShadowShapley, "negative_loss")]
)
@pytest.mark.parametrize(
    ("make", "options"),
    [
        pytest.param(LogsNoiseAndCounts, {}, id="random numbers, the epoch and counts"),
        pytest.param(ValidatesOnNoisyInputs, {}, id="random batches"),
        pytest.param(LogsLoss, {"limit_val_batches": 1}, id="a part of the batches"),
        pytest.param(LogsLoss, {"check_val_every_n_epoch": 2}, id="every other round"),
        pytest.param(LogsLoss, {"callbacks": [EMAWeightAveraging(decay=0.5)]}, id="average"),
    ],
)
def test_copies_that_log_the_values_of_the_run_have_no_warning(
    make, options, metric, performance, tmp_path
):
    _, messages = fit_module(make(), tmp_path, performance, metric=metric, rounds=2, **options)

    assert messages == []
