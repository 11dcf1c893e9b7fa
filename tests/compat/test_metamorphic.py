"""What must hold of values whatever the module keeps: the order of clients, equal clients, the sum."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flsv import FederatedDataModule, FederatedLoop
from flsv.metrics import (
    ClassSpecificShapley,
    CosineGradientShapley,
    CumulativeShapley,
    DecayedShapley,
    GradientAgreement,
    LeaveOneOut,
    OneRoundShapley,
    PartialFederatedShapley,
    ShadowShapley,
    SurrogateFederatedShapley,
)
from helpers import make_generator
from helpers.fits import fit
from helpers.hidden_state import Base
from helpers.kinds_of_modules import NearItsAverage


class TwoRates(Base):
    """Has two optimizers of unequal rates, and a loss that is annealed by epochs."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) / (self.current_epoch + 1)
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self):
        first_layer = torch.optim.SGD(self.net[0].parameters(), lr=0.05)
        later_layers = torch.optim.SGD(self.net[1:].parameters(), lr=0.1, momentum=0.9)
        return [first_layer, later_layers]


class WeighsByMeanLoss(Base):
    """Weighs its losses, also in validation, by their moving average."""

    def __init__(self):
        super().__init__()
        self.mean_loss = torch.tensor(1.0)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.mean_loss = self.mean_loss.lerp(loss.detach(), 0.5)
        return loss * self.mean_loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.loss(batch) * self.mean_loss)


MODULES: dict[str, Any] = {
    "averaged weights": NearItsAverage,
    "manual optimization": TwoRates,
    "a mean in an attribute": WeighsByMeanLoss,
}
METRICS = (
    CosineGradientShapley,
    ClassSpecificShapley,
    CumulativeShapley,
    DecayedShapley,
    GradientAgreement,
    LeaveOneOut,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)


def make_metrics() -> dict[str, Any]:
    """Every metric that needs neither an algorithm nor samples of its own."""
    metrics: dict[str, Any] = {}
    for metric in METRICS:
        metrics[metric.__name__] = metric()
    metrics["of one round"] = OneRoundShapley(rounds=2)
    metrics["trained"] = ShadowShapley(performance="val_loss", mode="min", coalitions="all")
    return metrics


def make_clients() -> dict[str, Any]:
    """Two clients, and one with the samples of the first."""
    generator = make_generator()
    clients = {}
    for name, size in (("A", 24), ("B", 16)):
        x = torch.randn(size, 6, generator=generator)
        y = x[:, :3].argmax(1)
        clients[name] = (x, y)
    clients["twin of A"] = clients["A"]
    return clients


def measure(
    folder: Path,
    make_module: Callable[[], Base],
    order: list[str],
) -> dict[str, dict[str, float]]:
    """Return the clients' values by metric and name."""
    torch.manual_seed(0)
    clients = make_clients()
    ordered_clients = {name: clients[name] for name in order}
    data = FederatedDataModule(
        clients=ordered_clients,
        val=clients["B"],
        batch_size=64,
    )
    loop = FederatedLoop(
        metrics=make_metrics(),
        seed=1,
        local_epochs=2,
    )
    fit(
        loop,
        folder,
        make_module(),
        data,
        rounds=2,
    )
    values = {}
    for name, contributions in loop.contributions.items():
        values[name] = dict(zip(order, contributions.tolist()))
    return values


@pytest.mark.parametrize("name", MODULES)
def test_values_do_not_depend_on_the_order_and_equal_clients_share(tmp_path, name):
    order = ["A", "B", "twin of A"]
    values_by_metric = measure(tmp_path / "1", MODULES[name], order)
    permuted_by_metric = measure(tmp_path / "2", MODULES[name], order[::-1])

    assert values_by_metric.keys() == make_metrics().keys()
    for metric, values in values_by_metric.items():
        expected_values = pytest.approx(values, abs=1e-4)
        assert permuted_by_metric[metric] == expected_values, metric
        expected_value = pytest.approx(values["A"], abs=1e-4)
        assert values["twin of A"] == expected_value, metric

    trained_values = values_by_metric["trained"]
    assert trained_values["A"] != pytest.approx(trained_values["B"], abs=1e-3)
    path = tmp_path / "1" / "run.json"
    record = json.loads(path.read_text())
    scores = record["paid_in"]["trained"]
    gain = scores["start"] - scores["end"]
    total = sum(trained_values.values())
    assert total == pytest.approx(gain, abs=1e-4)
