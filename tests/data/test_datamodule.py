"""The data module in a Trainer, around other data modules, from the command line, and asked wrongly."""

import itertools
import os
import sys
import types

import lightning as L
import numpy as np
import pytest
import torch
import yaml
from data_options import grouped
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flsv.data import DirichletPartitioner, FederatedDataModule, GroupPartitioner, IIDPartitioner, Splits, TensorBatches
from flsv.errors import ConfigurationError

ROOT = os.environ.get("FLSV_DATA_ROOT")
X = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(200) % 5


class Linear(L.LightningModule):
    """A classifier that writes down which samples it was trained, validated and tested on."""

    def __init__(self, inputs: int = 4, classes: int = 5):
        super().__init__()
        self.layer = nn.Linear(inputs, classes)
        self.seen = {"train": [], "val": [], "test": []}

    def _step(self, batch, split):
        x, y = batch
        self.seen[split].append(y)
        return nn.functional.cross_entropy(self.layer(x.flatten(1)), y)

    def training_step(self, batch):
        return self._step(batch, "train")

    def validation_step(self, batch):
        self._step(batch, "val")

    def test_step(self, batch):
        self._step(batch, "test")

    def predict_step(self, batch):
        return batch[1]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


class Somebodys(L.LightningDataModule):
    """A data module as users write them, which counts what is called."""

    def __init__(self, size: int = 120, batch_size: int = 7):
        super().__init__()
        self.size = size
        self.batch_size = batch_size
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare_data")

    def setup(self, stage):
        self.calls.append(f"setup {stage}")
        if stage == "fit":
            self.train = TensorDataset(X[: self.size], Y[: self.size])
            self.val = TensorDataset(X[120:150], Y[120:150])
        if stage == "test":
            self.test = TensorDataset(X[150:], Y[150:])

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=11)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=13)


class Flip:
    def __init__(self, factor: float = -1.0):
        self.factor = factor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Images(Dataset):
    """Not a TensorDataset; groups and classes as attributes."""

    classes = ("a", "b", "c", "d", "e")

    def __init__(self, length: int = 60):
        self.length = length
        self.groups = [index % 3 for index in range(length)]
        self.ward = [index // 20 for index in range(length)]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return X[index], int(Y[index])


def trainer(**options):
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, **options}
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def ready(*args, **kwargs):
    data = FederatedDataModule(*args, **grouped(kwargs))
    data.prepare_data()
    data.setup("fit")
    return data


# Who has what


def test_no_sample_is_in_two_places():
    data = ready(
        "digits",
        DirichletPartitioner(6, alpha=0.3, min_samples=5),
        server_val=0.15,
        client_val=0.1,
        client_test=0.2,
    )
    held = [data.client_indices(client, split) for client in range(6) for split in ("train", "val", "test")]
    sets = [set(indices.tolist()) for indices in [data.server_val_indices, *held]]
    assert all(not a & b for a, b in itertools.combinations(sets, 2))
    assert set().union(*sets) == set(range(1437))


def test_loaders_yield_the_samples_of_the_indices():
    data = ready((TensorDataset(X, torch.arange(200)),), IIDPartitioner(3), client_val=0.2, client_test=0.1)
    for client in range(3):
        for split in ("train", "val", "test"):
            seen = torch.cat([y for _, y in data.client_loader(client, split)])
            assert torch.equal(seen.sort().values, data.client_indices(client, split))
    assert torch.equal(torch.cat([y for _, y in data.val_dataloader()]), data.server_val_indices)
    pooled = torch.cat([y for _, y in data.train_dataloader()])
    expected = torch.cat([data.client_indices(client) for client in range(3)])
    assert torch.equal(pooled.sort().values, expected.sort().values)


def test_class_counts_are_those_of_the_training_batches():
    data = ready("digits", DirichletPartitioner(4, alpha=0.5), client_test=0.25)
    for client in range(4):
        labels = torch.cat([y for _, y in data.client_loader(client)])
        assert torch.bincount(labels, minlength=10).tolist() == data.class_counts[client].tolist()
        assert len(labels) == data.num_samples[client]


