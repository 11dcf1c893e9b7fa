"""The data module in a Trainer, around another one, and asked wrongly."""

import sys

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, IIDPartitioner, SizePartitioner, TensorBatches
from helpers import make_generator, refused
from helpers.data import Items
from helpers.fits import plain_trainer, trainer_for

X = torch.randn(200, 4, generator=make_generator())
Y = torch.arange(200) % 5
DATA = TensorDataset(X, Y)
TEST_SAMPLES = TensorDataset(X[:50], Y[:50])


class RecordsLabels(L.LightningModule):
    """A linear classifier that keeps the labels it was trained, validated and tested on."""

    def __init__(self, inputs=4, classes=5):
        super().__init__()
        self.layer = nn.Linear(inputs, classes)
        self.lr = 0.1
        self.labels = {"train": [], "val": [], "test": []}

    def _step(self, batch, split):
        x, y = batch
        self.labels[split].append(y)
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
        return torch.optim.SGD(self.parameters(), self.lr)


#: Batch sizes of the three loaders of :class:`UsersDataModule`.
TRAIN_BATCH = 7
VAL_BATCH = 11
TEST_BATCH = 13


class UsersDataModule(L.LightningDataModule):
    def __init__(self, size=120, batch_size=TRAIN_BATCH):
        super().__init__()
        self.save_hyperparameters()
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
        return DataLoader(self.val, batch_size=VAL_BATCH)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=TEST_BATCH)


@pytest.fixture
def quiet_trainer(tmp_path):
    return lambda rounds=1, **options: plain_trainer(tmp_path, rounds, **options)


def test_trainer_without_a_loop_trains_on_the_data_of_all_clients(quiet_trainer):
    data = FederatedDataModule((DATA, TEST_SAMPLES))
    model = RecordsLabels()
    epochs = 2
    trainer = quiet_trainer(epochs)

    trainer.fit(model, data)
    division_of_fit = data.division
    trainer.test(model, data)
    predictions = trainer.predict(model, data)

    labels = {split: torch.cat(batches) for split, batches in model.labels.items()}
    validation_samples = len(DATA) // 10
    training_samples = len(DATA) - validation_samples
    _, test_labels = TEST_SAMPLES.tensors
    assert len(labels["train"]) == epochs * training_samples
    assert len(labels["val"]) == epochs * validation_samples
    assert torch.equal(labels["test"], test_labels)
    assert torch.equal(torch.cat(predictions), test_labels)
    assert data.division is division_of_fit


def test_wrapped_data_module_keeps_its_batch_size_trainer_and_transforms(quiet_trainer):
    wrapped = UsersDataModule()
    model = RecordsLabels()
    data = FederatedDataModule(wrapped, IIDPartitioner(4))
    trainer = quiet_trainer()

    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)

    assert data.batch_size == TRAIN_BATCH
    assert wrapped.trainer is trainer
    # Of 120 training, 30 validation and 50 test samples. The last batch has the rest.
    assert set(map(len, model.labels["train"])) == {TRAIN_BATCH, 120 % TRAIN_BATCH}
    assert list(map(len, model.labels["val"])) == [VAL_BATCH, VAL_BATCH, 30 % VAL_BATCH]
    full_test_batches = [TEST_BATCH, TEST_BATCH, TEST_BATCH]
    assert list(map(len, model.labels["test"])) == [*full_test_batches, 50 % TEST_BATCH]
    assert torch.equal(torch.cat(model.labels["val"]), Y[120:150])
    assert len(data.server_val_indices) == 0
    assert isinstance(data.val_dataloader(), TensorBatches)
    assert wrapped.calls == ["prepare_data", "setup fit", "prepare_data", "setup test"]


DATA_STATE = {"cursor": 42}


class ZeroesLabelsInHook(UsersDataModule):
    """Makes each label 0 by a hook, drops its samples when it is torn down, and has a state."""

    loaded_state = None

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert self.trainer is not None
        x, y = batch
        return x, torch.zeros_like(y)

    def teardown(self, stage):
        self.calls.append("teardown")
        self.train = self.val = None

    def state_dict(self):
        return DATA_STATE

    def load_state_dict(self, state_dict):
        self.loaded_state = state_dict


def test_hooks_of_a_wrapped_module_are_used(quiet_trainer):
    model = RecordsLabels()

    quiet_trainer().fit(model, FederatedDataModule(ZeroesLabelsInHook()))

    labels = torch.cat(model.labels["train"])
    assert not labels.any()


def test_wrapped_module_that_was_torn_down_is_set_up_anew_with_the_same_clients(quiet_trainer):
    wrapped = ZeroesLabelsInHook()
    model = RecordsLabels()
    data = FederatedDataModule(wrapped)
    trainer = quiet_trainer()

    trainer.fit(model, data)
    indices = data.client_indices(1)
    assert "teardown" in wrapped.calls
    trainer.test(model, data, verbose=False)

    assert torch.equal(data.client_indices(1), indices)
    assert wrapped.calls.count("setup fit") == 2


