"""What a coalition's training reads of data is its members'."""

from functools import partial

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule
from flsv._lightning.data_source import data_of
from flsv.data import GroupPartitioner
from flsv.functional import exact_shapley
from flsv.metrics import ShadowShapley
from flsv.sampling import FixedCohort
from helpers.users_data import CLASSES, Net, fit, make_samples


class WeighsClasses(Net):
    """Weighs classes by their numbers in the data module's training set or its loader, or as it is told."""

    def __init__(self, label_source=None, class_weights=None):
        super().__init__()
        self.label_source = label_source
        self.class_weights = class_weights

    def on_fit_start(self):
        data = self.trainer.datamodule
        if self.label_source == "data set":
            labels = data.train.tensors[1]
        elif self.label_source == "loader":
            labels = torch.cat([y for _, y in data.train_dataloader()])
        else:
            return
        self.class_weights = class_weights_of(labels)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, weight=self.class_weights)


def class_weights_of(labels):
    """As ``class_weights="balanced"`` of scikit-learn, and 1 for a class without samples."""
    counts = labels.bincount(minlength=CLASSES)
    weights = counts.sum() / (CLASSES * counts)
    return torch.where(counts > 0, weights, 1.0)


def make_balanced_client():
    sgd = partial(torch.optim.SGD, lr=0.1)
    return ClassifierClient(Net().net, optimizer=sgd, class_weights="balanced")


class Hospitals(L.LightningDataModule):
    """Three hospitals with other classes each."""

    def setup(self, stage=None):
        x, y = make_samples(60, seed=0)
        order = y.argsort(stable=True)
        self.x = x[order]
        self.y = y[order]
        self.train = TensorDataset(self.x, self.y)
        self.val = TensorDataset(*make_samples(30, seed=1))

    def train_dataloader(self):
        return DataLoader(self.train, 60, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 30)


NAMES = ["A"] * 30 + ["B"] * 20 + ["C"] * 10


def by_hospital(source):
    return FederatedDataModule(source, GroupPartitioner(), groups=NAMES)


def exact_values():
    return ShadowShapley(performance="val_loss", mode="min", coalitions="all")


BALANCED = "ClassifierClient"
#: Its clients train otherwise in coalitions, which flsv knows and does not warn of.
NOT_DOUBTED = pytest.mark.filterwarnings("error:.*clients train otherwise")


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.parametrize(
    "label_source",
    ["data set", "loader", pytest.param(BALANCED, marks=NOT_DOUBTED)],
)
def test_coalitions_have_class_weights_of_their_members(tmp_path, label_source):
    """A coalition's utility is that of a fit of the members with their class weights."""
    source = Hospitals()
    data = by_hospital(source)
    module = make_balanced_client() if label_source == BALANCED else WeighsClasses(label_source)
    loop = fit(module, data, tmp_path, metrics={"value": exact_values()})
    # A ClassifierClient weighs its validation loss by the classes of all clients.
    weights = class_weights_of(source.y) if label_source == BALANCED else None

    def utility(masks):
        losses = []
        for mask in masks:
            members = mask.nonzero()[:, 0].tolist()
            losses.append(validation_loss(fit_members(members, tmp_path), weights))
        return -torch.tensor(losses, dtype=torch.float64)

    expected = exact_shapley(utility, num_players=3).values
    values = loop.contributions["value"].double()
    torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
    # The user's own data module still has all samples.
    assert len(source.train) == 60
    assert source.train.tensors[1] is source.y


def validation_loss(module, weights):
    x, y = make_samples(30, seed=1)
    with torch.no_grad():
        loss = nn.functional.cross_entropy(module.net(x), y, weight=weights)
    return float(loss)


def fit_members(members, folder):
    """The model of a fit of some hospitals that are told their class weights, or the untrained one."""
    source = Hospitals()
    source.setup()
    is_member = torch.tensor(["ABC".index(name) in members for name in NAMES])
    module = WeighsClasses(class_weights=class_weights_of(source.y[is_member]))
    if members:
        fit(module, by_hospital(source), folder, sampler=FixedCohort(members))
    return module


# ---- loaders in hooks


class ReadsLoaders(Net):
    """Raises an error if the data module's training loader has samples of clients that are not in the coalition."""

    def check_loader(self):
        members = data_of(self.trainer).counted_clients
        if members is None:
            return
        loader = self.trainer.datamodule.train_dataloader()
        clients = torch.cat([x[:, 0] for x, _ in loader]).long()
        if not set(clients.tolist()) <= set(members):
            raise RuntimeError(f"the coalition {members} reads samples of {clients.unique()}")

    def setup(self, stage):
        self.check_loader()

    def configure_model(self):
        self.check_loader()

    def configure_optimizers(self):
        self.check_loader()
        return super().configure_optimizers()

    def on_fit_start(self):
        self.check_loader()

    def on_train_epoch_start(self):
        self.check_loader()

    def on_train_batch_start(self, batch, batch_idx):
        self.check_loader()

    def on_train_end(self):
        self.check_loader()


def make_clients():
    """Return three clients' samples, of which A has the most. The first input is the client's number."""
    clients = {}
    sizes = {"A": 30, "B": 20, "C": 10}
    for number, name in enumerate(sizes):
        x, y = make_samples(sizes[name], seed=number)
        x[:, 0] = number
        clients[name] = (x, y)
    return clients


class HoldsLoader(L.LightningDataModule):
    """Makes its training loader once, before a coalition begins."""

    def __init__(self):
        super().__init__()
        inputs, labels = zip(*make_clients().values())
        samples = TensorDataset(torch.cat(inputs), torch.cat(labels))
        self.loader = DataLoader(samples, 60, shuffle=True)

    def train_dataloader(self):
        return self.loader

    def val_dataloader(self):
        return DataLoader(TensorDataset(*make_samples(30, seed=9)), 30)


def make_data_by_client():
    return FederatedDataModule(clients=make_clients(), val=make_samples(30, seed=9))


def make_wrapped_data():
    return by_hospital(HoldsLoader())


@pytest.mark.fast_rows
@pytest.mark.parametrize("make_data", [make_wrapped_data, make_data_by_client])
def test_loader_of_a_coalitions_data_module_has_the_members_samples_in_every_hook(
    tmp_path, make_data
):
    metric = ShadowShapley(performance="val_loss", mode="min", coalitions="leave-one-out")
    loop = fit(ReadsLoaders(), make_data(), tmp_path, metrics={"value": metric})

    assert loop.contributions["value"].isfinite().all()
