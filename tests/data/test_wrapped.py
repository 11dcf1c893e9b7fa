"""What a Trainer's user expects of a data module, of the one that is wrapped and of the one around it."""

import lightning as L
import pytest
import torch
from data_options import grouped
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from toys import trainer_for

from flsv import FederatedLoop
from flsv.data import FederatedDataModule, IIDPartitioner, SizePartitioner
from flsv.errors import ConfigurationError

X = torch.randn(120, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(120) % 5
DATA = TensorDataset(X, Y)


class Tokenizer(L.LightningDataModule):
    """A data module with what modules ask it for."""

    def __init__(self, vocabulary: int = 30, batch_size: int = 7):
        super().__init__()
        self.save_hyperparameters()
        self.vocabulary, self.batch_size = vocabulary, batch_size
        self.seed = 5

    def decode(self, token):
        return f"<{token}>"

    def train_dataloader(self):
        return DataLoader(DATA, batch_size=self.batch_size, shuffle=True)


class Slow(Dataset):
    """Not held as tensors."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


class Net(L.LightningModule):
    """Notes which samples it sees and what it is told."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 5)
        self.lr, self.seen, self.sizes, self.told = 0.1, [], [], {}

    def forward(self, x):
        return self.layer(x)

    def training_step(self, batch):
        x, y = batch
        self.seen.append(x.clone())
        self.sizes.append(len(x))
        return nn.functional.cross_entropy(self(x), y)

    def validation_step(self, batch):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


def wrapped(**kwargs):
    return FederatedDataModule(Tokenizer(), IIDPartitioner(3), **grouped(kwargs))


def plain(rounds=2, **kwargs):
    return trainer_for(None, kwargs.pop("folder", "."), rounds, **kwargs)


# Attributes


def test_attributes_of_the_wrapped_module_are_reached():
    data = wrapped()
    assert data.vocabulary == 30
    assert data.decode(3) == "<3>"
    assert data.batch_size == 7
    assert data.hparams.vocabulary == 30
    assert hasattr(data, "vocabulary")
    data.source.vocabulary = 31
    assert data.vocabulary == 31


# Batch sizes


def test_batch_size_before_and_after_setup():
    data = FederatedDataModule(DATA, IIDPartitioner(3))
    assert data.batch_size is None
    data.setup("fit")
    assert data.batch_size == 32
    data.batch_size = 5
    assert len(next(iter(data.client_loader(0)))[1]) == 5
    assert len(next(iter(data.val_dataloader()))[1]) == 12
    data.setup("fit")
    assert data.batch_size == 5
    assert wrapped().batch_size == 7


def test_the_learning_rate_finder_without_the_loop(tmp_path):
    module = Net()
    found = Tuner(plain(folder=tmp_path)).lr_find(module, datamodule=wrapped(), num_training=10, max_lr=1.0)
    assert len(found.results["lr"]) == 10


@pytest.mark.parametrize("finder", [BatchSizeFinder(), LearningRateFinder()])
@pytest.mark.parametrize("first", [True, False])
def test_finders_are_refused_with_the_loop(finder, first, tmp_path):
    loop, module = FederatedLoop(), Net()
    callbacks = [finder, loop] if first else [loop, finder]
    with pytest.raises(ConfigurationError, match=f"{type(finder).__name__} .*Tuner"):
        trainer_for(None, tmp_path, 1, callbacks=callbacks).fit(module, wrapped())
    assert not module.seen


# The same batches again and again


@pytest.mark.parametrize("source", [DATA, Slow()], ids=["tensors", "read"])
def test_overfit_batches_are_the_same_in_every_round(source, tmp_path):
    def scale(x):
        return x * 2

    data, module = FederatedDataModule(source, SizePartitioner([1, 2]), batch_size=4, train_transform=scale), Net()
    loop = FederatedLoop(local_epochs=2, seed=0)
    trainer_for(loop, tmp_path, 3, overfit_batches=2).fit(module, data)
    first = [2 * X[data.client_indices(client)[:8]] for client in (0, 1) for _ in range(2)]
    expected = torch.cat([torch.cat(first)] * 3)
    assert torch.equal(torch.cat(module.seen), expected)


# Loaders that others make anew


def test_reloading_ones_own_changes_nothing(tmp_path):
    seen = []
    for every in (0, 1):
        torch.manual_seed(0)
        module = Net()
        trainer = trainer_for(FederatedLoop(seed=0), tmp_path / str(every), 2, reload_dataloaders_every_n_epochs=every)
        trainer.fit(module, FederatedDataModule(DATA, IIDPartitioner(2)))
        seen.append(torch.cat(module.seen))
    assert torch.equal(*seen)