def test_train_batches_are_a_function_of_the_generator():
    data = ready("digits")

    def order(seed):
        torch.rand(3)
        return torch.cat([x for x, _ in data.client_loader(2, generator=torch.Generator().manual_seed(seed))])

    assert torch.equal(order(1), order(1))
    assert not torch.equal(order(1), order(2))


def test_everything_follows_from_the_seeds():
    kinds = {"client_test": 0.2, "max_samples": 500}
    first, again, other = (ready("digits", seed=seed, **kinds) for seed in (1, 1, 2))
    assert torch.equal(first.server_val_indices, again.server_val_indices)
    assert all(
        torch.equal(first.client_indices(c, s), again.client_indices(c, s)) for c in range(5) for s in ("train", "test")
    )
    assert not torch.equal(first.server_val_indices, other.server_val_indices)


def test_facts_about_the_data():
    data = ready("digits", IIDPartitioner(5), batch_size=20, max_samples=1000)
    assert (data.num_clients, data.num_classes, data.input_shape) == (5, 10, (1, 8, 8))
    assert data.class_names == tuple("0123456789")
    assert int(data.num_samples.sum()) == 900
    assert data.describe() == {
        "source": "digits",
        "partitioner": "IIDPartitioner(num_clients=5, seed=0)",
        "splits.server_val": 0.1,
        "splits.client_val": 0.0,
        "splits.client_test": 0.0,
        "splits.seed": 0,
        "batch_size": 20,
        "num_clients": 5,
        "num_classes": 10,
        "train_samples": 900,
        "server_val_samples": 100,
    }
    assert str(data) == "FederatedDataModule(source=digits, partitioner=IIDPartitioner(num_clients=5, seed=0))"


def test_what_is_known_before_setup():
    assert FederatedDataModule(partitioner=IIDPartitioner(7)).num_clients == 7
    assert "num_clients" not in FederatedDataModule().describe()
    with pytest.raises(RuntimeError, match="not loaded yet"):
        _ = FederatedDataModule().class_counts
    with pytest.raises(RuntimeError, match="not loaded yet"):
        _ = FederatedDataModule(partitioner=GroupPartitioner()).num_clients


