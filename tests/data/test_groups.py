"""Natural groups of data sets of every make."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from flsv.data.groups import named_groups
from flsv.errors import ConfigurationError


def dataset_groups(*given):
    found = named_groups(*given)
    return None if found is None else found[0]


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


def test_groups_by_a_field_within_a_field():
    rows = [{"x": torch.zeros(2), "meta": {"clinic": name}, "a.b": name} for name in "bab"]
    numbered = [{"meta": {"clinic": number}} for number in (7, 3)]
    assert named_groups(Samples(numbered), "meta.clinic")[1] == ("clinic 3", "clinic 7")
    assert named_groups(Samples(rows), "meta.clinic")[1] == ("a", "b")
    assert dataset_groups(Samples(rows), "meta.clinic").tolist() == [1, 0, 1]
    assert dataset_groups(Samples(rows), "a.b").tolist() == [1, 0, 1]
    for wrong in ("meta.ward", "x.clinic", "ward.clinic"):
        with pytest.raises(ConfigurationError, match=f"no attribute '{wrong}'"):
            dataset_groups(Samples(rows), wrong)
