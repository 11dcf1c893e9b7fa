"""``trainer.datamodule`` and ``trainer.train_dataloader`` are the user's own in a federated fit."""

import inspect
from functools import partial
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.core.hooks import ModelHooks
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flsv import FederatedDataModule, FederatedLoop
from flsv.data import GroupPartitioner, OneClient, SizePartitioner
from helpers.fits import assert_resumes, plain_trainer, state_vector
from helpers.users_data import BATCH_SIZE, FEATURES, SEED, Net, fit, make_samples


class LabeledSamples(Dataset):
    """Has labels and another attribute."""

    def __init__(self, x, y):
        self.x = x
        self.y = y
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class DataModuleWithSameNames(L.LightningDataModule):
    """Has attributes of the same names as FederatedDataModule's, of other values, and hooks."""

    input_shape = (1, FEATURES)

    def __init__(self, name="Users"):
        super().__init__()
        self.save_hyperparameters()
        self.level = 0.0
        self.num_classes = 5
        self.class_names = list("abcde")
        self.num_samples = 7
        self.client_names = ("nobody",)
        self.seed = 99
        self.history = []

    def setup(self, stage):
        x, y = make_samples(48, seed=0)
        self.train = LabeledSamples(x, y)
        self.val = TensorDataset(*make_samples(16, seed=1))

    def train_dataloader(self):
        return DataLoader(self.train, BATCH_SIZE, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, BATCH_SIZE)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return x + self.level, y


# ---- every name in every hook


def public_names_of(owner):
    names = []
    for name in dir(owner):
        if not name.startswith("_"):
            names.append(name)
    return names


TWO_SAMPLES = LabeledSamples(*make_samples(2, seed=0))
NAMES_OF_LOADERS = public_names_of(DataLoader(TWO_SAMPLES))
#: Types whose ``repr`` holds no address.
PLAIN_TYPES = (
    Tensor,
    bool,
    int,
    float,
    str,
    tuple,
    list,
    type(None),
)


def describe(owner, names):
    """Return what the names of an object read as, without addresses."""
    descriptions = {}
    for name in names:
        value = getattr(owner, name)
        if isinstance(value, PLAIN_TYPES):
            descriptions[name] = repr(value)
        else:
            descriptions[name] = type(value).__name__
    return descriptions


def reading(trainer):
    """Return all that the Trainer's data module and its train loader read as."""
    data = trainer.datamodule
    readings_of_hook = {"data module": type(data).__name__}
    readings_of_hook |= describe(data, public_names_of(data))
    dataset = data.train_dataloader().dataset
    readings_of_hook["data of loader"] = type(dataset).__name__

    loader = trainer.train_dataloader
    if trainer.training and loader is not None:
        readings_of_hook |= describe(loader, NAMES_OF_LOADERS)
        readings_of_hook["length"] = len(loader)
        readings_of_hook |= describe(loader.dataset, ["x", "y", "epoch"])
        readings_of_hook["samples"] = len(loader.dataset)
        readings_of_hook["sampler"] = type(loader.sampler).__name__
        readings_of_hook["batch sampler"] = (
            len(loader.batch_sampler),
            loader.batch_sampler.batch_size,
        )
    return readings_of_hook


#: Hooks of a module that a fit may call after its data module has been set up.
HOOKS = ["setup", "configure_model", "configure_optimizers", "teardown"]
HOOKS += [name for name in vars(ModelHooks) if name.startswith("on_")]


def reading_module(reads):
    """Return a module that keeps what ``reads(trainer)`` finds in each hook, by the hook's name."""

    class Reads(Net):
        def __init__(self):
            super().__init__()
            # A namespace is no client's state, as an attribute is.
            self.recorded = SimpleNamespace(by_hook={})

        @property
        def by_hook(self):
            return self.recorded.by_hook

    def make_hook(name):
        original = getattr(Net, name)

        def hook(self, *arguments, **options):
            readings = self.by_hook.setdefault(name, [])
            readings.append(reads(self.trainer))
            return original(self, *arguments, **options)

        hook.__signature__ = inspect.signature(original)
        return hook

    for name in HOOKS:
        setattr(Reads, name, make_hook(name))
    return Reads()


@pytest.mark.slow
def test_every_name_reads_in_every_hook_as_by_lightning_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_SEED_WORKERS", raising=False)  # another test's seed_everything
    alone = reading_module(reading)
    trainer = plain_trainer(tmp_path, rounds=2)
    trainer.fit(alone, DataModuleWithSameNames())

    federated = reading_module(reading)
    data = FederatedDataModule(DataModuleWithSameNames(), OneClient())
    fit(federated, data, tmp_path)

    assert federated.by_hook.keys() == alone.by_hook.keys()
    assert {"setup", "on_after_backward", "on_validation_end", "teardown"} <= alone.by_hook.keys()
    for hook, readings in alone.by_hook.items():
        for position in (0, -1):
            expected = readings[position]
            readings_of_hook = federated.by_hook[hook][position]
            # In the first hooks there is a loader only in a federation.
            read_by_both = {name: readings_of_hook[name] for name in expected}
            assert read_by_both == expected, hook


