"""Batches from tensors equal batches from a DataLoader, and follow from the generator alone; so do generators that
data hold. Whether two data sets of equal labels are the same, and whether their inputs are finite."""

import copy
import random
from functools import partial
from itertools import chain
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import ToTensor

from flsv.data import (
    IIDPartitioner,
    SizePartitioner,
    TensorBatches,
    make_loader,
)
from flsv.data.division import not_finite
from flsv.data.loaders import preload
from flsv.data.sample_hashes import content_hash
from helpers import refused
from helpers.data import Items, set_up_data

X = torch.randn(50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50)
TENSORS = TensorDataset(X, Y)


PER_SAMPLE = Items(zip(X, Y.tolist()))  # the same data, one sample at a time


def make_generator(seed=0):
    return torch.Generator().manual_seed(seed)


def labels_by_batch(batches):
    return [y.tolist() for _, y in batches]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_tensor_batches_equal_those_of_a_data_loader_on_every_pass(ordered, drop_last):
    indices = torch.arange(3, 40, 2)
    kwargs = {"batch_size": 4, "drop_last": drop_last}

    def loader(data):
        shuffle = None if ordered else make_generator(5)
        return make_loader(data, indices, generator=shuffle, **kwargs)

    fast = loader(TENSORS)
    slow = loader(PER_SAMPLE)

    assert isinstance(fast, TensorBatches)
    assert isinstance(slow, DataLoader)

    orders = []
    for _ in range(2):
        fast_batches = list(fast)
        slow_batches = list(slow)
        for (x1, y1), (x2, y2) in zip(
            fast_batches,
            slow_batches,
            strict=True,
        ):
            assert torch.equal(x1, x2)
            assert torch.equal(y1, y2)
            assert torch.equal(x1, X[y1])
        assert len(fast_batches) == len(fast) == len(slow)
        orders.append(list(chain(*labels_by_batch(fast_batches))))

    assert (orders[0] == orders[1]) is ordered

    if ordered:
        assert orders[0] == indices[: 16 if drop_last else 19].tolist()


