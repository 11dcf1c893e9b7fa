"""Random generators are seeded however deep they lie: a resumed run and every worker draw what they should."""

import random
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from flsv.data.loaders import make_loader


class Noise:
    def __init__(self, generator=None):
        self.generator = generator or np.random.RandomState(0)

    def __call__(self, x):
        return x + self.generator.normal()


class NoiseOfItsClass(Noise):
    """As MONAI's: of the class, until somebody seeds it."""

    generator = np.random.RandomState()

    def __init__(self):
        pass


class PythonsNoise(Noise):
    def __call__(self, x):
        return x + self.generator.random()


class SlottedNoise(Noise):
    __slots__ = ("transform",)

    def __init__(self):
        self.transform = Noise()

    def __call__(self, x):
        return self.transform(x)


class Compose:
    def __init__(self, *transforms):
        self.transforms = transforms

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


def with_noise(x, generator):
    return x + float(torch.rand((), generator=generator))


def in_a_closure():
    noise = Noise()
    return lambda x: noise(x)


KINDS = {
    "of a class": lambda: Compose(NoiseOfItsClass()),
    "Generator": lambda: Noise(np.random.default_rng(1)),
    "Random": lambda: PythonsNoise(random.Random(1)),
    "compositions": lambda: Compose(Compose(Compose(Compose(Noise())))),
    "partial": lambda: partial(with_noise, generator=torch.Generator()),
    "slots": lambda: Compose(SlottedNoise()),
    "bound method": lambda: Compose(Noise().__call__),
    "closure": in_a_closure,
    "queue": lambda: deque([SimpleNamespace(noise=Noise())]),
}


class Transformed(Dataset):
    def __init__(self, transform):
        self.transform = transform

    def __len__(self):
        return 6

    def __getitem__(self, index):
        transform = self.transform
        if isinstance(transform, deque):
            transform = transform[0].noise
        return transform(torch.zeros(1))


@pytest.mark.fast_rows("*-0", "closure-2")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_draws_what_its_seed_says(kind, workers):
    dataset = Transformed(KINDS[kind]())

    def numbers(seed):
        generator = torch.Generator().manual_seed(seed)
        loader = make_loader(
            dataset,
            batch_size=1,
            generator=generator,
            num_workers=workers,
        )

        return torch.cat(list(loader))

    numbers_of_a_pass = numbers(0)
    assert torch.equal(numbers(0), numbers_of_a_pass)
    assert len(numbers_of_a_pass.unique()) == 6  # no two workers draw the same
    assert not torch.equal(numbers(1), numbers_of_a_pass)
