"""What a coalition's training reads of the user's data module is its members'."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from flsv import FederatedDataModule
from flsv.data import GroupPartitioner
from flsv.functional import exact_shapley
from flsv.metrics import ShadowShapley
from helpers.users_data import CLASSES, Net, fit, make_samples


class Weighted(Net):
    """Weighs classes by their numbers in the data module's training set, its labels or its loader."""

    label_source = "data set"

    def on_fit_start(self):
        data = self.trainer.datamodule
        if self.label_source == "data set":
            labels = data.train.tensors[1]
        elif self.label_source == "attribute":
            labels = data.y
        elif self.label_source == "subset":
            labels = torch.stack([y for _, y in data.train])
        else:
            loader = data.train_dataloader()
            labels = torch.cat([y for _, y in loader])
        self.class_weights = class_weights_of(labels)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(
            self.net(x),
            y,
            weight=self.class_weights,
        )


def class_weights_of(labels: Tensor) -> Tensor:
    counts = labels.bincount(minlength=CLASSES) + 1.0
    return counts.sum() / counts


class Hospitals(L.LightningDataModule):
    """Three hospitals with other classes each: attributes with all samples, their data set, perhaps a part of one."""

    def __init__(self, is_subset: bool = False):
        super().__init__()
        self.is_subset = is_subset

    def setup(self, stage=None):
        x, y = make_samples(60, seed=0)
        order = y.argsort(stable=True)
        self.x = x[order]
        self.y = y[order]
        self.train: Any = TensorDataset(self.x, self.y)
        if self.is_subset:
            self.train = Subset(self.train, range(60))
        self.val = TensorDataset(*make_samples(30, seed=1))

    def train_dataloader(self):
        return DataLoader(self.train, 60, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 30)


NAMES = ["A"] * 30 + ["B"] * 20 + ["C"] * 10


def by_hospital(source: Hospitals) -> FederatedDataModule:
    return FederatedDataModule(
        source,
        GroupPartitioner(),
        groups=NAMES,
    )


def exact_values() -> ShadowShapley:
    return ShadowShapley(
        performance="val_loss",
        mode="min",
        coalitions="all",
    )


@pytest.mark.parametrize("label_source", ["data set", "attribute", "subset", "loader"])
def test_coalitions_have_class_weights_of_their_members(tmp_path, label_source):
    """A coalition's utility is that of a fit by Lightning alone on the members' samples."""

    class BySource(Weighted):
        pass

    BySource.label_source = label_source
    is_subset = label_source == "subset"
    loop = fit(
        BySource(),
        by_hospital(Hospitals(is_subset)),
        tmp_path,
        rounds=2,
        metrics={"value": exact_values()},
    )

    clients = torch.tensor(["ABC".index(name) for name in NAMES])

    def utility(masks: Tensor) -> Tensor:
        losses = []
        for mask in masks:
            members = mask.nonzero()[:, 0].tolist()
            losses.append(validation_loss(fedavg_by_hand(members, clients)))
        return -torch.tensor(losses, dtype=torch.float64)

    expected = exact_shapley(utility, num_players=3).values
    values = loop.contributions["value"].double()
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)


def validation_loss(module: Net) -> float:
    x, y = make_samples(30, seed=1)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module.net(x), y)
    return float(loss)


def fedavg_by_hand(members: Sequence[int], clients: Tensor) -> Net:
    """Two rounds of one full batch at each member, with weights of all members' classes."""
    source = Hospitals()
    source.setup()
    is_member = torch.isin(clients, torch.tensor(members))
    class_weights = class_weights_of(source.y[is_member])

    server = Net()
    for _ in range(2 if members else 0):
        trained = []
        sizes = []
        for member in members:
            model = Net()
            model.load_state_dict(server.state_dict())
            is_of_member = clients == member
            x = source.x[is_of_member]
            y = source.y[is_of_member]
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            loss = nn.functional.cross_entropy(
                model.net(x),
                y,
                weight=class_weights,
            )
            loss.backward()
            optimizer.step()
            trained.append(model.state_dict())
            sizes.append(len(y))
        mean = {}
        for name in server.state_dict():
            parts = [size * state[name] for size, state in zip(sizes, trained)]
            total = torch.stack(parts).sum(0)
            mean[name] = total / sum(sizes)
        server.load_state_dict(mean)
    return server


def test_users_data_module_has_all_samples_after_coalitions(tmp_path):
    source = Hospitals()
    fit(
        Weighted(),
        by_hospital(source),
        tmp_path,
        rounds=1,
        metrics={"value": exact_values()},
    )

    assert len(source.train) == len(source.y) == 60
    assert source.train.tensors[1] is source.y