def test_groups_make_clients():
    data = ready(Images(), GroupPartitioner())
    assert data.num_clients == 3
    assert all((data.client_indices(client) % 3 == client).all() for client in range(3))
    assert data.class_names == Images.classes
    wards = ready(Images(), GroupPartitioner(), groups="ward")
    assert all((wards.client_indices(client) // 20 == client).all() for client in range(3))
    halves = ready(Images(), GroupPartitioner(), groups=["x"] * 30 + ["y"] * 30)
    assert halves.num_clients == 2


@pytest.mark.parametrize("preload", [False, True])
def test_train_transform_changes_training_batches_only(preload):
    data = ready((Images(), Images()), IIDPartitioner(2), train_transform=Flip(2.0), preload=preload, client_val=0.2)
    assert isinstance(data.client_loader(0), TensorBatches) is preload
    x = torch.cat([x for x, _ in data.client_loader(0)])
    assert torch.isclose(x.sum(), 2 * X[data.client_indices(0)].sum(), atol=1e-4)
    assert torch.equal(next(iter(data.val_dataloader()))[0], X[data.server_val_indices])
    assert torch.equal(next(iter(data.client_loader(1, "val")))[0], X[data.client_indices(1, "val")])
    pooled = torch.cat([x for x, _ in data.train_dataloader()])
    assert torch.isclose(pooled.sum(), 2 * sum(X[data.client_indices(c)].sum() for c in range(2)), atol=1e-4)


# In a Trainer


def test_the_centralised_baseline_trains_on_all_clients_data():
    data, model = FederatedDataModule((TensorDataset(X, Y), TensorDataset(X[:50], Y[:50]))), Linear()
    fit = trainer()
    fit.fit(model, data)
    assert len(torch.cat(model.seen["train"])) == 2 * 180
    assert len(torch.cat(model.seen["val"])) == 2 * 20
    fit.test(model, data)
    assert torch.equal(torch.cat(model.seen["test"]), Y[:50])
    assert torch.equal(torch.cat(fit.predict(model, data)), Y[:50])


def test_pooled_order_changes_with_the_epoch():
    data, model = FederatedDataModule(TensorDataset(X, Y), splits=Splits(server_val=0.0)), Linear()
    trainer(reload_dataloaders_every_n_epochs=1).fit(model, data)
    seen = torch.cat(model.seen["train"])
    assert not torch.equal(seen[:200], seen[200:])


def test_round_loader_takes_the_place_of_the_training_data():
    data, model = FederatedDataModule(TensorDataset(X, Y)), Linear()
    data.round_loader = lambda: TensorBatches([X[:3], Y[:3]], None, batch_size=2)
    trainer().fit(model, data)
    assert torch.cat(model.seen["train"]).tolist() == [0, 1, 2] * 2


def test_setup_again_changes_nothing():
    data, model = FederatedDataModule("digits"), Linear(64, 10)
    data.setup("fit")
    before = data.val_dataloader(), data.server_val_indices, data.client_indices(0)
    fit = trainer(max_epochs=1)
    fit.fit(model, data)
    fit.validate(model, data, verbose=False)
    fit.test(model, data, verbose=False)
    assert (data.val_dataloader(), data.server_val_indices, data.client_indices(0)) == before
    assert data.test_dataloader() is data.test_dataloader()
    data.client_loader(0, "train")


def test_no_server_validation():
    data, model = FederatedDataModule(TensorDataset(X, Y), splits=Splits(server_val=0.0)), Linear()
    trainer().fit(model, data)
    assert data.val_dataloader() == []
    assert model.seen["val"] == []
    assert int(data.num_samples.sum()) == 200


# Around another data module


def test_a_wrapped_module_is_read_as_it_reads_itself():
    wrapped, model = Somebodys(), Linear()
    data = FederatedDataModule(wrapped, IIDPartitioner(4))
    fit = trainer(max_epochs=1)
    fit.fit(model, data)
    assert wrapped.trainer is fit
    assert {len(y) for y in model.seen["train"]} == {7, 120 % 7}
    assert torch.equal(torch.cat(model.seen["val"]), Y[120:150])
    assert [len(y) for y in model.seen["val"]] == [11, 11, 8]
    assert len(data.server_val_indices) == 0
    assert isinstance(data.val_dataloader(), TensorBatches)
    fit.test(model, data, verbose=False)
    assert [len(y) for y in model.seen["test"]] == [13, 13, 13, 11]
    assert wrapped.calls == ["prepare_data", "setup fit", "prepare_data", "setup test"]


def test_a_batch_size_given_goes_before_the_wrapped_modules():
    assert ready(Somebodys(), batch_size=5).client_loader(0).batch_size == 5


def test_test_and_predict_loaders_of_a_wrapped_module():
    class Predicting(Somebodys):
        def predict_dataloader(self):
            return "its own"

    data = ready(Predicting())
    data.setup("test")
    assert data.predict_dataloader() == "its own"
    data = ready(Somebodys())
    data.setup("predict")
    data.setup("test")
    assert isinstance(data.predict_dataloader(), DataLoader)


def test_a_module_made_from_data_sets():
    module = L.LightningDataModule.from_datasets(TensorDataset(X, Y), batch_size=16)
    data = ready(module, server_val=0.25)
    assert len(data.server_val_indices) == 50
    assert data.client_loader(0).batch_size == 16
    with pytest.raises(ConfigurationError, match="LightningDataModule has no test data"):
        data.test_dataloader()


def test_batch_hooks_are_delegated_only_where_the_module_has_them():
    class Hooked(Somebodys):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            assert self.trainer is not None
            self.calls.append("after")
            x, y = batch
            return x, torch.zeros_like(y)

    class Model(Linear):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            self.before = True
            return batch

    wrapped, model = Hooked(), Model()
    trainer(max_epochs=1).fit(model, FederatedDataModule(wrapped))
    assert "after" in wrapped.calls
    assert not torch.cat(model.seen["train"]).any()
    assert model.before


def test_teardown_of_a_wrapped_module_makes_the_next_setup_start_anew():
    class Tidy(Somebodys):
        def teardown(self, stage):
            self.calls.append("teardown")
            self.train = self.val = None

    wrapped, model = Tidy(), Linear()
    data = FederatedDataModule(wrapped)
    fit = trainer(max_epochs=1)
    fit.fit(model, data)
    indices = data.client_indices(1)
    assert "teardown" in wrapped.calls
    fit.test(model, data, verbose=False)
    assert torch.equal(data.client_indices(1), indices)
    assert wrapped.calls.count("setup fit") == 2


def test_state_of_a_wrapped_module_goes_into_the_checkpoint(tmp_path):
    class Stateful(Somebodys):
        loaded = None

        def state_dict(self):
            return {"cursor": 42}

        def load_state_dict(self, state_dict):
            self.loaded = state_dict

    fit = trainer(max_epochs=1)
    fit.fit(Linear(), FederatedDataModule(Stateful()))
    fit.save_checkpoint(tmp_path / "last.ckpt")
    wrapped = Stateful()
    trainer(max_epochs=2).fit(Linear(), FederatedDataModule(wrapped), ckpt_path=tmp_path / "last.ckpt")
    assert wrapped.loaded == {"cursor": 42}
    assert FederatedDataModule("digits").state_dict() == {}


def test_an_exception_reaches_the_wrapped_module():
    class Watching(Somebodys):
        def on_exception(self, exception):
            self.calls.append(repr(exception))

    class Failing(Linear):
        def training_step(self, batch):
            raise ArithmeticError("boom")

    wrapped = Watching()
    with pytest.raises(ArithmeticError):
        trainer().fit(Failing(), FederatedDataModule(wrapped))
    assert wrapped.calls[-1] == "ArithmeticError('boom')"


# Asked wrongly


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"eval_batch_size": -1}, "eval_batch_size=-1"),
        ({"server_val": 1.0}, "server_val=1.0"),
        ({"max_samples": 0}, "max_samples=0"),
        ({"partitioner": 5}, r"partitioner=5: expected a flsv\.data\.Partitioner"),
    ],
)
def test_wrong_arguments_are_found_at_construction(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        FederatedDataModule("digits", **grouped(arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": "mnist"}, "download: true"),
        ({"source": "diggits"}, "Did you mean 'digits'"),
        ({"source": "x.npz"}, "x.npz was not found"),
        ({"source": Images(3)}, "3 samples is none"),
        ({"source": Images(4), "server_val": 0.0}, "4 samples cannot be dealt to 5 clients"),
        ({"source": TensorDataset(X), "partitioner": DirichletPartitioner(3, 0.5)}, "No class labels"),
        ({"partitioner": GroupPartitioner()}, "needs to know each sample's group"),
        ({"groups": "hospital"}, "no attribute 'hospital'"),
        ({"max_samples": 12, "client_test": 0.9}, "Client 0 has 3 samples"),
    ],
)
def test_wrong_data_are_found_in_setup(arguments, message, tmp_path):
    data = FederatedDataModule(**grouped({"source": "digits", "root": str(tmp_path), **arguments}))
    with pytest.raises(ConfigurationError, match=message):
        trainer().fit(Linear(64, 10), data)


def test_clients_and_splits_that_do_not_exist():
    data = ready("digits", IIDPartitioner(3))
    for client, split in ((3, "train"), (-1, "train"), (0, "validation")):
        with pytest.raises(ConfigurationError, match=r"clients are 0 \.\. 2"):
            data.client_loader(client, split)


def test_no_test_data():
    with pytest.raises(ConfigurationError, match="TensorDataset has no test data"):
        ready(TensorDataset(X, Y)).test_dataloader()


# From the command line


@pytest.fixture(autouse=True)
def _no_arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["flsv"])


