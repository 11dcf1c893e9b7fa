"""The forms in which people hold samples: each has the same values, and shows some of its samples in its own form."""

from __future__ import annotations

import copy
from collections import namedtuple
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pandas
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from flsv import FederatedDataModule
from flsv.data import IIDPartitioner, Loader, SizePartitioner, Splits
from flsv.data.shown import parts_of_samples, restrict_to_rows, rows_as
from helpers import refused
from helpers.users_data import make_samples

# ---- forms


class KeepsArraysInSlots:
    __slots__ = ("level", "x", "y")

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def set_level(self, level):
        self.level = level


class WrapsDataset(Dataset):
    """A data set that wraps another one in a private attribute, and has its attributes."""

    def __init__(self, samples):
        self._samples = samples

    def __getattr__(self, name):
        return getattr(self._samples, name)

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        return self._samples[index]

    def labels_one_by_one(self):
        labels = []
        for index in range(len(self)):
            _, label = self._samples[index]
            labels.append(int(label))
        return labels


class LooksLikeHuggingFaceDataset:
    """As a ``datasets.Dataset``: columns by name, rows that are dictionaries, and ``select``."""

    def __init__(self, x, y):
        self._x = x
        self._y = y
        self.features = {"x": "list", "label": "int64"}
        self.column_names = list(self.features)
        self.format = {"type": None}

    def __len__(self):
        return len(self._y)

    def __getitem__(self, key):
        if key == "x":
            return self._x.tolist()
        if key == "label":
            return self._y.tolist()
        return {"x": self._x[key].tolist(), "label": int(self._y[key])}

    def with_format(self, kind):
        return self

    def select(self, indices):
        return LooksLikeHuggingFaceDataset(self._x[indices], self._y[indices])

    def to_pandas(self):
        raise AssertionError("its rows are read, not its table")


Sample = namedtuple("Sample", "image target")


def pairs(x, y):
    return list(zip(x, y))


def dicts(x, y):
    return [{"x": vector, "label": label} for vector, label in zip(x, y)]


def arrays(x, y):
    return list(zip(x.numpy(), y.numpy()))


def concatenated(x, y):
    return ConcatDataset([TensorDataset(x[:5], y[:5]), pairs(x[5:], y[5:])])


def slots_of_lists(x, y):
    return KeepsArraysInSlots(list(x), y.tolist())


def subset_of_list(x, y):
    return Subset(pairs(x, y), range(len(x)))


FORMS = {
    "list": pairs,
    "tuple": lambda x, y: tuple(pairs(x, y)),
    "list of named tuples": lambda x, y: list(map(Sample, x, y)),
    "list of dicts": dicts,
    "list of arrays": arrays,
    "slots": KeepsArraysInSlots,
    "slots of lists": slots_of_lists,
    "concat": concatenated,
    "subset of a list": subset_of_list,
    "wrapped": lambda x, y: WrapsDataset(TensorDataset(x, y)),
    "wrapped list": lambda x, y: WrapsDataset(pairs(x, y)),
    "Hugging Face": LooksLikeHuggingFaceDataset,
}


class DataModuleOfForm(L.LightningDataModule):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def setup(self, stage):
        self.train = self.form(*make_samples(30, seed=0))
        self.val = self.form(*make_samples(20, seed=9))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=20)


def make_clients(form) -> FederatedDataModule:
    clients = {"Boston": form(*make_samples(12, seed=0)), "Lyon": form(*make_samples(10, seed=1))}
    return FederatedDataModule(clients=clients, batch_size=4)


def wrap_data_module(form) -> FederatedDataModule:
    return FederatedDataModule(DataModuleOfForm(form), IIDPartitioner(num_clients=2))


def stack_columns(columns: list[Tensor]) -> Tensor:
    """Return a matrix of inputs: torch collates samples that are lists to a vector of each column."""
    if len(columns) == 1:
        return columns[0]
    return torch.stack(columns, dim=1)


def batches_of_client_1(data: FederatedDataModule) -> list[Any]:
    """Inputs and labels of each batch."""
    data.setup("fit")
    batches = []
    for batch in data.client_loader(1):
        tensors = tree_leaves(batch)
        inputs = stack_columns(tensors[:-1])
        labels = tensors[-1]
        batches.append((inputs.float(), labels))
    return batches


