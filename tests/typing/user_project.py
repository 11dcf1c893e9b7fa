"""What somebody writes with flsv, under `mypy --strict`: a metric and an aggregator of their own, a run of
them, and values without a loop. tests/typing/test_typing.py checks it."""

from pathlib import Path

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import flsv
from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting, Round
from flsv.aggregation import Aggregator
from flsv.core.strategy import Contributions
from flsv.data import IIDPartitioner
from flsv.metrics import ContributionMetric
from flsv.metrics.base import latest


class UpdateSize(ContributionMetric):
    """How far each client moved in its last round."""

    per_class = False
    norms: Tensor

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("norms", torch.full((num_clients,), float("nan")), dist_reduce_fx=latest)

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self.norms[client_ids] = client_updates.norm(dim=1).to(self.norms)

    def compute(self) -> Tensor:
        return self.norms


class ShortestFirst(Aggregator):
    """Weights that fall with how far a client moved."""

    def __init__(self, metric: str, power: float = 1.0, *, server_lr: float = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.metric: str = metric
        self.power = power

    def weights(self, round: Round, contributions: Contributions) -> Tensor:
        values = contributions[self.metric][round.client_ids].nan_to_num(1.0).clamp(min=1e-6)
        return (values**-self.power) / (values**-self.power).sum()


def federation(data: TensorDataset, folder: Path) -> Tensor:
    """Train it for two rounds; the values of the metric."""
    loop = FederatedLoop(
        aggregator=ShortestFirst("norm", power=0.5),
        metrics={"norm": UpdateSize()},
        reporting=Reporting(table=False),
    )
    trainer = L.Trainer(
        max_epochs=2, callbacks=[loop], accelerator="cpu", logger=False, default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(
        ClassifierClient("mlp"),
        FederatedDataModule(data, partitioner=IIDPartitioner(num_clients=3, seed=1)),
    )
    values: Tensor = loop.contributions["norm"]

    return values


def of_arrays(x: Tensor, y: Tensor) -> FederatedDataModule:
    """Return a data module of two tensors in place of data sets."""
    return FederatedDataModule((x, y), partitioner=IIDPartitioner(num_clients=2))


def cosine_values_of_round(
    net: nn.Module, updates: list[dict[str, Tensor]], samples: tuple[Tensor, Tensor]
) -> Tensor:
    """Values of updates that somebody else's loop made."""
    values = flsv.value_round(
        net,
        net.state_dict(),
        updates,
        [samples],
        metrics=flsv.metrics.CosineGradientShapley(),
    )
    return values["CosineGradientShapley"]