def parse(tmp_path, data, *arguments):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
    return LightningCLI(
        Linear,
        FederatedDataModule,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        trainer_defaults={"accelerator": "cpu", "logger": False},
        args=["--config", str(tmp_path / "config.yaml"), *arguments],
    ).datamodule


def test_yaml_of_a_named_set(tmp_path):
    partitioner = {"class_path": "flsv.data.DirichletPartitioner", "init_args": {"num_clients": 4, "alpha": 0.3}}
    data = parse(tmp_path, {"source": "digits", "partitioner": partitioner, "batch_size": 16}, "--data.splits.seed=3")
    assert data.source == "digits"
    assert repr(data.partitioner) == "DirichletPartitioner(num_clients=4, alpha=0.3, min_samples=1, seed=0)"
    assert (data.batch_size, data.splits.seed) == (16, 3)


@pytest.mark.parametrize("name", ["FashionMNIST", "MNIST", "CIFAR10"])
def test_yaml_names_of_torchvisions_sets_stay_names(tmp_path, name):
    assert parse(tmp_path, {"source": name}).source == name


def test_yaml_of_a_data_module_and_a_transform(tmp_path, monkeypatch):
    # Class paths are imported, and pytest does not make this file importable.
    project = types.ModuleType("somebodys_project")
    monkeypatch.setitem(sys.modules, "somebodys_project", project)
    for kind in (Somebodys, Flip, Images):
        monkeypatch.setattr(kind, "__module__", "somebodys_project")
        setattr(project, kind.__name__, kind)
    data = parse(
        tmp_path,
        {
            "source": {"class_path": "somebodys_project.Somebodys", "init_args": {"size": 50}},
            "train_transform": {"class_path": "somebodys_project.Flip", "init_args": {"factor": 3.0}},
        },
    )
    assert data.source.size == 50
    assert data.train_transform.factor == 3.0
    assert parse(tmp_path, {"source": "somebodys_project.Somebodys"}).source.size == 120
    pair = [{"class_path": "somebodys_project.Images", "init_args": {"length": n}} for n in (30, 10)]
    assert [len(part) for part in parse(tmp_path, {"source": pair}).source] == [30, 10]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("IIDPartitioner", {"num_clients": 3}),
        ("SizePartitioner", {"proportions": [1, 2, 3]}),
        ("PathologicalPartitioner", {"num_clients": 3, "classes_per_client": 2}),
        ("ShardPartitioner", {"num_clients": 3}),
        ("ProportionPartitioner", {"matrix": [[0.7, 0.5], [0.1, 0.5]], "of": "client", "sizes": [1, 2]}),
        ("GroupPartitioner", {}),
        ("GroupPartitioner", {"num_clients": 3}),
    ],
)
def test_yaml_of_every_partitioner(tmp_path, name, arguments):
    entry = {"class_path": f"flsv.data.{name}", "init_args": arguments}
    assert type(parse(tmp_path, {"partitioner": entry, "groups": [1, 2, 3]}).partitioner).__name__ == name