@pytest.mark.parametrize("make_data", [make_clients, wrap_data_module])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_samples_has_the_batches_of_tensors(form, make_data):
    data = make_data(FORMS[form])
    data_of_tensors = make_data(TensorDataset)

    batches = batches_of_client_1(data)

    torch.testing.assert_close(batches, batches_of_client_1(data_of_tensors))


# ---- what is a data set


DATASET = TensorDataset(torch.zeros(3))
LABELS = [0, 1, 1]
VECTORS = [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"train": DATASET}, "names instead of the samples' indices"),
        (iter(LABELS), "it has no __len__ or no __getitem__"),
        ((DATASET, DATASET), "is a TensorDataset, which is not a sample"),
        (["Boston.csv", "Lyon.csv"], "is a str, which is not a sample"),
        ((VECTORS, LABELS), "X has to be an array"),
        ((VECTORS, np.array(LABELS)), "X has to be an array"),
        (
            (LooksLikeHuggingFaceDataset(VECTORS, LABELS), LABELS),
            "is a LooksLikeHuggingFaceDataset, which is not a sample",
        ),
        ([], "the data set has no samples"),
    ],
)
def test_object_that_is_no_data_set_is_refused_with_the_reason(data, reason):
    x, y = make_samples(9, seed=0)
    clients = {"Boston": data, "Lyon": pairs(x, y)}
    federation = FederatedDataModule(clients=clients)

    with refused(f"client 'Boston': .*{reason}"):
        federation.setup("fit")


@pytest.mark.parametrize("kind", [tuple, list])
def test_two_samples_are_a_data_set_if_they_cannot_be_columns(kind):
    samples = [kind([torch.zeros(4), 0]), kind([torch.ones(4), 1])]
    clients = {"Boston": samples, "Lyon": 2 * samples}
    federation = FederatedDataModule(clients=clients, val=samples, splits=Splits())
    federation.setup("fit")

    assert federation.num_samples.tolist() == [2, 4]
    assert federation.class_counts.tolist() == [[1, 1], [2, 2]]


SAMPLES = pairs(*make_samples(60, seed=0))


@pytest.mark.parametrize("source", [SAMPLES, [SAMPLES, SAMPLES[:20]]], ids=["train", "with test"])
def test_list_of_samples_is_partitioned_held_out_and_preloaded_as_a_source(source):
    data = FederatedDataModule(
        source, SizePartitioner([2, 1]), splits=Splits(server_val=0.5), loader=Loader(preload=True)
    )
    data.setup("fit")

    assert data.num_samples.tolist() == [20, 10]
    assert len(data.server_val_indices) == 30
    assert repr(data).startswith("FederatedDataModule(list, ")


# ---- hashes


@pytest.mark.parametrize("form", ["list", "tuple", "list of dicts", "list of arrays", "slots"])
def test_changed_sample_changes_the_hash_of_its_client(form):
    x, y = make_samples(20, seed=0)
    changed_x = x.clone()
    changed_x[7] += 1

    hashes = hashes_of_clients(FORMS[form](x, y))
    assert hashes == hashes_of_clients(FORMS[form](x, y))

    hashes_after_change = hashes_of_clients(FORMS[form](changed_x, y))
    assert hashes["0"] != hashes_after_change["0"]
    assert hashes["1"] == hashes_after_change["1"]


def hashes_of_clients(samples) -> dict[str, str]:
    other_samples = pairs(*make_samples(20, seed=0))
    clients = {"Boston": samples, "Lyon": other_samples}
    data = FederatedDataModule(clients=clients, val=other_samples)
    data.setup("fit")
    return data.content_hashes()


# ---- some rows, in the form of the whole


ROWS = torch.tensor([1, 4, 6])
X, Y = make_samples(8, seed=0)


@pytest.mark.parametrize("form", FORMS)
def test_selected_rows_have_the_class_and_the_samples_of_the_whole(form):
    whole = FORMS[form](X, Y)
    selected = rows_as(whole, ROWS)

    assert len(selected) == len(ROWS)
    assert type(selected).__name__ == type(whole).__name__
    for index, row in enumerate(ROWS.tolist()):
        assert type(selected[index]) is type(whole[row])
        torch.testing.assert_close(selected[index], whole[row])


def test_method_of_selected_rows_of_an_object_with_slots_changes_the_whole():
    whole = KeepsArraysInSlots(X, Y)
    selected = rows_as(whole, ROWS)

    selected.set_level(3)

    assert whole.level == 3
    assert selected.level == 3
    assert torch.equal(selected.y, Y[ROWS])


