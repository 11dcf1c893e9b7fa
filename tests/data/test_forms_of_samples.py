"""The forms in which people hold samples: each has the same values, and shows some of its samples in its own form."""

import copy
from collections import namedtuple
from typing import NamedTuple

import lightning as L
import numpy as np
import pandas
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from flsv import FederatedDataModule
from flsv.data import IIDPartitioner, SizePartitioner
from flsv.data.shown import parts_of_samples, restrict_to_rows, rows_as
from helpers import refused
from helpers.data import HuggingFace, set_up_data
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


Sample = namedtuple("Sample", "image target")


def pairs(x, y):
    return list(zip(x, y))


def dicts(x, y):
    return [{"x": vector, "label": label} for vector, label in zip(x, y)]


def arrays(x, y):
    return list(zip(x.numpy(), y.numpy()))


def concatenated(x, y):
    first_five_samples = TensorDataset(x[:5], y[:5])
    other_samples = pairs(x[5:], y[5:])
    return ConcatDataset([first_five_samples, other_samples])


def slots_of_lists(x, y):
    return KeepsArraysInSlots(list(x), y.tolist())


def hugging_face(x, y):
    return HuggingFace({"x": x.tolist(), "label": y.tolist()})


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
    "Hugging Face": hugging_face,
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


def make_clients(form):
    boston_samples = form(*make_samples(12, seed=0))
    lyon_samples = form(*make_samples(10, seed=1))
    clients = {"Boston": boston_samples, "Lyon": lyon_samples}
    return FederatedDataModule(clients=clients, batch_size=4)


def wrap_data_module(form):
    return FederatedDataModule(DataModuleOfForm(form), IIDPartitioner(num_clients=2))


def stack_columns(columns):
    """Return a matrix of inputs: torch collates samples that are lists to a vector of each column."""
    if len(columns) == 1:
        return columns[0]
    return torch.stack(columns, dim=1)


def batches_of_client_1(data):
    """Inputs and labels of each batch."""
    data.setup("fit")
    batches = []
    for batch in data.client_loader(1):
        tensors = tree_leaves(batch)
        labels = tensors.pop()
        inputs = stack_columns(tensors)
        batches.append((inputs.float(), labels))
    return batches


@pytest.mark.parametrize("make_data", [make_clients, wrap_data_module])
@pytest.mark.parametrize("form", FORMS)
def test_samples_in_any_form_have_the_batches_of_tensors(form, make_data):
    batches = batches_of_client_1(make_data(FORMS[form]))
    batches_of_tensors = batches_of_client_1(make_data(TensorDataset))

    torch.testing.assert_close(batches, batches_of_tensors)


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
            (HuggingFace({"x": VECTORS, "label": LABELS}), LABELS),
            "is a HuggingFace, which is not a sample",
        ),
        ([], "the data set has no samples"),
    ],
)
def test_object_that_is_no_data_set_is_refused_with_the_reason(data, reason):
    x, y = make_samples(9, seed=0)
    federation = FederatedDataModule(clients={"Boston": data, "Lyon": pairs(x, y)})

    with refused(f"client 'Boston': .*{reason}"):
        federation.setup("fit")


@pytest.mark.parametrize("kind", [tuple, list])
def test_two_samples_are_a_data_set_if_they_cannot_be_columns(kind):
    sample_of_class_0 = kind([torch.zeros(4), 0])
    sample_of_class_1 = kind([torch.ones(4), 1])
    two_samples = [sample_of_class_0, sample_of_class_1]
    clients = {"Boston": two_samples, "Lyon": 2 * two_samples}

    data = set_up_data(clients=clients, val=two_samples)

    assert data.num_samples.tolist() == [2, 4]
    assert data.class_counts.tolist() == [[1, 1], [2, 2]]


SAMPLES = pairs(*make_samples(60, seed=0))
TEST_SAMPLES = SAMPLES[:20]


@pytest.mark.parametrize("source", [SAMPLES, [SAMPLES, TEST_SAMPLES]], ids=["train", "with test"])
def test_list_of_samples_is_partitioned_held_out_and_preloaded_as_a_source(source):
    data = set_up_data(source, SizePartitioner([2, 1]), server_val=0.5, preload=True)

    # Half of 60 samples are the server's. The clients have two thirds and a third of the others.
    assert len(data.server_val_indices) == 30
    assert data.num_samples.tolist() == [20, 10]
    assert repr(data).startswith("FederatedDataModule(list, ")


# ---- hashes


def hashes_by_client(boston_samples):
    """The hashes of two clients by their numbers. Boston is client 0."""
    lyon_samples = pairs(*make_samples(20, seed=0))
    clients = {"Boston": boston_samples, "Lyon": lyon_samples}
    return set_up_data(clients=clients, val=lyon_samples).content_hashes()


@pytest.mark.parametrize("form", ["list", "tuple", "list of dicts", "list of arrays", "slots"])
def test_changed_sample_changes_the_hash_of_its_client(form):
    make_form = FORMS[form]
    x, y = make_samples(20, seed=0)
    changed_x = x.clone()
    changed_x[7] += 1

    hashes = hashes_by_client(make_form(x, y))
    hashes_of_equal_samples = hashes_by_client(make_form(x, y))
    hashes_after_change = hashes_by_client(make_form(changed_x, y))

    assert hashes == hashes_of_equal_samples
    assert hashes["0"] != hashes_after_change["0"]
    assert hashes["1"] == hashes_after_change["1"]


# ---- some rows, in the form of the whole


ROWS = torch.tensor([1, 4, 6])
X, Y = make_samples(8, seed=0)
TENSORS = TensorDataset(X, Y)
LABELS_OF_ROWS = Y[ROWS]


