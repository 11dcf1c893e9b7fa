"""Reading a data set into tensors."""

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from flsv.data.loaders import preload
from flsv.errors import ConfigurationError


class Images(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.full((1, 2, 2), float(index)), index % 7


@pytest.mark.parametrize("workers", [0, 1])
def test_every_sample_in_order(workers):
    images, labels = preload(Images(600), num_workers=workers).tensors
    assert images.shape == (600, 1, 2, 2)
    assert images[:, 0, 1, 1].tolist() == list(range(600))
    assert labels.tolist() == [index % 7 for index in range(600)]


def test_tensors_stay_as_they_are():
    dataset = TensorDataset(torch.zeros(3, 2), torch.zeros(3))
    assert preload(dataset) is dataset


def test_samples_that_are_no_tensors():
    class Records(Images):
        def __getitem__(self, index):
            return {"x": index}

    with pytest.raises(ConfigurationError, match="preload=True needs samples that collate to a tuple of tensors"):
        preload(Records(3))