def test_copy_of_selected_rows_of_an_object_with_slots_has_the_same_rows():
    selected = rows_as(KeepsArraysInSlots(X, Y), ROWS)

    copied = copy.copy(selected)

    assert torch.equal(copied.y, Y[ROWS])


def test_rows_of_a_data_set_that_wraps_another_one_have_their_labels():
    selected = rows_as(WrapsDataset(TensorDataset(X, Y)), ROWS)

    assert torch.equal(selected.tensors[1], Y[ROWS])
    assert selected.labels_one_by_one() == Y[ROWS].tolist()


class WrapsPandasTable(WrapsDataset):
    def __getitem__(self, index):
        return self._samples.iloc[index]["x"]


def test_rows_of_a_data_set_that_wraps_a_pandas_table_are_those_of_the_table():
    table = pandas.DataFrame({"x": range(8)})
    selected = rows_as(WrapsPandasTable(table), ROWS)

    assert isinstance(selected, WrapsPandasTable)
    assert [selected[index] for index in range(3)] == ROWS.tolist()
    assert selected.iloc[0]["x"] == ROWS[0]


def test_rows_of_a_subset_have_the_indices_of_the_rows():
    backwards = Subset(TensorDataset(X, Y), range(7, -1, -1))
    labels_backwards = Y.flip(0)

    selected = rows_as(backwards, ROWS)

    labels = selected.dataset.tensors[1]
    assert torch.equal(labels[selected.indices], labels_backwards[ROWS])


def test_rows_of_concatenated_sets_are_concatenated_rows_of_the_sets():
    first_part, second_part = rows_as(concatenated(X, Y), ROWS).datasets

    assert torch.equal(first_part.tensors[1], Y[ROWS[:2]])
    assert len(second_part) == 1


@pytest.mark.parametrize("dataset", [X, X.numpy(), range(8)])
def test_rows_of_tensors_arrays_and_ranges_are_their_items(dataset):
    expected = [dataset[row] for row in ROWS.tolist()]

    np.testing.assert_array_equal(rows_as(dataset, ROWS), expected)


# ---- a data module of a coalition


class FeaturesAndLabels(NamedTuple):
    x: Tensor
    y: Tensor


def test_attributes_that_hold_the_training_samples_are_restricted_to_the_rows():
    samples = TensorDataset(X, Y)
    train = WrapsDataset(samples)
    module = L.LightningDataModule()
    module.sets = {"train": train}
    module.wrapped_samples = samples
    module.columns = FeaturesAndLabels(X, Y)

    restrict_to_rows(module, train, ROWS)

    assert len(module.sets["train"]) == len(ROWS)
    assert len(module.wrapped_samples) == len(ROWS)
    assert torch.equal(module.columns.y, Y[ROWS])


def test_attributes_that_hold_other_samples_are_not_restricted():
    train = TensorDataset(X, Y)
    other_labels = Y.clone()
    val = TensorDataset(other_labels)
    module = L.LightningDataModule()
    module.sets = {"train": train, "val": val}
    module.other_labels = other_labels

    restrict_to_rows(module, train, ROWS)

    assert module.sets["val"] is val
    assert len(module.other_labels) == len(Y)


def test_parts_of_concatenated_sets_are_restricted_to_their_own_rows():
    module = L.LightningDataModule()
    module.parts = [SAMPLES[:5], SAMPLES[5:7], SAMPLES[7:8]]
    module.train = ConcatDataset(module.parts)
    restrict_to_rows(module, module.train, ROWS)

    assert [len(part) for part in module.parts] == [2, 1, 0]


def test_data_set_of_a_restricted_subset_loses_only_samples_of_other_clients():
    module = L.LightningDataModule()
    module.whole = TensorDataset(X, Y)
    module.train = Subset(module.whole, [6, 4, 2, 0])
    second_and_fourth = torch.tensor([1, 3])  # samples 4 and 0 of the whole
    restrict_to_rows(module, module.train, second_and_fourth)

    without_6_and_2 = [0, 1, 3, 4, 5, 7]
    assert torch.equal(module.whole.tensors[1], Y[without_6_and_2])
    assert [label for _, label in module.train] == [Y[4], Y[0]]


def test_data_set_that_refers_to_itself_is_searched_once():
    dataset = WrapsDataset(TensorDataset(X, Y))
    dataset.itself = dataset
    assert len(parts_of_samples(dataset)) == 4  # with the wrapped one and its tensors