# Real data


@pytest.mark.skipif(ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data")
@pytest.mark.parametrize("name", ["fashion_mnist", "pneumoniamnist.npz"])
def test_real_images_reach_the_clients(name):
    data = ready(name, DirichletPartitioner(5, alpha=0.3, min_samples=10), root=ROOT, max_samples=2000, client_test=0.2)
    assert all(isinstance(data.client_loader(client), TensorBatches) for client in range(5))
    own_val = name.endswith(".npz")
    assert len(data.server_val_indices) == (0 if own_val else 200)
    x, y = next(iter(data.val_dataloader()))
    assert x.shape[1:] == data.input_shape == (1, 28, 28)
    assert y.max() < data.num_classes


@pytest.mark.skipif(ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data")
def test_lesions_as_natural_groups():
    if not os.path.isfile(os.path.join(ROOT, "ham10000_28.npz")):
        pytest.skip("FLSV_DATA_ROOT has no ham10000_28.npz")
    data = ready("ham10000_28.npz", GroupPartitioner(4), root=ROOT, groups="lesion_ids")
    lesions = np.load(os.path.join(ROOT, "ham10000_28.npz"))["train_lesion_ids"]
    owners = [set(lesions[data.client_indices(client)]) for client in range(4)]
    assert all(not a & b for a, b in itertools.combinations(owners, 2))
    assert data.num_samples.max() - data.num_samples.min() <= 10
