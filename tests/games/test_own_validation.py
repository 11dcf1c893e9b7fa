"""What a copy of the module logs is compared with what the run's own validation logs."""

import warnings
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedLoop
from flsv.metrics import CumulativeShapley, ShadowShapley
from flsv.results.round_result import UNLIKE_RUN
from helpers.data import CLASSES, FEATURES, toy_data
from helpers.fits import fit
from helpers.models import Plain, network


class Logs(Plain):
    """It logs its loss when it validates."""

    def __init__(self):
        super().__init__(network(batch_norm=False))

    def value(self, batch) -> Tensor:
        x, y = batch
        logits = self(x)
        return nn.functional.cross_entropy(logits, y)

    def validation_step(self, batch, batch_idx):
        loss = self.value(batch)
        self.log("val_loss", loss)


class Carry(nn.Module):
    """It adds up its inputs until all layers in the list of its class are reset."""

    layers: ClassVar[list[tuple["Carry"]]] = []

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(1), persistent=False)
        self.layers.append((self,))

    def forward(self, x):
        mean = x.detach().mean(0, keepdim=True)
        self.total = self.total + mean
        return x + self.total


class Registry(Logs):
    """Its forward resets the layers in tuples of their class, in which no copy is."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8),
            Carry(),
            nn.Tanh(),
            nn.Linear(8, CLASSES),
        )

    def forward(self, x):
        for (layer,) in Carry.layers:
            layer.total = torch.zeros(1)

        return self.net(x) + self.net(x)


class LateRegistry(Registry):
    """Only in its third round the layers are those of the list."""

    def forward(self, x):
        if self.current_epoch >= 2:
            return super().forward(x)
        for layer in self.modules():
            if isinstance(layer, Carry):
                layer.total = torch.zeros(1)

        return self.net(x) + self.net(x)


class DependsOnMore(Logs):
    """Its values depend on random numbers, the epoch, and the numbers of rounds and validations so far."""

    num_rounds = 1
    num_validations = 0

    def on_train_epoch_end(self):
        self.num_rounds += 1

    def on_validation_start(self):
        self.num_validations += 1

    def value(self, batch) -> Tensor:
        factor = self.current_epoch + self.num_rounds + self.num_validations
        return factor * super().value(batch) + torch.rand(())


class RandomInputs(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = torch.randn_like(x)
        return x + noise, y


class OwnLoader(Logs):
    """Its own validation has other batches in every round."""

    def on_fit_start(self):
        data = self.trainer.datamodule
        batches = data.val_dataloader()
        x, y = map(torch.cat, zip(*batches))
        samples = RandomInputs(x, y)
        loader = DataLoader(samples, batch_size=8)
        data.val_dataloader = lambda: loader


def fit_module(
    module,
    folder: Path,
    performance: str,
    metric=CumulativeShapley,
    rounds: int = 4,
    **options,
) -> tuple[FederatedLoop, list[str]]:
    """Return the loop, and what is said of copies."""
    mode = "min" if performance == "val_loss" else None
    metrics = {"value": metric(performance=performance, mode=mode)}
    loop = FederatedLoop(metrics=metrics, seed=1)
    data = toy_data(server_val=0.2)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        fit(loop, folder, module, data, rounds, **options)

    messages = [str(warning.message) for warning in caught_warnings]
    return loop, [message for message in messages if "scored in copies" in message]


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("make", "performance", "round_number"),
    [
        (Registry, "val_loss", 1),
        (Registry, "negative_loss", 1),
        (LateRegistry, "val_loss", 3),
        (LateRegistry, "negative_loss", 4),
    ],
)
def test_copies_that_lack_something_are_told_once(make, performance, round_number, tmp_path):
    loop, messages = fit_module(make(), tmp_path, performance)

    (message,) = messages
    assert f"round {round_number}, a copy logs val_loss" in message
    events = [event for event in loop._fit.reports._events() if event.what == UNLIKE_RUN]
    (event,) = events
    assert "a copy logs val_loss" in event.text


KINDS = {
    "random numbers, the epoch and counts": (DependsOnMore, {}),
    "random batches": (OwnLoader, {}),
    "a part of the batches": (Logs, {"limit_val_batches": 1}),
    "every other round": (Logs, {"check_val_every_n_epoch": 2}),
    "a weight average": (Logs, {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metric", "performance"),
    [(CumulativeShapley, "val_loss"), (ShadowShapley, "negative_loss")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_score_as_the_run_have_no_warning(kind, metric, performance, tmp_path):
    make, options = KINDS[kind]

    _, messages = fit_module(make(), tmp_path, performance, metric=metric, rounds=2, **options)

    assert messages == []