@pytest.mark.parametrize("wraps", [True, False])
def test_loader_has_the_samples_of_the_client_that_trains_and_between_clients_of_all(
    tmp_path, wraps
):
    users = DataModuleWithSameNames()
    users.setup("fit")
    source = users if wraps else (users.train, users.val)
    partitioner = SizePartitioner([3, 2, 1])
    data = FederatedDataModule(source, partitioner, batch_size=BATCH_SIZE)

    def read(trainer):
        loader = trainer.train_dataloader
        dataset = loader.dataset
        x, _ = next(iter(loader))
        return (
            len(dataset),
            len(dataset.y),
            type(dataset).__name__,
            len(x),
        )

    module = reading_module(read)
    fit(module, data, tmp_path, rounds=1)

    sizes = data.num_samples.tolist()
    assert len(set(sizes)) == 3
    total = sum(sizes)
    whole = (total, total, "LabeledSamples", BATCH_SIZE)
    for hook in ("setup", "on_fit_start", "on_train_epoch_start", "on_train_epoch_end"):
        assert module.by_hook[hook] == [whole], hook
    sizes_in_training = [size for size, *_ in module.by_hook["on_train_batch_start"]]
    assert list(dict.fromkeys(sizes_in_training)) == sizes
    for size, num_labels, kind, _ in module.by_hook["on_after_backward"]:
        assert (num_labels, kind) == (size, "LabeledSamples")


# ---- what modules set, and the head that they make


class SetsLevel(L.Callback):
    """Curriculum: a callback that sets an attribute of the data module."""

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.datamodule.level = 0.5 * trainer.current_epoch


def users_in_one_batch():
    source = DataModuleWithSameNames()
    source.train_dataloader = lambda: DataLoader(source.train, 48, shuffle=True)
    return source


def test_attribute_that_a_callback_sets_is_read_by_the_data_modules_hooks(tmp_path):
    alone = Net()
    trainer = plain_trainer(tmp_path, 3, callbacks=[SetsLevel()])
    trainer.fit(alone, users_in_one_batch())

    federated = Net()
    source = users_in_one_batch()
    data = FederatedDataModule(source, OneClient())
    fit(federated, data, tmp_path, rounds=3, callbacks=[SetsLevel()])

    torch.testing.assert_close(state_vector(federated), state_vector(alone))
    assert source.level == 1.0


# ---- what training changes in it is a client's


NUM_SAMPLES = {"A": 24, "B": 16, "C": 8}


class CountsBatches(L.LightningDataModule):
    """Warms an augmentation up by the batches that it has seen, counted in an attribute or an object."""

    def __init__(self, order, in_object):
        super().__init__()
        self.order = order
        self.in_object = in_object
        self.num_batches = 0
        self.counter = Counter()

    def setup(self, stage):
        inputs = []
        labels = []
        for name in self.order:
            x, y = make_samples(NUM_SAMPLES[name], seed=ord(name))
            inputs.append(x)
            labels.append(y)
        self.train = TensorDataset(torch.cat(inputs), torch.cat(labels))
        self.val = TensorDataset(*make_samples(16, seed=1))

    def names(self):
        names = []
        for position, name in enumerate(self.order):
            names += [f"{position}{name}"] * NUM_SAMPLES[name]
        return names

    def train_dataloader(self):
        return DataLoader(self.train, 48, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, 16)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        if not self.trainer.training:
            return batch
        self.num_batches += 1
        self.counter.count += 1
        count = self.counter.count if self.in_object else self.num_batches
        return x * (1 + 0.1 * count), y


class Counter:
    def __init__(self):
        self.count = 0


@pytest.mark.fast_rows
@pytest.mark.parametrize("engine", ["sequential", "vmap"])
@pytest.mark.parametrize("in_object", [False, True])
def test_order_of_clients_does_not_matter_to_a_data_module_that_counts(tmp_path, in_object, engine):
    num_rounds = 3
    models = {}
    for order in ("ABC", "CBA"):
        source = CountsBatches(order, in_object)
        module = Net()
        fit(module, by_name(source), tmp_path / order, rounds=num_rounds, engine=engine)
        models[order] = state_vector(module)
        # As of one client, which has one batch in a round.
        assert source.num_batches == num_rounds
        assert source.counter.count == num_rounds
    torch.testing.assert_close(models["ABC"], models["CBA"], rtol=0, atol=1e-6)


def by_name(source):
    return FederatedDataModule(source, GroupPartitioner(), groups=source.names())


def test_run_with_a_data_module_that_counts_resumes_bitwise(tmp_path):
    def make_data():
        return by_name(CountsBatches("ABC", in_object=False))

    assert_resumes(partial(FederatedLoop, seed=SEED), tmp_path, Net, make_data)
