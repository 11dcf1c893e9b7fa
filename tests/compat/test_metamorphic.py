"""What must hold of values whatever the module keeps: the order of clients, equal clients, the sum."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

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
from helpers.fits import fit
from helpers.models import Plain, adam, network, sgd


class Weighs(nn.Module):
    """A plain layer without parameters of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


class Average:
    """A moving average of weights, as in libraries."""

    def __init__(self, parameters: Any) -> None:
        self.shadows = [parameter.detach().clone() for parameter in parameters]

    def update(self, parameters: Any) -> None:
        for shadow, parameter in zip(self.shadows, parameters):
            shadow.lerp_(parameter.detach(), 0.3)


class ValidatesAverage(Plain):
    """Validates the moving average of its weights, which it keeps in a plain object."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 3))
        self.average = Average(self.parameters())

    def on_train_batch_end(self, *_: Any) -> None:
        self.average.update(self.parameters())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = nn.functional.linear(x, *self.average.shadows)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss)


class LogsLoss(Plain):
    """A plain module that logs its validation loss."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)


class ReplacesLayer(LogsLoss):
    """Replaces a layer and freezes another one when a client trains."""

    def __init__(self) -> None:
        super().__init__(network(batch_norm=True))
        self.output_layer: nn.Module = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.output_layer(self.net(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.output_layer = Weighs()
        self.net[0].requires_grad_(False)
        return loss


class ByHand(LogsLoss):
    """Optimizes by hand, with two optimizers of unequal rates and a loss that is annealed by epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        epoch_number = self.current_epoch + 1
        loss = super().training_step(batch, batch_idx) / epoch_number
        optimizers = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()

    def configure_optimizers(self) -> Any:
        first_layer = torch.optim.SGD(self.net[0].parameters(), lr=0.05)
        later_layers = sgd(self.net[1:].parameters())
        return [first_layer, later_layers]


class Scheduled(LogsLoss):
    """Has Adam and a rate that falls by epochs."""

    def __init__(self) -> None:
        super().__init__(
            network(batch_norm=False),
            optimizer=adam,
            scheduler=partial(ExponentialLR, gamma=0.5),
        )


class Remembers(Plain):
    """Weighs its loss by a running mean in an attribute and collects losses in a list."""

    def __init__(self) -> None:
        super().__init__(network(batch_norm=False))
        self.mean_loss = torch.tensor(1.0)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean_loss = self.mean_loss.lerp(loss.detach(), 0.5)
        self.losses.append(loss.item())
        return loss * self.mean_loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss * self.mean_loss)


MODULES = (ValidatesAverage, ReplacesLayer, ByHand, Scheduled, Remembers)
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
    metrics["trained"] = ShadowShapley(performance="loss", mode="min", coalitions="all")
    return metrics


def make_clients() -> dict[str, Any]:
    """Two clients, and one with the samples of the first."""
    generator = torch.Generator().manual_seed(0)
    clients = {}
    for name, size in (("A", 24), ("B", 16)):
        x = torch.randn(size, 6, generator=generator)
        y = x[:, :3].argmax(1)
        clients[name] = (x, y)
    clients["twin of A"] = clients["A"]
    return clients


def measure(
    folder: Path,
    module: type[Plain],
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
        module(),
        data,
        rounds=2,
    )
    values = {}
    for name, contributions in loop.contributions.items():
        values[name] = dict(zip(order, contributions.tolist()))
    return values


@pytest.mark.parametrize("module", MODULES)
def test_values_do_not_depend_on_the_order_and_equal_clients_share(
    tmp_path: Path, module: type[Plain]
) -> None:
    order = ["A", "B", "twin of A"]
    values_by_metric = measure(tmp_path / "1", module, order)
    permuted_by_metric = measure(tmp_path / "2", module, order[::-1])

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