@pytest.mark.parametrize("form", FORMS)
def test_selected_rows_have_the_class_and_the_samples_of_the_whole(form):
    whole = FORMS[form](X, Y)

    selected = rows_as(whole, ROWS)

    assert len(selected) == len(ROWS)
    assert type(selected).__name__ == type(whole).__name__
    for position, row in enumerate(ROWS):
        sample = selected[position]
        expected_sample = whole[int(row)]
        assert type(sample) is type(expected_sample)
        torch.testing.assert_close(sample, expected_sample)


def test_method_of_selected_rows_of_an_object_with_slots_changes_the_whole():
    whole = KeepsArraysInSlots(X, Y)
    selected = rows_as(whole, ROWS)

    selected.set_level(3)

    assert whole.level == 3
    assert selected.level == 3
    assert torch.equal(selected.y, LABELS_OF_ROWS)


def test_copy_of_selected_rows_of_an_object_with_slots_has_the_same_rows():
    selected = rows_as(KeepsArraysInSlots(X, Y), ROWS)

    copied = copy.copy(selected)

    assert torch.equal(copied.y, LABELS_OF_ROWS)


def test_rows_of_a_data_set_that_wraps_another_one_have_their_labels():
    selected = rows_as(WrapsDataset(TENSORS), ROWS)

    _, labels_of_wrapped = selected.tensors
    assert torch.equal(labels_of_wrapped, LABELS_OF_ROWS)
    assert selected.labels_one_by_one() == LABELS_OF_ROWS.tolist()


class WrapsPandasTable(WrapsDataset):
    def __getitem__(self, index):
        return self._samples.iloc[index]["x"]


def test_rows_of_a_data_set_that_wraps_a_pandas_table_are_those_of_the_table():
    row_numbers = pandas.DataFrame({"x": range(8)})

    selected = rows_as(WrapsPandasTable(row_numbers), ROWS)

    assert isinstance(selected, WrapsPandasTable)
    assert [selected[0], selected[1], selected[2]] == ROWS.tolist()
    assert selected.iloc[0]["x"] == ROWS[0]


def test_rows_of_a_subset_are_a_subset_of_the_same_data_set():
    order = [7, 6, 5, 4, 3, 2, 1, 0]
    backwards = Subset(TENSORS, order)

    selected = rows_as(backwards, ROWS)

    assert selected.dataset is TENSORS
    assert selected.indices == [order[row] for row in ROWS]


def test_rows_of_concatenated_sets_are_concatenated_rows_of_the_sets():
    first_five_samples_and_others = concatenated(X, Y)

    selected = rows_as(first_five_samples_and_others, torch.tensor([1, 4, 6]))

    rows_of_first, rows_of_second = selected.datasets
    _, labels_of_first = rows_of_first.tensors
    assert torch.equal(labels_of_first, Y[[1, 4]])
    assert len(rows_of_second) == 1


@pytest.mark.parametrize("dataset", [X, X.numpy(), range(8)])
def test_rows_of_tensors_arrays_and_ranges_are_their_items(dataset):
    items_of_rows = [dataset[row] for row in ROWS]

    np.testing.assert_array_equal(rows_as(dataset, ROWS), items_of_rows)


# ---- a data module of a coalition


class FeaturesAndLabels(NamedTuple):
    x: Tensor
    y: Tensor


def test_attributes_that_hold_the_training_samples_are_restricted_to_the_rows():
    train = WrapsDataset(TENSORS)
    module = L.LightningDataModule()
    module.sets = {"train": train}
    module.wrapped_samples = TENSORS
    module.columns = FeaturesAndLabels(X, Y)

    restrict_to_rows(module, train, ROWS)

    assert len(module.sets["train"]) == len(ROWS)
    assert len(module.wrapped_samples) == len(ROWS)
    assert torch.equal(module.columns.y, LABELS_OF_ROWS)


def test_attributes_that_hold_other_samples_are_not_restricted():
    other_labels = Y.clone()
    val = TensorDataset(other_labels)
    module = L.LightningDataModule()
    module.sets = {"train": TENSORS, "val": val}
    module.other_labels = other_labels

    restrict_to_rows(module, TENSORS, ROWS)

    assert module.sets["val"] is val
    assert len(module.other_labels) == len(Y)


def test_parts_of_concatenated_sets_are_restricted_to_their_own_rows():
    module = L.LightningDataModule()
    module.parts = [SAMPLES[0:5], SAMPLES[5:7], SAMPLES[7:8]]
    module.train = ConcatDataset(module.parts)

    restrict_to_rows(module, module.train, torch.tensor([1, 4, 6]))

    # Rows 1 and 4 are in the first part, and row 6 is in the second.
    assert [len(part) for part in module.parts] == [2, 1, 0]


def test_data_set_of_a_restricted_subset_loses_only_samples_of_other_clients():
    module = L.LightningDataModule()
    module.whole = TENSORS
    module.train = Subset(TENSORS, [6, 4, 2, 0])
    positions_of_4_and_0 = torch.tensor([1, 3])

    restrict_to_rows(module, module.train, positions_of_4_and_0)

    _, remaining_labels = module.whole.tensors
    without_6_and_2 = [0, 1, 3, 4, 5, 7]
    assert torch.equal(remaining_labels, Y[without_6_and_2])
    assert [label for _, label in module.train] == [Y[4], Y[0]]


def test_data_set_that_refers_to_itself_is_searched_once():
    dataset = WrapsDataset(TENSORS)
    dataset.itself = dataset

    x, y = TENSORS.tensors
    assert len(parts_of_samples(dataset)) == len([dataset, TENSORS, x, y])
