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


class Slots:
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


class Wrapped(Dataset):
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


class Table:
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
        return {
            "x": self._x[key].tolist(),
            "label": int(self._y[key]),
        }

    def with_format(self, kind):
        return self

    def select(self, indices):
        return Table(self._x[indices], self._y[indices])

    def to_pandas(self):
        raise AssertionError("its rows are read, not its table")


Sample = namedtuple("Sample", "image target")


def pairs(x, y):
    return list(zip(x, y))


def dicts(x, y):
    samples = []
    for vector, label in pairs(x, y):
        sample = {"x": vector, "label": label}
        samples.append(sample)
    return samples


def arrays(x, y):
    samples = []
    for vector, label in pairs(x, y):
        numpy_label = label.numpy()[()]  # a scalar
        samples.append((vector.numpy(), numpy_label))
    return samples


def concatenated(x, y):
    first_part = TensorDataset(x[:5], y[:5])
    second_part = pairs(x[5:], y[5:])
    return ConcatDataset([first_part, second_part])


def slots_of_lists(x, y):
    return Slots(list(x), y.tolist())


def subset_of_list(x, y):
    return Subset(pairs(x, y), range(len(x)))


FORMS = {
    "list": pairs,
    "tuple": lambda x, y: tuple(pairs(x, y)),
    "list of named tuples": lambda x, y: list(map(Sample, x, y)),
    "list of dicts": dicts,
    "list of arrays": arrays,
    "slots": Slots,
    "slots of lists": slots_of_lists,
    "concat": concatenated,
    "subset of a list": subset_of_list,
    "wrapped": lambda x, y: Wrapped(TensorDataset(x, y)),
    "wrapped list": lambda x, y: Wrapped(pairs(x, y)),
    "Hugging Face": Table,
}


class Users(L.LightningDataModule):
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


def batches_of(form, as_clients: bool) -> list[Any]:
    """Return a client's batches where ``form`` makes the data sets, of clients or of a data module's loaders."""
    if as_clients:
        clients = {
            "Boston": form(*make_samples(12, seed=0)),
            "Lyon": form(*make_samples(10, seed=1)),
        }
        data = FederatedDataModule(clients=clients, batch_size=4)
    else:
        data = FederatedDataModule(Users(form), IIDPartitioner(num_clients=2))
    data.setup("fit")
    batches = []
    for batch in data.client_loader(1):
        *numbers, labels = tree_leaves(batch)
        # A vector of each number, as torch collates lists.
        x = numbers[0] if len(numbers) == 1 else torch.stack(numbers, 1)
        batches.append((x.float(), labels))
    return batches


@pytest.mark.parametrize("as_clients", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_samples_has_the_batches_of_tensors(form, as_clients):
    batches = batches_of(FORMS[form], as_clients)

    torch.testing.assert_close(batches, batches_of(TensorDataset, as_clients))


# ---- what is a data set


DATASET = TensorDataset(torch.zeros(3))
LABELS = [0, 1, 1]
VECTORS = [
    [0.1, 0.2],
    [0.3, 0.4],
    [0.5, 0.6],
]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"train": DATASET}, "names instead of the samples' indices"),
        (iter(LABELS), "it has no __len__ or no __getitem__"),
        ((DATASET, DATASET), "is a TensorDataset, which is not a sample"),
        (["Boston.csv", "Lyon.csv"], "is a str, which is not a sample"),
        ((VECTORS, LABELS), "X has to be an array"),
        ((VECTORS, np.array(LABELS)), "X has to be an array"),
        ((Table(VECTORS, LABELS), LABELS), "is a Table, which is not a sample"),
        ([], "the data set has no samples"),
    ],
)
def test_what_holds_no_samples_is_refused_with_the_reason(data, reason):
    samples = pairs(*make_samples(9, seed=0))
    clients = {"Boston": data, "Lyon": samples}
    federation = FederatedDataModule(clients=clients)
    message = f"client 'Boston': .*{reason}"
    with refused(message):
        federation.setup("fit")


@pytest.mark.parametrize(
    "samples",
    [
        [
            (torch.zeros(4), 0),
            (torch.ones(4), 1),
        ],
        [
            [torch.zeros(4), 0],
            [torch.ones(4), 1],
        ],
    ],
    ids=["tuples", "lists"],
)
def test_two_samples_are_a_data_set_if_they_cannot_be_columns(samples):
    clients = {"Boston": samples, "Lyon": 2 * samples}
    federation = FederatedDataModule(clients=clients, val=samples, splits=Splits())
    federation.setup("fit")

    assert federation.num_samples.tolist() == [2, 4]
    assert federation.class_counts.tolist() == [[1, 1], [2, 2]]


def test_list_of_samples_is_partitioned_held_out_and_preloaded_as_a_source():
    samples = pairs(*make_samples(60, seed=0))
    for source in (samples, [samples, samples[:20]]):
        data = FederatedDataModule(
            source,
            SizePartitioner([2, 1]),
            splits=Splits(server_val=0.5),
            loader=Loader(preload=True),
        )
        data.setup("fit")

        assert data.num_samples.tolist() == [20, 10]
        assert len(data.server_val_indices) == 30
    assert repr(FederatedDataModule(samples)).startswith("FederatedDataModule(list, ")


