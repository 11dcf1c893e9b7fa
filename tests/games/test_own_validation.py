"""What a copy of the module logs is compared with what the run's own validation logs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

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

    def __init__(self) -> None:
        super().__init__(network(batch_norm=False))
        self.num_validations = 0

    def value(self, batch: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.value(batch))


class Carry(nn.Module):
    """It adds up its inputs until all layers in the list of its class are reset."""

    layers: ClassVar[list["Carry"]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1), persistent=False)
        self.layers.append(self)

    def forward(self, x: Tensor) -> Tensor:
        self.total = self.total + x.detach().mean(0, keepdim=True)
        return x + self.total


class Registry(Logs):
    """Its forward resets the layers in a list of their class, in which no copy is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 8), Carry(), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        for layer in Carry.layers:
            layer.total = torch.zeros(1)
        return self.net(x) + self.net(x)


class LateRegistry(Registry):
    """Only in its third round the layers are those of the list."""

    def forward(self, x: Tensor) -> Tensor:
        if self.current_epoch >= 2:
            return super().forward(x)
        for layer in self.modules():
            if isinstance(layer, Carry):
                layer.total = torch.zeros(1)
        return self.net(x) + self.net(x)


class Noisy(Logs):
    def value(self, batch: Any) -> Tensor:
        return super().value(batch) + torch.rand(())


class OfEpoch(Logs):
    def value(self, batch: Any) -> Tensor:
        return super().value(batch) * (1 + self.current_epoch)


class CountsValidations(Logs):
    def on_validation_start(self) -> None:
        self.num_validations += 1

    def value(self, batch: Any) -> Tensor:
        return super().value(batch) * self.num_validations


class ChangesAfterRound(Logs):
    scale = 1.0

    def on_train_epoch_end(self) -> None:
        self.scale += 1

    def value(self, batch: Any) -> Tensor:
        return super().value(batch) * self.scale


class RandomInputs(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn_like(x), y


class OwnLoader(Logs):
    """Its own validation has other batches in every round."""

    def on_fit_start(self) -> None:
        data: Any = self.trainer.datamodule
        x, y = map(torch.cat, zip(*data.val_dataloader()))
        loader = DataLoader(RandomInputs(x, y), batch_size=8)
        data.val_dataloader = lambda: loader


def fit_module(
    module: Any, folder: Path, performance: str, metric: Any = CumulativeShapley, **options: Any
) -> tuple[FederatedLoop, list[str]]:
    """Return the loop, and what is said of copies."""
    mode = "min" if performance == "val_loss" else None
    loop = FederatedLoop(metrics={"value": metric(performance=performance, mode=mode)}, seed=1)
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        fit(loop, folder, module, toy_data(server_val=0.2), rounds=4, **options)
    messages = [str(warning.message) for warning in caught_warnings]
    return loop, [message for message in messages if "scored in copies" in message]


@pytest.mark.parametrize("performance", ["val_loss", "negative_loss"])
@pytest.mark.parametrize("make", [Registry, LateRegistry])
def test_copies_that_lack_something_are_told_once(
    make: Callable[[], Any], performance: str, tmp_path: Path
) -> None:
    loop, messages = fit_module(make(), tmp_path, performance)

    (message,) = messages
    if make is Registry:
        round_number = 1
    else:
        round_number = 3 if performance == "val_loss" else 4
    assert f"round {round_number}, a copy logs val_loss" in message
    fit_of_loop: Any = loop._fit
    (event,) = [e for e in fit_of_loop.reports._events() if e.what == UNLIKE_RUN]
    assert "a copy logs val_loss" in event.text


KINDS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "plain": (Logs, {}),
    "random numbers": (Noisy, {}),
    "random batches": (OwnLoader, {}),
    "the epoch": (OfEpoch, {}),
    "a count of validations": (CountsValidations, {}),
    "an attribute that a round changes": (ChangesAfterRound, {}),
    "a part of the batches": (Logs, {"limit_val_batches": 1}),
    "every other round": (Logs, {"check_val_every_n_epoch": 2}),
    "a weight average": (Logs, {"callbacks": [EMAWeightAveraging(decay=0.5)]}),
}


@pytest.mark.parametrize("metric", [CumulativeShapley, ShadowShapley])
@pytest.mark.parametrize("performance", ["val_loss", "negative_loss"])
@pytest.mark.parametrize("kind", KINDS)
def test_copies_that_score_as_the_run_are_not_doubted(
    kind: str, performance: str, metric: Any, tmp_path: Path
) -> None:
    make, options = KINDS[kind]
    _, messages = fit_module(make(), tmp_path, performance, metric, **options)
    assert messages == []
