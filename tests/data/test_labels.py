"""Labels of data sets of every make."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from flsv.data.labels import count_classes, dataset_labels
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


def test_target_transform_is_what_a_loader_sees():
    dataset = Samples(PAIRS, targets=[3, 1, 2], target_transform=lambda label: label - 1)
    assert dataset_labels(dataset).tolist() == [2, 0, 1]


def test_subsets_and_concatenations():
    tensors = TensorDataset(torch.zeros(4, 2), torch.tensor([5, 6, 7, 8]))
    stored = Samples(PAIRS, targets=[3, 1, 2])
    assert dataset_labels(Subset(Subset(tensors, [3, 1, 0]), [0, 2])).tolist() == [8, 5]
    assert dataset_labels(ConcatDataset([tensors, Subset(stored, [2, 0])])).tolist() == [5, 6, 7, 8, 2, 3]
    assert stored.reads == 0


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


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("stray", [1000, 10**6, 10**9, 2**62])
def test_a_stray_label_is_refused(split, stray):
    labels = torch.arange(30) % 10
    train, test = (labels.clone().index_fill(0, torch.tensor(4), stray if split == s else 4) for s in ("train", "test"))
    with pytest.raises(ConfigurationError, match=f"the largest label is {stray}, and there are only 1[01] different"):
        count_classes(train, (), {"test": TensorDataset(torch.zeros(30, 2), test)})
