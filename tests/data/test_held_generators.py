"""Random generators that data hold: a pass over them draws what its seed says, wherever they stood."""

import random
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from resuming import assert_resumes
from torch.utils.data import Dataset, Subset, TensorDataset
from toys import CLASSES, FEATURES, Plain, network

from flsv.data import FederatedDataModule, Loader, SizePartitioner
from flsv.data.held_generators import held_generators
from flsv.data.loaders import make_loader
from flsv.loop import FederatedLoop

GENERATORS = {
    "RandomState": lambda: np.random.RandomState(1),
    "Generator": lambda: np.random.default_rng(1),
    "Philox": lambda: np.random.Generator(np.random.Philox(1)),
    "Random": lambda: random.Random(1),
    "torch": lambda: torch.Generator().manual_seed(1),
}


def draw(generator: Any) -> float:
    if isinstance(generator, torch.Generator):
        return float(torch.rand((), generator=generator, dtype=torch.float64))
    return float(generator.random() if hasattr(generator, "random") else generator.random_sample())


class Held(Dataset[Any]):
    """Every sample is a draw."""

    def __init__(self, generator: Any, length: int = 90) -> None:
        self.generator, self.length = generator, length
        self.targets = torch.arange(length) % CLASSES

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        x = torch.full((FEATURES,), draw(self.generator))
        x[0] += int(self.targets[index])
        return x, int(self.targets[index])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", GENERATORS)
def test_a_pass_draws_what_its_seed_says(kind: str, workers: int) -> None:
    held = Held(GENERATORS[kind](), 6)

    def batches(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        loader = make_loader(held, batch_size=2, shuffle=True, generator=generator, num_workers=workers)
        return torch.cat([x for x, _ in loader])[:, 1]

    first = batches(0)
    assert torch.equal(batches(0), first)
    assert len(first.unique()) == 6  # nor do two workers draw the same
    assert not torch.equal(batches(1), first)


class Randomizable:
    """As MONAI's: of the class, until somebody seeds it."""

    R = np.random.RandomState()

    def __call__(self, x: Any) -> Any:
        return x


def test_where_generators_are_found() -> None:
    rng, other = np.random.default_rng(), random.Random()
    dataset = Held({"transforms": [Randomizable(), Randomizable(), partial(draw, other)]})
    dataset.again, dataset.itself = rng, dataset  # type: ignore[attr-defined]
    dataset.deep = [[[[random.Random()]]]]  # type: ignore[attr-defined]
    dataset.too_deep = [[[[[random.Random()]]]]]  # type: ignore[attr-defined]
    places = ["generator.transforms.0.Randomizable.R", "generator.transforms.2.args.0", "again", "deep.0.0.0.0"]
    assert list(held_generators(dataset)) == [f"Held.{place}" for place in places]
    # A data set in another counts as one of its own.
    around = Subset(Subset(Subset(dataset, [0]), [0]), [0])
    assert list(held_generators(around)) == [f"Subset.dataset.dataset.dataset.{place}" for place in places]


class Noise:
    """A transform of batches that holds its own."""

    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(7)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(x.shape, generator=self.rng)


def sample_by_sample(workers: int = 0) -> FederatedDataModule:
    data = Held(np.random.RandomState(4))
    return FederatedDataModule(data, SizePartitioner([2, 1]), batch_size=8, loader=Loader(num_workers=workers))


def with_a_transform() -> FederatedDataModule:
    x, y = torch.randn(90, FEATURES, generator=torch.Generator().manual_seed(0)), torch.arange(90) % CLASSES
    return FederatedDataModule(TensorDataset(x, y), SizePartitioner([2, 1]), batch_size=8, train_transform=Noise())


@pytest.mark.slow
@pytest.mark.parametrize("make", [sample_by_sample, partial(sample_by_sample, 2), with_a_transform])
def test_a_resumed_run_draws_what_the_whole_one_drew(make: Any, tmp_path: Any) -> None:
    assert_resumes(lambda: FederatedLoop(seed=3), tmp_path, lambda: Plain(network(batch_norm=False)), make)
