"""Federations whose samples have no classes: texts, numbers, graphs."""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from toys import trainer_for

from flsv import ClassifierClient, ConfigurationError, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import DivergenceWeighted
from flsv.data import GroupPartitioner, IIDPartitioner, SizePartitioner
from flsv.metrics import (
    ClassSpecificShapley,
    CommunicationCost,
    CosineGradientShapley,
    PartialFederatedShapley,
)

N = 60


class Task(L.LightningModule):
    """Any task: the loss is a function of the module and the batch."""

    def __init__(self, net: nn.Module, loss: Any) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return self.loss(self.net, batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(self.net, batch), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def next_token(net: nn.Module, batch: Any) -> Tensor:
    (tokens,) = batch
    return nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def squared(net: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.mse_loss(net(x)[:, 0], y)


def texts(**options: Any) -> FederatedDataModule:
    tokens = torch.randint(9, (N, 6), generator=torch.Generator().manual_seed(0))
    return FederatedDataModule(TensorDataset(tokens), IIDPartitioner(3), batch_size=8, **options)


def numbers() -> FederatedDataModule:
    x = torch.randn(N, 4, generator=torch.Generator().manual_seed(0))
    return FederatedDataModule(TensorDataset(x, x.sum(1)), SizePartitioner([3, 1]), batch_size=8)


def language_model() -> Task:
    return Task(nn.Sequential(nn.Embedding(9, 5), nn.Linear(5, 9)), next_token)


def regressor() -> Task:
    return Task(nn.Sequential(nn.Linear(4, 1)), squared)


def graph(index: int) -> Any:
    """As an object, of several sizes, with a number to regress on."""
    return SimpleNamespace(x=torch.full((1 + index % 4, 2), index / N), y=torch.tensor([index / N]))


def together(graphs: list[Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes, the graph of each, and what is to be predicted."""
    sizes = torch.tensor([len(graph.x) for graph in graphs])
    belongs = torch.arange(len(graphs)).repeat_interleave(sizes)
    return torch.cat([graph.x for graph in graphs]), belongs, torch.cat([graph.y for graph in graphs])


class GraphModule(L.LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return DataLoader([graph(i) for i in range(N)], batch_size=8, collate_fn=together)  # type: ignore[arg-type]


def mean_of_nodes(net: nn.Module, batch: Any) -> Tensor:
    nodes, belongs, y = batch
    sums = torch.zeros(len(y), 1).index_add(0, belongs, net(nodes))
    return nn.functional.mse_loss(sums[:, 0] / belongs.bincount(), y)


def graphs() -> FederatedDataModule:
    return FederatedDataModule(GraphModule(), GroupPartitioner(), groups=[i % 3 for i in range(N)])


@pytest.mark.parametrize(
    ("module", "data"),
    [(language_model, texts), (lambda: Task(nn.Sequential(nn.Linear(2, 1)), mean_of_nodes), graphs)],
    ids=["texts", "graphs"],
)
def test_a_task_without_classes_is_trained_and_measured(
    module: Any, data: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    trained, dealt = module(), data()
    before = [parameter.detach().clone() for parameter in trained.parameters()]
    metrics = {"cosine": CosineGradientShapley(), "cost": CommunicationCost()}
    loop = FederatedLoop(metrics=metrics, seed=0, reporting=Reporting(figures=1))
    logger = L.pytorch.loggers.TensorBoardLogger(tmp_path, name="", version="")
    trainer_for(loop, tmp_path, 2, logger=logger).fit(trained, dealt)
    assert loop.round_index == 2
    assert any(not torch.equal(a, b) for a, b in zip(before, trained.parameters()))
    assert loop.contributions["cosine"].shape == (dealt.num_clients,)
    assert not loop.contributions["cosine"].isnan().any()

    # FedAvg's weights are shares of the samples.
    assert loop.weights is not None
    torch.testing.assert_close(loop.weights, dealt.num_samples / dealt.num_samples.sum())

    rows = list(csv.DictReader((tmp_path / "contributions.csv").open()))
    assert {row["class"] for row in rows if row["metric"] != "cost"} == {""}
    scalars = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert not [tag for tag in scalars["scalars"] if "class" in tag]
    assert "data/partition" in scalars["images"]
    table = capsys.readouterr().out
    assert "cosine" in table
    assert "by class" not in table


@pytest.mark.parametrize(
    ("arguments", "who"),
    [
        ({"metrics": {"cssv": ClassSpecificShapley()}}, r"metrics \['cssv'\] work with classes"),
        ({"metrics": {"ssv": PartialFederatedShapley(per_class=True)}}, r"metrics \['ssv'\] work with classes"),
        ({"aggregator": DivergenceWeighted()}, r"aggregator DivergenceWeighted\(.*\) works with classes"),
    ],
)
def test_what_needs_classes_says_so_before_training(arguments: Any, who: str, tmp_path: Path) -> None:
    module = regressor()
    with pytest.raises(ConfigurationError, match=f"{who}.*have no classes: the labels are float32 numbers\\."):
        trainer_for(FederatedLoop(**arguments), tmp_path, 1).fit(module, numbers())
    assert module.steps == 0


def test_what_needs_classes_takes_those_that_are_given(tmp_path: Path) -> None:
    topics = [i % 9 for i in range(N)]
    data = texts(labels=topics)
    loop = FederatedLoop(DivergenceWeighted(), {"cssv": ClassSpecificShapley()}, seed=0)
    trainer_for(loop, tmp_path, 1).fit(language_model(), data)
    assert loop.contributions["cssv"].by_class.shape == (3, 9)


def test_the_classifier_of_flsv_needs_classes(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="ClassifierClient learns classes, and the training samples have none"):
        trainer_for(FederatedLoop(), tmp_path, 1).fit(ClassifierClient("mlp"), numbers())
