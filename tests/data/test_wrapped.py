"""The data module around another one, and what a Trainer's user expects of either."""

import sys
import types

import lightning as L
import pytest
import torch
import yaml
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.tuner import Tuner
from small_sets import Flip, Images, Linear, Somebodys, X, Y, trainer
from torch.utils.data import Dataset, TensorDataset
from toys import trainer_for

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, IIDPartitioner, SizePartitioner, TensorBatches
from flsv.errors import ConfigurationError

DATA = TensorDataset(X, Y)


class Tokenizer(Somebodys):
    """A data module with what modules ask it for."""

    def __init__(self, vocabulary: int = 30):
        super().__init__()
        self.save_hyperparameters()
        self.vocabulary = vocabulary


def test_a_wrapped_module_is_read_as_it_reads_itself():
    wrapped, model = Somebodys(), Linear()
    data = FederatedDataModule(wrapped, IIDPartitioner(4))
    assert data.batch_size == 7
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


def test_attributes_of_the_wrapped_module_are_reached():
    data = FederatedDataModule(Tokenizer(), IIDPartitioner(3))
    assert (data.vocabulary, data.hparams.vocabulary) == (30, 30)
    data.source.vocabulary = 31
    assert data.vocabulary == 31
    empty = FederatedDataModule.__new__(FederatedDataModule)
    assert not hasattr(empty, "vocabulary")  # and no endless search


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


# Finders


def test_batch_size_before_and_after_setup():
    data = FederatedDataModule(DATA, IIDPartitioner(3))
    assert data.batch_size is None
    data.setup("fit")
    assert data.batch_size == 32
    data.batch_size = 5  # as a Tuner does
    assert len(next(iter(data.client_loader(0)))[1]) == 5
    assert len(next(iter(data.val_dataloader()))[1]) == 20
    data.setup("fit")
    assert data.batch_size == 5


class Net(Linear):
    def __init__(self):
        super().__init__()
        self.lr = 0.1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def test_finders_without_the_loop(tmp_path):
    tuner, data = Tuner(trainer_for(None, tmp_path, 2, enable_checkpointing=True)), FederatedDataModule(DATA)
    found = tuner.lr_find(Net(), datamodule=data, num_training=10, max_lr=1.0)
    assert len(found.results["lr"]) == 10
    assert tuner.scale_batch_size(Net(), datamodule=data, max_trials=2, steps_per_trial=1) == data.batch_size


def test_reloading_the_wrapped_loaders_is_refused(tmp_path):
    module = Net()
    with pytest.raises(ConfigurationError, match="reload_dataloaders_every_n_epochs: the loaders of Tokenizer"):
        trainer_for(None, tmp_path, 2, reload_dataloaders_every_n_epochs=1).fit(
            module, FederatedDataModule(Tokenizer())
        )
    assert not module.seen["train"]


@pytest.mark.parametrize("finder", [BatchSizeFinder(), LearningRateFinder()])
@pytest.mark.parametrize("first", [True, False])
def test_finders_are_refused_with_the_loop(finder, first, tmp_path):
    loop, module = FederatedLoop(), Net()
    callbacks = [finder, loop] if first else [loop, finder]
    with pytest.raises(ConfigurationError, match=f"{type(finder).__name__} .*Tuner"):
        trainer_for(None, tmp_path, 1, callbacks=callbacks).fit(module, FederatedDataModule(DATA))
    assert not module.seen["train"]


# The same batches again and again


class Slow(Dataset):
    """Not held as tensors."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Watching(L.LightningModule):
    """Notes which samples it sees."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = torch.nn.Linear(4, 5), []

    def training_step(self, batch):
        self.seen.append(batch[0].clone())
        return self.layer(batch[0]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("source", [DATA, Slow()], ids=["tensors", "read"])
def test_overfit_batches_are_the_same_in_every_round(source, tmp_path):
    module = Watching()
    data = FederatedDataModule(source, SizePartitioner([1, 2]), batch_size=4, train_transform=Flip(2.0))
    trainer_for(FederatedLoop(local_epochs=2, seed=0), tmp_path, 3, overfit_batches=2).fit(module, data)
    first = [2 * X[data.client_indices(client)[:8]] for client in (0, 1) for _ in range(2)]
    assert torch.equal(torch.cat(module.seen), torch.cat([torch.cat(first)] * 3))


# From the command line


def test_yaml_of_a_data_module_and_a_transform(tmp_path, monkeypatch):
    # Class paths are imported, and pytest does not make this file importable.
    project = types.ModuleType("somebodys_project")
    monkeypatch.setitem(sys.modules, "somebodys_project", project)
    monkeypatch.setattr(sys, "argv", ["flsv"])
    for kind in (Somebodys, Flip, Images):
        monkeypatch.setattr(kind, "__module__", "somebodys_project")
        setattr(project, kind.__name__, kind)

    def parse(**data):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"data": data}))
        arguments = ["--config", str(tmp_path / "config.yaml")]
        defaults = {"accelerator": "cpu", "logger": False}
        options = {"run": False, "save_config_callback": None, "seed_everything_default": False}
        return LightningCLI(
            Linear, FederatedDataModule, trainer_defaults=defaults, args=arguments, **options
        ).datamodule

    data = parse(
        source={"class_path": "somebodys_project.Somebodys", "init_args": {"size": 50}},
        train_transform={"class_path": "somebodys_project.Flip", "init_args": {"factor": 3.0}},
    )
    assert data.source.size == 50
    assert data.train_transform.factor == 3.0
    assert parse(source="somebodys_project.Somebodys").source.size == 120
    pair = [{"class_path": "somebodys_project.Images", "init_args": {"length": n}} for n in (30, 10)]
    assert [len(part) for part in parse(source=pair).source] == [30, 10]
