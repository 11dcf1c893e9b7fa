"""Batches from tensors equal batches from a DataLoader, and follow from the generator alone; so do generators that
data hold: a pass over them draws what its seed says, wherever they stood."""

import random
from functools import partial
from itertools import chain

import numpy as np
import pytest
import torch
from own_data import Items
from resuming import assert_resumes
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate
from toys import CLASSES, FEATURES, Plain, network, toy_data, toy_sets

from flsv.data import FederatedDataModule, Loader, SizePartitioner, TensorBatches, make_loader
from flsv.data.loaders import held_generators, preload
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop

X = torch.randn(50, 1, 4, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(50)
TENSORS = TensorDataset(X, Y)


PER_SAMPLE = Items(zip(X, Y.tolist()))  # the same data, one sample at a time


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def labels_of(batches):
    return [y.tolist() for _, y in batches]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_both_paths_give_the_same_batches_on_every_pass(ordered, drop_last):
    indices = torch.arange(3, 40, 2)
    kwargs = {"batch_size": 4, "drop_last": drop_last, "transform": Twice()}
    fast, slow = (
        make_loader(data, indices, generator=None if ordered else generator(5), **kwargs)
        for data in (TENSORS, PER_SAMPLE)
    )
    assert isinstance(fast, TensorBatches)
    assert isinstance(slow, DataLoader)
    passes = [(list(fast), list(slow)) for _ in range(2)]
    for one, other in passes:
        for (x1, y1), (x2, y2) in zip(one, other, strict=True):
            assert torch.equal(x1, x2)
            assert torch.equal(y1, y2)
            assert torch.equal(x1, 2 * X[y1])
        assert len(one) == len(fast) == len(slow)
    orders = [list(chain(*labels_of(one))) for one, _ in passes]
    assert (orders[0] == orders[1]) is ordered
    if ordered:
        assert orders[0] == indices[: 16 if drop_last else 19].tolist()


class Twice:
    def __call__(self, x):
        return x * 2


@pytest.mark.parametrize("dataset", [TENSORS, PER_SAMPLE])
def test_global_generator_is_neither_read_nor_moved(dataset):
    state = torch.get_rng_state()
    order = labels_of(make_loader(dataset, batch_size=8, generator=generator(1)))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(123)
    assert labels_of(make_loader(dataset, batch_size=8, generator=generator(1))) == order


def test_subsets_of_subsets_are_read_as_tensors():
    nested = Subset(Subset(TENSORS, range(10, 40)), [5, 0, 29])
    loader = make_loader(nested, torch.tensor([2, 0]), batch_size=2, collate_fn=default_collate)
    assert isinstance(loader, TensorBatches)
    assert labels_of(loader) == [[39, 15]]


@pytest.mark.parametrize("workers", [0, 1])
def test_preloaded_samples_are_in_order(workers):
    images, labels = preload(PER_SAMPLE, num_workers=workers).tensors
    assert torch.equal(images, X)
    assert torch.equal(labels, Y)
    assert preload(TENSORS) is TENSORS
    with pytest.raises(ConfigurationError, match="samples of Items do not collate to a tuple of tensors"):
        preload(Items([{"x": 1}]))


@pytest.mark.parametrize("val", [True, False])
def test_data_near_a_device(val):
    """Batches are gathered where the tensors lie; ``tests/cuda`` has fits on one."""
    data = toy_data() if val else FederatedDataModule(toy_sets()[0], SizePartitioner([1, 2]))
    data.setup("fit")
    vars(data)["_dealt"] = data._data.near(torch.device("meta"))
    loaders = [data.client_loader(0), data.client_loader(1, shuffle=False), data.val_dataloader()]
    assert {tensor.device.type for loader in loaders for batch in loader for tensor in batch} == {"meta"}


# Generators that data hold

GENERATORS = {
    "RandomState": lambda: np.random.RandomState(1),
    "Generator": lambda: np.random.default_rng(1),
    "Random": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}


def draw(rng):
    if isinstance(rng, torch.Generator):
        return float(torch.rand((), generator=rng, dtype=torch.float64))
    return float(rng.random() if hasattr(rng, "random") else rng.random_sample())


class Held(Dataset):
    """Every sample is a draw."""

    def __init__(self, rng, length=90):
        self.generator, self.length = rng, length
        self.targets = torch.arange(length) % CLASSES

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = torch.full((FEATURES,), draw(self.generator))
        x[0] += int(self.targets[index])
        return x, int(self.targets[index])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_pass_draws_what_its_seed_says(kind, workers):
    held = Held(GENERATORS[kind](), 6)

    def batches(seed):
        loader = make_loader(held, batch_size=2, generator=generator(seed), num_workers=workers)
        return torch.cat([x for x, _ in loader])[:, 1]

    first = batches(0)
    assert torch.equal(batches(0), first)
    assert len(first.unique()) == 6  # nor do two workers draw the same
    assert not torch.equal(batches(1), first)


class Randomizable:
    """As MONAI's: of the class, until somebody seeds it."""

    R = np.random.RandomState()


def test_where_generators_are_found():
    rng, other, deep = np.random.default_rng(), random.Random(), random.Random()
    dataset = Held({"transforms": [Randomizable(), Randomizable(), other]})
    dataset.again, dataset.itself = rng, dataset
    dataset.deep, dataset.too_deep = [[[[deep]]]], [[[[[random.Random()]]]]]
    expected = [Randomizable.R, other, rng, deep]
    assert all(map(lambda a, b: a is b, held_generators(dataset), expected))
    # A data set in another counts as one of its own.
    assert len(held_generators(Subset(Subset(Subset(dataset, [0]), [0]), [0]))) == len(expected)


class Noise:
    """A transform of batches that holds its own."""

    def __init__(self):
        self.rng = torch.Generator().manual_seed(7)

    def __call__(self, x):
        return x + torch.rand(x.shape, generator=self.rng)


def sample_by_sample(workers=0, **options):
    data = Held(np.random.RandomState(4))
    loader = Loader(num_workers=workers)
    return FederatedDataModule(data, SizePartitioner([2, 1]), batch_size=8, loader=loader, **options)


def with_a_transform():
    x = torch.randn(90, FEATURES, generator=generator())
    data = TensorDataset(x, torch.arange(90) % CLASSES)
    return FederatedDataModule(data, SizePartitioner([2, 1]), batch_size=8, train_transform=Noise())


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [partial(sample_by_sample, train_transform=Noise()), partial(sample_by_sample, 2), with_a_transform]
)
def test_a_resumed_run_draws_what_the_whole_one_drew(make, tmp_path):
    assert_resumes(lambda: FederatedLoop(seed=3), tmp_path, lambda: Plain(network(batch_norm=False)), make)
