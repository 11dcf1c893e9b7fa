"""Scoring leaves no trace in module, optimizers, schedulers and data module, or the metric is refused."""

from __future__ import annotations

import itertools
from typing import Any

import lightning as L
import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR

from flsv import FederatedDataModule, FederatedLoop, Reporting, value_round
from flsv.metrics import CumulativeShapley, PartialFederatedShapley, ShadowShapley
from flsv.utilities.errors import ConfigurationError

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(48, 5, generator=GENERATOR)
Y = X[:, :3].argmax(1)


class Slots:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


def make_counter() -> Any:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


class Noisy(L.LightningModule):
    """A module whose loss depends on state that each call of ``draw`` changes."""

    count = 0

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = torch.nn.Linear(5, 3)
        self.kind = kind
        self.hidden: Any = HIDDEN[kind]()
        self.rates: list[list[float]] = []

    def draw(self) -> float:
        return CHANGES[self.kind](self, self.hidden)

    def loss(self, batch: Any) -> torch.Tensor:
        x, y = batch
        # Counts are drawn in sevenths, so that their fractional parts differ.
        noise = 0.1 * (self.draw() % 1)
        return F.cross_entropy(self.net(x + noise), y)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        group = optimizer.param_groups[0]
        self.rates.append([group["lr"], group["weight_decay"]])
        return self.loss(batch)

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = SGD(self.parameters(), lr=0.3, weight_decay=0.1)
        scheduler = ExponentialLR(optimizer, 0.9)
        return [optimizer], [scheduler]


def add_to_class(module: Any, hidden: Any) -> float:
    type(module).count += 1
    return type(module).count / 7


def add_to_slots(module: Any, hidden: Any) -> float:
    hidden.count += 1
    return hidden.count / 7


def add_to_data(module: Any, hidden: Any) -> float:
    hidden.data.add_(1)
    return float(hidden) / 7


def add_to_memory(module: Any, hidden: Any) -> float:
    hidden.numpy()[0] += 1
    return float(hidden) / 7


def draw_next(module: Any, hidden: Any) -> float:
    return next(hidden) / 7


def draw_from_table(module: Any, hidden: Any) -> float:
    hidden.iloc[0] += 1
    return hidden.iloc[0] / 7


def count_up() -> Any:
    number = 0
    while True:
        number += 1
        yield number


def replace_data(module: Any, hidden: Any) -> float:
    hidden.data = hidden + 1
    return float(hidden) / 7


HIDDEN: dict[str, Any] = {
    "torch": lambda: torch.Generator().manual_seed(1),
    "numpy": lambda: np.random.default_rng(1),
    "slots": Slots,
    "closure": make_counter,
    "class": lambda: None,
    "stream": count_up,
    "count": itertools.count,
    "table": lambda: pandas.Series([0.0]),
    "data": lambda: torch.zeros(1),
    "memory": lambda: torch.zeros(1),
    "storage": lambda: torch.zeros(1),
}
CHANGES: dict[str, Any] = {
    "torch": lambda module, hidden: float(torch.rand(1, generator=hidden)),
    "numpy": lambda module, hidden: hidden.random(),
    "slots": add_to_slots,
    "closure": lambda module, hidden: hidden() / 7,
    "class": add_to_class,
    "stream": draw_next,
    "count": draw_next,
    "table": draw_from_table,
    "data": add_to_data,
    "memory": add_to_memory,
    "storage": replace_data,
}


def play_game(module: L.LightningModule, metric: Any = None) -> Any:
    clients = {
        "a": (X[:16], Y[:16]),
        "b": (X[16:32], Y[16:32]),
    }
    validation = X[32:], Y[32:]
    data = FederatedDataModule(clients=clients, val=validation, batch_size=8)
    metrics = {} if metric is None else {"mine": metric}
    reporting = Reporting(table=False, files=False)
    trainer = L.Trainer(
        max_epochs=3,
        callbacks=[FederatedLoop(seed=0, metrics=metrics, reporting=reporting)],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, data)

    return data


METRICS = {
    "partial": lambda: PartialFederatedShapley(performance="val_loss", mode="min"),
    "cumulative": lambda: CumulativeShapley(performance="val_loss", mode="min"),
    "shadow": lambda: ShadowShapley(performance="val_loss", mode="min", coalitions="all"),
}


@pytest.mark.parametrize("kind", [kind for kind in HIDDEN if kind not in ("class", "stream")])
def test_hidden_state_is_the_same_with_and_without_a_metric(kind: str) -> None:
    models = []
    for metric in (None, METRICS["partial"]()):
        Noisy.count = 0
        module = Noisy(kind)
        play_game(module, metric)
        models.append(module.net.weight.detach())

    assert torch.equal(*models)


class ChangesPartsOfTheRun(Noisy):
    """Changes the run's optimizer, scheduler and data module after validation, which a metric's validations must not
    do."""

    def __init__(self) -> None:
        super().__init__("class")

    def draw(self) -> float:
        return 0.0

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            return

        # The learning rate, by the scheduler.
        scheduler: Any = self.lr_schedulers()
        scheduler.step()

        # The weight decay, in the optimizer.
        optimizer: Any = self.optimizers()
        optimizer.param_groups[0]["weight_decay"] *= 2

        # An attribute of the data module.
        trainer: Any = self.trainer
        data = trainer.datamodule
        data.num_validations = getattr(data, "num_validations", 0) + 1


@pytest.mark.parametrize("metric", METRICS)
def test_rates_decays_and_data_modules_are_those_without_the_metric(metric: str) -> None:
    plain = ChangesPartsOfTheRun()
    scored = ChangesPartsOfTheRun()
    plain_data = play_game(plain)
    scored_data = play_game(scored, METRICS[metric]())

    assert scored.rates == plain.rates
    assert scored_data.num_validations == plain_data.num_validations
    assert len({rate for rate, _ in plain.rates}) == 3  # one of each round


REFUSED = {
    "class": "one model, scored twice, has two scores. validation, which logs 'val_loss', of Noisy",
    "stream": r"the module.hidden \(generator\) cannot be pickled",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_state_that_copies_would_share_is_refused_before_the_first_round(kind: str) -> None:
    module = Noisy(kind)

    with pytest.raises(ConfigurationError, match=REFUSED[kind]):
        play_game(module, METRICS["partial"]())

    assert not module.rates  # they are recorded in each step of training


@pytest.mark.parametrize("kind", ["torch", "numpy", "slots"])
def test_equal_models_have_equal_values(kind: str) -> None:
    module = Noisy(kind)
    initial = {name: value.clone() for name, value in module.state_dict().items()}
    trained = {name: value + 0.1 for name, value in initial.items()}
    two_equal_models = [trained, trained]
    validation_batches = [[X[32:], Y[32:]]]
    metric = PartialFederatedShapley(performance="val_loss", mode="min")

    values = value_round(
        module,
        initial,
        two_equal_models,
        validation_batches,
        metrics=metric,
    )

    value_of_one, value_of_other = values["PartialFederatedShapley"].tolist()

    assert value_of_one == value_of_other
