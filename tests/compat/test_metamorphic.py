"""What must hold of values whatever the module keeps: the order of clients, equal clients, the sum."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv import FederatedDataModule, FederatedLoop
from flsv.metrics import CosineGradientShapley, ShadowShapley
from helpers.fits import fit
from helpers.models import Plain, network


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


class ReplacesLayer(Plain):
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

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("loss", loss)


MODULES = (ValidatesAverage, ReplacesLayer)
METRICS: dict[str, Callable[[], Any]] = {
    "trained": lambda: ShadowShapley(performance="loss", mode="min", coalitions="all"),
    "cosine": CosineGradientShapley,
}


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
    metric: str,
    *,
    order: list[str],
) -> dict[str, float]:
    """Return the clients' values by name."""
    torch.manual_seed(0)
    clients = make_clients()
    ordered_clients = {name: clients[name] for name in order}
    data = FederatedDataModule(
        clients=ordered_clients,
        val=clients["B"],
        batch_size=64,
    )
    make_metric = METRICS[metric]
    loop = FederatedLoop(
        metrics={"v": make_metric()},
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
    values = loop.contributions["v"].tolist()
    return dict(zip(order, values))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("module", MODULES)
def test_values_do_not_depend_on_the_order_and_equal_clients_share(
    tmp_path: Path,
    module: type[Plain],
    metric: str,
) -> None:
    order = ["A", "B", "twin of A"]
    values = measure(
        tmp_path / "1",
        module,
        metric,
        order=order,
    )
    permuted_values = measure(
        tmp_path / "2",
        module,
        metric,
        order=order[::-1],
    )

    assert permuted_values == pytest.approx(values, abs=1e-4)
    assert values["A"] == pytest.approx(values["twin of A"], abs=1e-4)
    assert values["A"] != pytest.approx(values["B"], abs=1e-3)

    if metric == "trained":
        path = tmp_path / "1" / "run.json"
        record = json.loads(path.read_text())
        scores = record["paid_in"]["v"]
        gain = scores["start"] - scores["end"]
        total = sum(values.values())
        assert total == pytest.approx(gain, abs=1e-4)