@pytest.mark.parametrize("dataset", [TENSORS, PER_SAMPLE])
def test_global_generator_is_neither_read_nor_moved(dataset):
    state = torch.get_rng_state()
    order = labels_by_batch(make_loader(dataset, batch_size=8, generator=make_generator(1)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert labels_by_batch(make_loader(dataset, batch_size=8, generator=make_generator(1))) == order


def test_subsets_of_subsets_are_read_as_tensors():
    nested = Subset(Subset(TENSORS, range(10, 40)), [5, 0, 29])
    loader = make_loader(nested, torch.tensor([2, 0]), batch_size=2, collate_fn=default_collate)
    assert isinstance(loader, TensorBatches)
    assert labels_by_batch(loader) == [[39, 15]]


def test_preloading_with_a_collate_function_is_refused():
    loader = DataLoader(PER_SAMPLE, shuffle=True, collate_fn=list)
    module = L.LightningDataModule()
    module.train_dataloader = lambda: loader
    with refused("reads samples without the loader's collate_fn"):
        set_up_data(module, preload=True)


@pytest.mark.parametrize("workers", [0, 1])
def test_preloaded_samples_are_in_order(workers):
    images, labels = preload(PER_SAMPLE, num_workers=workers).tensors
    assert torch.equal(images, X)
    assert torch.equal(labels, Y)
    assert preload(TENSORS) is TENSORS

    with refused("samples that torch collates to a tuple of tensors, but those of Items"):
        preload(Items([{"x": 1}]))


class Drawn(Dataset):
    """Draws a number whenever a sample is read."""

    def __init__(self, draw):
        self.draw = draw

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return self.draw()


DRAWS = {
    "RandomState": lambda: np.random.RandomState(0).normal,
    "Generator": lambda: np.random.default_rng(1).normal,
    "Random": lambda: random.Random(1).random,
    "torch": lambda: partial(torch.rand, (), generator=torch.Generator()),
}


@pytest.mark.fast_rows("*-0", "torch-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("library", DRAWS)
def test_generators_of_the_data_are_seeded_in_each_pass_and_worker(library, workers):
    dataset = Drawn(DRAWS[library]())

    def draw_numbers(seed):
        loader = make_loader(
            dataset,
            batch_size=1,
            generator=make_generator(seed),
            num_workers=workers,
        )
        return torch.cat(list(loader))

    numbers = draw_numbers(seed=0)
    assert torch.equal(draw_numbers(seed=0), numbers)
    assert len(numbers.unique()) == 6  # no two workers draw the same
    assert not torch.equal(draw_numbers(seed=1), numbers)


HOLDERS = {"a": torch.tensor([0, 2, 4]), "b": torch.tensor([1, 3, 5])}


def changed_clients(
    hashes: dict[str, str],
    new_hashes: dict[str, str],
) -> list[str]:
    """Whose samples differ."""
    assert hashes.keys() == new_hashes.keys()
    return [name for name, digest in hashes.items() if digest != new_hashes[name]]


def make_tensors() -> TensorDataset:
    return TensorDataset(torch.arange(24.0).reshape(6, 4), torch.arange(6) % 2)


def hashes_of_holders(dataset: Any) -> dict[str, str]:
    hashes = {}
    for name, indices in HOLDERS.items():
        hashes[name] = content_hash(dataset, indices)
    return hashes


class Table(Dataset):
    """What it holds lies in attributes; or its samples are made when they are read."""

    factor = 1.0
    is_random = False
    opened = False

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        self.opened = True
        return {
            "x": torch.tensor([self.factor * (index + 1)])
            + (torch.rand(1) if self.is_random else 0)
        }, 0


@pytest.mark.parametrize(
    "column",
    [
        np.arange(12.0).reshape(6, 2),
        torch.arange(6).bfloat16(),
    ],
)
def test_changed_array_of_a_custom_data_set_changes_the_hash_of_its_client(column):
    hashes = hashes_of_holders(Table(column=column))
    equal_column = copy.deepcopy(column)
    changed_column = copy.deepcopy(column)
    changed_column[3] = column[2]

    assert hashes_of_holders(Table(column=equal_column)) == hashes

    new_hashes = hashes_of_holders(Table(column=changed_column))
    assert changed_clients(hashes, new_hashes) == ["b"]


def test_custom_data_set_without_arrays_is_hashed_by_reading_samples():
    hashes = hashes_of_holders(Table())
    doubled = hashes_of_holders(Table(factor=2.0))

    assert changed_clients(hashes, doubled) == ["a", "b"]

    # Random numbers are no other samples, and nothing is left behind.
    random_table = Table(is_random=True)
    hashes = hashes_of_holders(random_table)
    torch.rand(1)

    assert hashes_of_holders(random_table) == hashes
    assert not random_table.opened


def test_hashes_of_image_files_do_not_depend_on_their_folder(tmp_path):
    for folder in ("one", "two"):
        for name in ("cat", "dog"):
            (tmp_path / folder / name).mkdir(parents=True)
            for i in range(3):
                pixels = np.full((4, 4), 10 * i, np.uint8)
                Image.fromarray(pixels).save(tmp_path / folder / name / f"{i}.png")

    images = ImageFolder(str(tmp_path / "one"), transform=ToTensor())
    images_elsewhere = ImageFolder(str(tmp_path / "two"), transform=ToTensor())

    hashes = hashes_of_holders(images)
    assert hashes_of_holders(images_elsewhere) == hashes

    Image.fromarray(np.full((4, 4), 21, np.uint8)).save(tmp_path / "two/dog/2.png")
    assert changed_clients(hashes, hashes_of_holders(images_elsewhere)) == ["b"]


def test_changed_sample_changes_the_hash_of_its_client():
    def data_of(x: torch.Tensor) -> Any:
        dataset = TensorDataset(x, torch.arange(60) % 2)
        return set_up_data(dataset, SizePartitioner([1, 2], seed=0))

    x = torch.arange(60.0)[:, None]
    data = data_of(x)
    hashes = data.content_hashes()

    assert list(hashes) == ["server", "0", "1"]

    client_row = data.client_indices(1)[0]
    server_row = data.server_val_indices[0]
    for name, row in (("1", client_row), ("server", server_row)):
        changed_x = x.clone()
        changed_x[row] += 1
        assert changed_clients(hashes, data_of(changed_x).content_hashes()) == [name]


NUM_SAMPLES = 3000


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_samples_with_non_finite_inputs_are_found_at_any_index(value):
    inputs = torch.zeros(NUM_SAMPLES, 2, 4)
    broken_rows = [0, 1023, 1024, 2999]
    inputs[broken_rows, 1, 2] = value
    labels = torch.arange(NUM_SAMPLES) % 3
    data = TensorDataset(inputs, labels)

    assert not_finite(data).tolist() == broken_rows
    subset = Subset(data, [7, 1024, 8])
    assert not_finite(subset).tolist() == [1]


@pytest.mark.parametrize(
    "inputs",
    [torch.zeros(3, 2), torch.arange(3), torch.zeros(0, 2)],
    ids=["numbers", "whole numbers", "no samples"],
)
def test_finite_inputs_are_not_named_as_broken(inputs):
    assert len(not_finite(TensorDataset(inputs))) == 0


def test_evaluation_samples_with_non_finite_inputs_are_refused():
    y = torch.arange(8) % 3
    inputs = torch.zeros(8, 2)
    inputs[::2, 1] = torch.nan
    broken = TensorDataset(inputs, y)
    clean = TensorDataset(torch.zeros(8, 2), y)

    with refused("4 samples of the test data have NaN"):
        set_up_data((clean, broken), IIDPartitioner(2))
    infinite_inputs = torch.full((8, 2), torch.inf)
    all_broken = TensorDataset(infinite_inputs, y)
    with refused("4 samples of the held-out data have NaN"):
        set_up_data(
            all_broken,
            IIDPartitioner(2),
            server_val=0.0,
            client_val=0.4,
        )
