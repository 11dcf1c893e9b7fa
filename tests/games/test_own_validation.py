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
        net = network(batch_norm=False)
        super().__init__(net)
        self.num_validations = 0

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

        output = self.net(x)
        next_output = self.net(x)
        return output + next_output


class LateRegistry(Registry):
    """Only in its third round the layers are those of the list."""

    def forward(self, x):
        if self.current_epoch >= 2:
            return super().forward(x)
        for layer in self.modules():
            if isinstance(layer, Carry):
                layer.total = torch.zeros(1)

        output = self.net(x)
        next_output = self.net(x)
        return output + next_output


class Noisy(Logs):
    def value(self, batch) -> Tensor:
        loss = super().value(batch)
        return loss + torch.rand(())


class OfEpoch(Logs):
    def value(self, batch) -> Tensor:
        loss = super().value(batch)
        factor = 1 + self.current_epoch
        return loss * factor


class CountsValidations(Logs):
    def on_validation_start(self):
        self.num_validations += 1

    def value(self, batch) -> Tensor:
        loss = super().value(batch)
        return loss * self.num_validations


class ChangesAfterRound(Logs):
    scale = 1.0

    def on_train_epoch_end(self):
        self.scale += 1

    def value(self, batch) -> Tensor:
        loss = super().value(batch)
        return loss * self.scale


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
        fit(
            loop,
            folder,
            module=module,
            data=data,
            rounds=rounds,
            **options,
        )

    messages = []
    for warning in caught_warnings:
        message = str(warning.message)
        if "scored in copies" in message:
            messages.append(message)
    return loop, messages


@pytest.mark.fast_rows
@pytest.mark.parametrize("performance", ["val_loss", "negative_loss"])
@pytest.mark.parametrize("make", [Registry, LateRegistry])
def test_copies_that_lack_something_are_told_once(make, performance, tmp_path):
    module = make()
    loop, messages = fit_module(module, tmp_path, performance)

    (message,) = messages
    if make is Registry:
        round_number = 1
    elif performance == "val_loss":
        round_number = 3
    else:
        round_number = 4
    assert f"round {round_number}, a copy logs val_loss" in message

    fit_of_loop = loop._fit
    events = []
    for event in fit_of_loop.reports._events():
        if event.what == UNLIKE_RUN:
            events.append(event)
    (event_of_copies,) = events
    assert "a copy logs val_loss" in event_of_copies.text


KINDS = {
    "random numbers": (Noisy, {}),
    "random batches": (OwnLoader, {}),
    "the epoch": (OfEpoch, {}),
    "a count of validations": (CountsValidations, {}),
    "an attribute that a round changes": (ChangesAfterRound, {}),
    "a part of the batches": (Logs, {"limit_val_batches": 1}),
    "every other round": (Logs, {"check_val_every_n_epoch": 2}),
    "a weight average": (Logs, {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
}


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("metric", "performance"),
    [(CumulativeShapley, "val_loss"), (ShadowShapley, "negative_loss")],
)
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_score_as_the_run_have_no_warning(kind, metric, performance, tmp_path):
    make, options = KINDS[kind]
    module = make()

    _, messages = fit_module(
        module,
        tmp_path,
        performance=performance,
        metric=metric,
        rounds=2,
        **options,
    )

    assert messages == []