# ---- hashes


@pytest.mark.parametrize("form", ["list", "tuple", "list of dicts", "list of arrays", "slots"])
def test_any_changed_sample_changes_the_hash_by_which_a_run_is_resumed(form):
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
def test_some_rows_have_the_class_of_the_whole_and_its_samples(form):
    whole = FORMS[form](X, Y)
    samples = rows_as(whole, ROWS)

    assert len(samples) == len(ROWS)
    assert type(samples).__name__ == type(whole).__name__
    for index, row in enumerate(ROWS.tolist()):
        sample = samples[index]
        expected = whole[row]
        assert type(sample) is type(expected)
        torch.testing.assert_close(sample, expected)


def test_rows_of_an_object_with_slots_have_their_labels_and_its_methods_act_on_the_whole():
    whole = Slots(X, Y)
    samples: Any = rows_as(whole, ROWS)
    samples.set_level(3)

    assert torch.equal(samples.y, Y[ROWS])
    assert whole.level == samples.level == 3
    assert torch.equal(copy.copy(samples).y, Y[ROWS])


def test_rows_of_a_data_set_that_wraps_another_one_have_their_labels():
    whole = Wrapped(TensorDataset(X, Y))
    samples: Any = rows_as(whole, ROWS)

    _, labels = samples.tensors
    assert torch.equal(labels, Y[ROWS])
    assert samples.labels_one_by_one() == labels.tolist()


def test_data_set_that_wraps_a_table_stays_one():
    table = pandas.DataFrame({"x": range(8)})
    samples: Any = rows_as(WrappedTable(table), ROWS)

    assert isinstance(samples, WrappedTable)
    assert [samples[index] for index in range(3)] == ROWS.tolist()
    assert samples.iloc[0]["x"] == 1


class WrappedTable(Wrapped):
    def __getitem__(self, index):
        return self._samples.iloc[index]["x"]


def test_rows_of_a_subset_have_the_indices_of_the_rows():
    whole = Subset(TensorDataset(X, Y), range(7, -1, -1))
    subset: Any = rows_as(whole, ROWS)

    _, labels = subset.dataset.tensors
    assert torch.equal(labels[subset.indices], Y.flip(0)[ROWS])


def test_rows_of_concatenated_sets_are_concatenated_rows_of_the_sets():
    samples: Any = rows_as(concatenated(X, Y), ROWS)

    first_part, second_part = samples.datasets
    _, labels = first_part.tensors
    assert torch.equal(labels, Y[ROWS[:2]])
    assert len(second_part) == 1


def test_tensors_arrays_and_ranges_are_data_sets_too():
    assert torch.equal(rows_as(X, ROWS), X[ROWS])
    assert np.array_equal(rows_as(X.numpy(), ROWS), X[ROWS].numpy())
    assert list(rows_as(range(8), ROWS)) == ROWS.tolist()


# ---- a data module of a coalition


class Columns(NamedTuple):
    x: Tensor
    y: Tensor


def test_all_that_holds_the_members_samples_is_restricted_and_nothing_else():
    module: Any = L.LightningDataModule()
    module.columns = Columns(X, Y)
    module.samples = TensorDataset(*module.columns)
    module.other_labels = Y.clone()
    train = Wrapped(module.samples)
    val = TensorDataset(module.other_labels)
    module.sets = {"train": train, "val": val}
    restrict_to_rows(module, train, ROWS)

    assert len(module.sets["train"]) == 3
    assert len(module.samples) == 3
    assert torch.equal(module.columns.y, Y[ROWS])
    assert module.sets["val"] is val
    assert len(module.other_labels) == 8


def test_parts_of_concatenated_sets_are_restricted_to_their_own_rows():
    module: Any = L.LightningDataModule()
    module.parts = []
    for rows in torch.arange(8).split([5, 2, 1]):
        part = pairs(X[rows], Y[rows])
        module.parts.append(part)
    module.train = ConcatDataset(module.parts)
    restrict_to_rows(module, module.train, ROWS)

    assert [len(part) for part in module.parts] == [2, 1, 0]


def test_the_data_set_of_a_subset_keeps_what_is_no_other_clients():
    module: Any = L.LightningDataModule()
    module.whole = TensorDataset(X, Y)
    module.train = Subset(module.whole, [6, 4, 2, 0])
    restrict_to_rows(module, module.train, torch.tensor([1, 3]))

    _, labels_of_whole = module.whole.tensors
    labels_of_train = [label for _, label in module.train]
    rows_without_6_and_2 = [0, 1, 3, 4, 5, 7]
    assert torch.equal(labels_of_whole, Y[rows_without_6_and_2])
    assert labels_of_train == [Y[4], Y[0]]


def test_data_set_that_refers_to_itself_is_searched_once():
    dataset = Wrapped(TensorDataset(X, Y))
    dataset.itself = dataset
    assert len(parts_of_samples(dataset)) == 4  # with the wrapped one and its tensors
