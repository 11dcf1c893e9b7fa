"""Natural groups of data sets of every make."""

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from flsv.data.groups import dataset_groups
from flsv.errors import ConfigurationError


class Samples(Dataset):
    """Hands out samples, and has whatever attributes it is given."""

    def __init__(self, samples, **attributes):
        self.samples = samples
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        return self.samples[index]


PAIRS = [(torch.zeros(2), label) for label in (3, 1, 2)]


def test_groups_by_attribute_name_and_list():
    dataset = Samples(PAIRS, groups=[7, 5, 7], hospital=np.array(["b", "a", "c"]))
    assert dataset_groups(dataset).tolist() == [1, 0, 1]
    assert dataset_groups(dataset, "hospital").tolist() == [1, 0, 2]
    assert dataset_groups(dataset, [9, 9, 1]).tolist() == [1, 1, 0]
    assert dataset_groups(dataset, torch.tensor([9, 9, 1])).tolist() == [1, 1, 0]
    assert dataset_groups(Subset(dataset, [2, 1]), "hospital").tolist() == [1, 0]
    assert dataset_groups(Samples(PAIRS)) is None


def test_groups_that_are_not_there():
    with pytest.raises(ConfigurationError, match="no attribute 'ward'"):
        dataset_groups(Samples(PAIRS), "ward")
    with pytest.raises(ConfigurationError, match=r"one entry per training sample, \[3\]; got shape \[2\]"):
        dataset_groups(Samples(PAIRS), [1, 2])
