"""Preloading reads samples as if each were alone, or is refused: batches of all samples cross clients."""

import pytest
import torch
from torch.utils.data import default_collate

from flsv.data.loaders import preload
from flsv.utilities.errors import ConfigurationError
from helpers.data import make_items


def collate_sorted(samples):
    x, y = default_collate(samples)
    order = x[:, 0].argsort(descending=True)
    return x[order], y[order]


def collate_shuffled(samples):
    x, y = default_collate(samples)
    return x.lerp(x.flip(0), 0.3), y


def collate_without_last(samples):
    without_third = [sample for sample in samples if sample[0][0] != 3]
    return default_collate(without_third or samples)


def collate_with_noise(samples):
    x, y = default_collate(samples)
    noise = torch.rand(len(x), 1)
    return x + noise, y


def collate_normalized(samples):
    x, y = default_collate(samples)
    return x - x.mean(), y


def collate_half(samples):
    x, y = default_collate(samples)
    return x / 2, y


ROW_CHANGES = [
    collate_sorted,
    collate_shuffled,
    collate_without_last,
    collate_with_noise,
    collate_normalized,
]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("collate_fn", ROW_CHANGES)
def test_collate_functions_that_change_rows_are_refused(collate_fn, workers):
    message = "preload: the collate_fn of Items makes other"
    with pytest.raises(ConfigurationError, match=message):
        preload(make_items(), collate_fn, workers)


def test_collate_function_of_each_sample_alone_is_used():
    dataset = preload(make_items(), collate_half)
    x, y = dataset.tensors
    numbers = torch.arange(30)
    assert torch.equal(x[:, 0], numbers / 2)
    assert torch.equal(y, numbers % 3)


def collate_empty(samples):
    return default_collate([sample for sample in samples if sample[0][0] != 3])


def test_collate_function_that_leaves_nothing_of_a_sample_is_refused():
    message = "preload: the collate_fn of Items cannot make a batch of one sample alone"
    with pytest.raises(ConfigurationError, match=message):
        preload(make_items(), collate_empty)
