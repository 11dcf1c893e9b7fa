"""Labels of data sets of every make."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv.data.labels import class_names_of, count_classes, dataset_labels
from flsv.errors import ConfigurationError


class Samples(Dataset):
    """Hands out samples, counts how often, and has whatever attributes it is given."""

    def __init__(self, samples, **attributes):
        self.samples = samples
        self.reads = 0
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.reads += 1
        return self.samples[index]


PAIRS = [(torch.zeros(2), label) for label in (3, 1, 2)]


@pytest.mark.parametrize("name", ["targets", "labels"])
@pytest.mark.parametrize("stored", [[3, 1, 2], torch.tensor([3, 1, 2]), np.array([[3], [1], [2]], np.uint8)])
def test_stored_labels_spare_reading_the_samples(name, stored):
    dataset = Samples(PAIRS, **{name: stored})
    labels = dataset_labels(dataset)
    assert labels.tolist() == [3, 1, 2]
    assert labels.dtype == torch.int64
    assert dataset.reads == 0


@pytest.mark.parametrize("key", ["label", "labels", "target", "targets", "y"])
def test_dictionaries(key):
    assert dataset_labels(Samples([{"x": 0, key: torch.tensor(label)} for label in (3, 1)])).tolist() == [3, 1]


def test_samples_are_read_where_nothing_is_stored():
    assert dataset_labels(Samples(PAIRS)).tolist() == [3, 1, 2]
    assert dataset_labels(Samples([(0, "meta", label) for label in (3, 1)])).tolist() == [3, 1]
    assert dataset_labels(Samples(PAIRS, targets=[0, 0])).tolist() == [3, 1, 2]


def test_target_transform_is_what_a_loader_sees():
    dataset = Samples(PAIRS, targets=[3, 1, 2], target_transform=lambda label: label - 1)
    assert dataset_labels(dataset).tolist() == [2, 0, 1]


def test_subsets_and_concatenations():
    tensors = TensorDataset(torch.zeros(4, 2), torch.tensor([5, 6, 7, 8]))
    stored = Samples(PAIRS, targets=[3, 1, 2])
    assert dataset_labels(Subset(Subset(tensors, [3, 1, 0]), [0, 2])).tolist() == [8, 5]
    assert dataset_labels(ConcatDataset([tensors, Subset(stored, [2, 0])])).tolist() == [5, 6, 7, 8, 2, 3]
    assert stored.reads == 0


def test_only_the_samples_of_a_subset_are_read():
    dataset = Samples(PAIRS)
    assert dataset_labels(Subset(dataset, [2])).tolist() == [2]
    assert dataset.reads == 1


def test_whole_floating_point_labels_are_classes():
    assert dataset_labels(TensorDataset(torch.zeros(2, 2), torch.tensor([1.0, 0.0]))).tolist() == [1, 0]


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(torch.zeros(2, 2), torch.tensor([0.5, 0.0])),
        TensorDataset(torch.zeros(2, 2), torch.tensor([-1, 0])),
        TensorDataset(torch.zeros(2, 2), torch.zeros(2, 14)),
        TensorDataset(torch.zeros(2, 2)),
        Samples([torch.zeros(2)]),
        Samples([{"x": 1}]),
        Samples([(0, "cat"), (0, "dog")]),
        Samples([(0, [1]), (0, [1, 2])]),
    ],
)
def test_data_without_class_labels(dataset):
    with pytest.raises(ConfigurationError, match=r"No class labels in .*One whole number per sample"):
        dataset_labels(dataset)


def test_class_names_through_subsets():
    assert class_names_of(Subset(Samples(PAIRS, classes=["cat", "dog"]), [0])) == ("cat", "dog")
    assert class_names_of(Samples(PAIRS)) == ()


def test_wrong_labels_are_counted_and_the_first_is_named():
    for labels in ([0, 1, -1, -1], [0.0, 1.0, 0.7, -1.0], [0.0, 1.0, torch.nan, torch.inf]):
        with pytest.raises(ConfigurationError, match=r"2 of 4, such as \S+ at 2"):
            dataset_labels(TensorDataset(torch.zeros(4, 2), torch.tensor(labels)))


def data_of(labels):
    return TensorDataset(torch.zeros(len(labels), 2), torch.tensor(labels))


def test_the_number_of_classes(recwarn):
    labels = torch.arange(30) % 3
    assert count_classes(labels, (), {}) == 3
    assert count_classes(labels, ("a", "b", "c", "d"), {}) == 4
    assert count_classes(labels, (), {"validation": None, "test": data_of([2, 2])}) == 3
    assert count_classes(labels, (), {"test": Samples(PAIRS)}) == 3  # not read only to look
    assert not recwarn.list


def test_a_class_that_only_the_test_data_have_is_a_class_too():
    with pytest.warns(UserWarning, match="no training sample is of class 3:"):
        assert count_classes(torch.arange(30) % 3, (), {"test": data_of([0, 3])}) == 4


@pytest.mark.parametrize(("labels", "absent"), [([1, 2, 3], "0:"), ([0, 1, 5, 9], r"2 \.\. 4, 6 \.\. 8:")])
def test_classes_without_a_training_sample_are_warned_of(labels, absent):
    with pytest.warns(UserWarning, match=f"no training sample is of class {absent}"):
        assert count_classes(torch.tensor(labels), (), {}) == max(labels) + 1


def test_classes_with_names_need_no_sample(recwarn):
    assert count_classes(torch.tensor([1, 5]), tuple("abcdef"), {}) == 6
    assert not recwarn.list


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("stray", [1000, 10**6, 10**9, 2**62])
def test_a_stray_label_is_refused(split, stray):
    labels = torch.arange(30) % 10
    train, test = (labels.clone().index_fill(0, torch.tensor(4), stray if split == s else 4) for s in ("train", "test"))
    with pytest.raises(ConfigurationError, match=f"the largest label is {stray}, and there are only 1[01] different"):
        count_classes(train, (), {"test": TensorDataset(torch.zeros(30, 2), test)})


@pytest.mark.parametrize("name", ["validation", "test"])
def test_negative_labels_of_held_out_data(name):
    with pytest.raises(ConfigurationError, match="not whole numbers from 0 up, 1 of 3, such as -1 at 1"):
        count_classes(torch.arange(3), (), {name: data_of([0, -1, 2])})
