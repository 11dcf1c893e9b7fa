"""Federations whose samples have no classes: texts, numbers, graphs."""

import lightning as L
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.aggregation import DivergenceWeighted
from flsv.data import GroupPartitioner, IIDPartitioner, SizePartitioner
from flsv.metrics import (
    ClassSpecificShapley,
    CommunicationCost,
    CosineGradientShapley,
    PartialFederatedShapley,
)
from helpers import make_generator, refused
from helpers.fits import state_vector, trainer_for
from helpers.runs import read_rows
from zoo.tasks import GraphNet, Graphs, LanguageModel, Regression, Task

N = 60


class Texts(LanguageModel):
    """Batches have no targets beside the text."""

    validation_step = Task.validation_step

    def loss(self, batch):
        return super().loss((batch[0][:, :-1], batch[0][:, 1:]))


class GraphModule(L.LightningDataModule):
    def train_dataloader(self):
        item = GraphNet.data().item
        return DataLoader([item(i) for i in range(N)], batch_size=8, collate_fn=Graphs)


def make_texts(**options):
    tokens = torch.randint(7, (N, 6), generator=make_generator())
    samples = TensorDataset(tokens)
    return FederatedDataModule(
        samples,
        IIDPartitioner(3),
        batch_size=8,
        **options,
    )


def make_numbers():
    x = torch.randn(N, 3, generator=make_generator())
    samples = TensorDataset(x, x.sum(1))
    return FederatedDataModule(samples, SizePartitioner([3, 1]), batch_size=8)


def make_graphs():
    return FederatedDataModule(GraphModule(), GroupPartitioner(), groups=[i % 3 for i in range(N)])


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("module", "data"),
    [
        (Texts, make_texts),
        (Regression, make_numbers),
        (GraphNet, make_graphs),
    ],
)
def test_task_without_classes_is_trained_and_measured(module, data, tmp_path, capsys):
    client_module = module()
    client_data = data()
    initial_vector = state_vector(client_module)
    metrics = {"cosine": CosineGradientShapley(), "cost": CommunicationCost()}
    loop = FederatedLoop(
        metrics=metrics,
        seed=0,
        reporting=Reporting(figures=1),
    )
    logger = L.pytorch.loggers.TensorBoardLogger(tmp_path, name="", version="")

    trainer = trainer_for(loop, tmp_path, rounds=2, logger=logger)
    trainer.fit(client_module, client_data)

    assert loop.round_index == 2
    assert not torch.equal(state_vector(client_module), initial_vector)
    assert loop.contributions["cosine"].shape == (client_data.num_clients,)
    assert not loop.contributions["cosine"].isnan().any()

    shares_of_samples = client_data.num_samples / client_data.num_samples.sum()
    torch.testing.assert_close(loop.weights, shares_of_samples)  # FedAvg's

    rows = read_rows(tmp_path / "contributions.csv")
    class_names = {row["class"] for row in rows if row["metric"] != "cost"}
    assert class_names == {""}

    tags = EventAccumulator(str(tmp_path)).Reload().Tags()
    assert not [tag for tag in tags["scalars"] if "class" in tag]
    assert "data/partition" in tags["images"]

    table = capsys.readouterr().out
    assert "cosine" in table
    assert "by class" not in table


@pytest.mark.parametrize(
    ("arguments", "component"),
    [
        ({"metrics": {"cssv": ClassSpecificShapley()}}, r"metrics \['cssv'\] need classes"),
        (
            {"metrics": {"ssv": PartialFederatedShapley(per_class=True)}},
            r"metrics \['ssv'\] need classes",
        ),
        (
            {"aggregator": DivergenceWeighted()},
            r"aggregator DivergenceWeighted\(.*\) needs classes",
        ),
    ],
)
def test_component_that_needs_classes_is_refused_before_training(arguments, component, tmp_path):
    trainer = trainer_for(FederatedLoop(**arguments), tmp_path, 1)
    with refused(f"{component}.*have no classes:.*float32 numbers\\."):
        trainer.fit(Regression(), make_numbers())

    assert trainer.global_step == 0


def test_component_that_needs_classes_uses_given_labels(tmp_path):
    loop = FederatedLoop(DivergenceWeighted(), {"cssv": ClassSpecificShapley()}, seed=0)
    num_clients = 3
    num_classes = 7
    labels = [index % num_classes for index in range(N)]

    trainer_for(loop, tmp_path, rounds=1).fit(Texts(), make_texts(labels=labels))

    assert loop.values["cssv"].by_class.shape == (num_clients, num_classes)


def test_classifier_client_on_data_without_classes_is_refused(tmp_path):
    with refused("ClassifierClient learns classes, and the"):
        trainer_for(FederatedLoop(), tmp_path, rounds=1).fit(
            ClassifierClient("mlp"), make_numbers()
        )
