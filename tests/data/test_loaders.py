"""Batches from tensors equal batches from a DataLoader, and follow from the generator alone."""

from itertools import chain

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from flsv.data import TensorBatches, make_loader

X = torch.randn(50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50)
TENSORS = TensorDataset(X, Y)


class PerSample(Dataset):
    """The same data, one sample at a time."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], int(Y[index])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def labels_of(batches):
    return [y.tolist() for _, y in batches]


def test_batches_are_the_rows_of_the_indices():
    indices = torch.tensor([4, 8, 15, 16, 23, 42, 7])
    for (x, y), rows in zip(TensorBatches([X, Y], indices, 3), indices.split(3), strict=True):
        assert torch.equal(x, X[rows])
        assert torch.equal(y, rows)


def test_a_shuffled_pass_has_every_sample_once_and_the_next_another_order():
    batches = TensorBatches([X, Y], None, 8, shuffle=True, generator=generator())
    first, second = (list(chain(*labels_of(batches))) for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("size", [1, 7, 10, 50, 64])
def test_length_is_the_number_of_batches(size, drop_last):
    batches = TensorBatches([X, Y], None, size, drop_last=drop_last)
    reference = DataLoader(TENSORS, batch_size=size, drop_last=drop_last)
    assert len(batches) == len(list(batches)) == len(reference)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_both_paths_give_the_same_batches_on_every_pass(shuffle, drop_last):
    indices = torch.arange(3, 40, 2)
    kwargs = {"batch_size": 4, "shuffle": shuffle, "drop_last": drop_last, "transform": lambda x: x * 2}
    fast = make_loader(TENSORS, indices, generator=generator(5), **kwargs)
    slow = make_loader(PerSample(), indices, generator=generator(5), **kwargs)
    assert isinstance(fast, TensorBatches)
    assert isinstance(slow, DataLoader)
    assert len(fast) == len(slow)
    for _ in range(3):
        for (x1, y1), (x2, y2) in zip(fast, slow, strict=True):
            assert torch.equal(x1, x2)
            assert torch.equal(y1, y2)


@pytest.mark.parametrize("dataset", [TENSORS, PerSample()])
def test_global_generator_is_neither_read_nor_moved(dataset):
    state = torch.get_rng_state()
    order = labels_of(make_loader(dataset, batch_size=8, shuffle=True, generator=generator(1)))
    assert list(chain(*labels_of(make_loader(dataset, batch_size=8)))) == list(range(50))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert labels_of(make_loader(dataset, batch_size=8, shuffle=True, generator=generator(1))) == order


def test_subsets_of_subsets_are_read_as_tensors():
    nested = Subset(Subset(TENSORS, range(10, 40)), [5, 0, 29])
    loader = make_loader(nested, torch.tensor([2, 0]), batch_size=2, collate_fn=default_collate)
    assert isinstance(loader, TensorBatches)
    assert labels_of(loader) == [[39, 15]]
    assert labels_of(make_loader(nested, batch_size=2)) == [[15, 10], [39]]