def test_state_of_a_wrapped_module_is_part_of_the_checkpoint(quiet_trainer, tmp_path):
    path = tmp_path / "last.ckpt"
    trainer = quiet_trainer()
    trainer.fit(RecordsLabels(), FederatedDataModule(ZeroesLabelsInHook()))
    trainer.save_checkpoint(path)

    resumed_module = ZeroesLabelsInHook()
    quiet_trainer(2).fit(RecordsLabels(), FederatedDataModule(resumed_module), ckpt_path=path)

    assert resumed_module.loaded_state == DATA_STATE


def test_reloading_the_wrapped_loaders_is_refused(tmp_path):
    module = RecordsLabels()
    data = FederatedDataModule(UsersDataModule())
    trainer = plain_trainer(tmp_path, rounds=2, reload_dataloaders_every_n_epochs=1)

    with refused("reload_dataloaders_every_n_epochs=.*: flsv reads the loaders of UsersDataModule"):
        trainer.fit(module, data)

    assert not module.labels["train"]


@pytest.mark.parametrize("finder", [BatchSizeFinder(), LearningRateFinder()])
def test_lr_and_batch_size_finders_are_refused_with_the_loop(finder, tmp_path):
    module = RecordsLabels()
    trainer = plain_trainer(tmp_path, rounds=1, callbacks=[finder, FederatedLoop()])

    with refused(f"{type(finder).__name__} .*Tuner"):
        trainer.fit(module, FederatedDataModule(DATA))

    assert not module.labels["train"]


@pytest.mark.parametrize("source", [DATA, Items(zip(X, Y.tolist()))], ids=["tensors", "read"])
def test_overfit_batches_are_the_same_in_every_round(source, tmp_path):
    rounds, local_epochs = 3, 2
    module = RecordsLabels()
    data = FederatedDataModule(source, SizePartitioner([1, 2]), batch_size=4)
    loop = FederatedLoop(local_epochs=local_epochs, seed=0)

    trainer_for(loop, tmp_path, rounds, overfit_batches=2).fit(module, data)

    samples_of_two_batches = 2 * 4
    labels_of_round = []
    for client in (0, 1):
        first_samples = data.client_indices(client)[:samples_of_two_batches]
        labels_of_round += local_epochs * Y[first_samples].tolist()
    assert torch.cat(module.labels["train"]).tolist() == rounds * labels_of_round


@pytest.fixture
def parse_yaml(tmp_path, monkeypatch):
    """A function that makes a data module of options in a YAML file, by Lightning's command line."""
    monkeypatch.setattr(sys, "argv", ["flsv"])
    path = tmp_path / "config.yaml"

    def parse_options(**data):
        path.write_text(yaml.safe_dump({"data": data}))
        return LightningCLI(
            RecordsLabels,
            FederatedDataModule,
            trainer_defaults={"accelerator": "cpu", "logger": False},
            args=["--config", str(path)],
            run=False,
            save_config_callback=None,
            seed_everything_default=False,
        )

    return parse_options


def saved_source(cli):
    """The source in the configuration that the command line would save."""
    saved_config = yaml.safe_load(cli.parser.dump(cli.config))
    return saved_config["data"]["source"]


def test_yaml_may_name_a_data_module(parse_yaml):
    cli = parse_yaml(source=f"{BoringDataModule.__module__}.BoringDataModule")

    assert isinstance(cli.datamodule.source, BoringDataModule)


def describe_items(num_samples):
    """A data set as YAML describes it."""
    return {"class_path": "helpers.data.Items", "init_args": {"items": [[1.0, 0]] * num_samples}}


def test_yaml_may_describe_a_data_set(parse_yaml):
    cli = parse_yaml(source=describe_items(30))

    assert len(cli.datamodule.source) == 30
    assert saved_source(cli) == describe_items(30)


def test_yaml_may_describe_training_and_test_data_sets(parse_yaml):
    pair = [describe_items(30), describe_items(10)]

    cli = parse_yaml(source=pair)

    train, test = cli.datamodule.source
    assert len(train) == 30
    assert len(test) == 10
    assert saved_source(cli) == pair


@pytest.fixture
def table_path(tmp_path):
    path = tmp_path / "Köln Süd.csv"
    path.write_text("age,ill\n" + "50,0\n60,1\n" * 15, "utf-8")
    return str(path)


def test_path_of_a_table_in_yaml_is_not_replaced_by_the_text_of_the_file(parse_yaml, table_path):
    cli = parse_yaml(source=table_path, labels="ill")

    assert cli.datamodule.source == table_path


def test_yaml_may_name_the_tables_of_clients(parse_yaml, table_path):
    cli = parse_yaml(clients={"Boston": table_path, "Köln Süd": table_path}, labels="ill")
    cli.datamodule.setup("fit")

    assert cli.datamodule.client_names == ("Boston", "Köln Süd")
