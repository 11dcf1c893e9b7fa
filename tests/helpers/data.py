"""Small data: toy classes, tables, a user's own items, and the configuration files with what they deal out."""

from dataclasses import fields
from pathlib import Path

import lightning as L
import numpy as np
import pandas
import torch
from torch.utils.data import Dataset, TensorDataset

from flsv.data import FederatedDataModule, Files, Loader, SizePartitioner, Splits, load_image_data
from helpers import make_generator


def group_options(options):
    """``server_val``, ``root``, ``drop_last`` and their like in the objects that they are arguments of."""
    arguments = dict(options)
    group_classes = {"splits": Splits, "files": Files, "loader": Loader}
    for name, group_class in group_classes.items():
        names_in_group = {field.name for field in fields(group_class)} & arguments.keys()
        if names_in_group:
            group_arguments = {option: arguments.pop(option) for option in names_in_group}
            arguments[name] = group_class(**group_arguments)
    return arguments


def set_up_data(*args, **options):
    """A data module with such options, set up."""
    data = FederatedDataModule(*args, **group_options(options))
    data.setup("fit")
    return data


FEATURES, CLASSES = 6, 3


def toy_sets(samples=130, test=30, seed=0):
    """A training and a test set of three Gaussian classes."""
    generator = make_generator(seed)
    centers = 2 * torch.randn(CLASSES, FEATURES, generator=generator)
    train_set = draw_around(centers, samples, generator)
    test_set = draw_around(centers, test, generator)
    return train_set, test_set


def draw_around(centers, num_samples, generator):
    labels = torch.arange(num_samples) % CLASSES
    noise = torch.randn(num_samples, FEATURES, generator=generator)
    return TensorDataset(centers[labels] + noise, labels)


def toy_data(proportions=(4, 1, 2), batch_size=8, client_test=0.2, **options):
    grouped_options = group_options({"client_test": client_test, **options})
    partitioner = SizePartitioner(list(proportions))
    return FederatedDataModule(toy_sets(), partitioner, batch_size=batch_size, **grouped_options)


class DataModuleOfLoader(L.LightningDataModule):
    """A user's data module with a training loader."""

    def __init__(self, loader):
        super().__init__()
        self.loader = loader

    def train_dataloader(self):
        return self.loader


class Frame:
    """As a DataFrame of polars or a table of Arrow: ``columns``, a length, ``to_pandas``."""

    def __init__(self, **columns):
        self.columns = list(columns)
        self._values = columns

    def __len__(self):
        return len(self._values[self.columns[0]])

    def __getitem__(self, name):
        return self._values[name]

    def to_pandas(self):
        return pandas.DataFrame(self._values)


class HuggingFace:
    """As a data set of the library ``datasets``: rows by number, columns by name."""

    def __init__(self, columns, **features):
        self.column_names = list(columns)
        self.features = {name: features.get(name) for name in columns}
        self.format = {"type": None}
        self._frame = Frame(**columns)
        self.to_pandas = self._frame.to_pandas

    def __len__(self):
        return len(self._frame)

    def __getitem__(self, key):
        if isinstance(key, str):
            return self._frame[key]
        return {name: self._frame[name][key] for name in self.column_names}

    def with_format(self, kind):
        assert kind is None
        return self

    def select(self, indices):
        rows = [self[index] for index in indices]
        columns = {name: [row[name] for row in rows] for name in self.column_names}
        return HuggingFace(columns, **self.features)

    def select_columns(self, names):
        columns = {name: self._frame[name] for name in names}
        return HuggingFace(columns, **self.features)


X = np.random.default_rng(0).normal(size=(60, 4))
Y = np.arange(60) % 3
HERE = TensorDataset(torch.tensor(X).float(), torch.tensor(Y))


class Items(Dataset):
    """Hands out samples that are not held as tensors, counts how often, and has whatever attributes it is given."""

    def __init__(self, items, **attributes):
        self.items = list(items)
        self.reads = 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        self.reads += 1
        return self.items[index]


def make_patients(number, seed, shift=0.0):
    rng = np.random.default_rng(seed)
    ages = rng.normal(50 + shift, 9, number)
    wards = np.resize(["A", "B", f"only {seed}"], number)
    is_ill = np.arange(number) % 2
    return Frame(age=ages.tolist(), ward=wards.tolist(), ill=is_ill.tolist())


CONFIGS = Path(__file__).parents[2] / "configs"
SCENARIOS = CONFIGS / "scenarios"


def count_by_client_and_class(data):
    """Samples by client and true class, all of a client's splits together ``[n, M]``."""
    images = load_image_data(data.source, data.files.root)
    labels_before_corruption = images.train.tensors[-1]
    counts = torch.zeros(data.num_clients, data.num_classes, dtype=torch.long)
    for client in range(data.num_clients):
        for split in ("train", "val", "test"):
            labels = labels_before_corruption[data.client_indices(client, split)]
            counts[client] += torch.bincount(labels, minlength=data.num_classes)
    return counts
