"""What a site adds to a sum, and what comes of the sum, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from flsv.engines.remote.policy import Refused
from flsv.engines.remote.secure import SecureSums
from flsv.engines.remote.secure.payload import NoSum, numbers_of, summed, tensor_hash, told_alike
from flsv.round import ClientUpdate

SUMS = SecureSums(clip=2.0)
START = torch.tensor([1.0, 2.0])


def update(*vector: float, samples: int = 3) -> ClientUpdate:
    return ClientUpdate(0, samples, torch.tensor(vector), num_steps=5)


def test_the_average_is_weighted() -> None:
    some = [update(2.0, 2.0, samples=1), update(1.0, 1.0), update(0.0, 2.5, samples=4)]
    total = sum(numbers_of(each, START, SUMS, 3, True) for each in some)
    found = summed(total, SUMS, 3, 3)
    assert (found.weight, found.steps, found.clipped) == (8, 15, 0)
    torch.testing.assert_close(found.after(START), torch.tensor([5 / 8, 15 / 8]))
    alike = summed(sum(numbers_of(each, START, SUMS, 3, False) for each in some), SUMS, 3, 3)
    assert alike.weight == 3
    torch.testing.assert_close(alike.after(START), torch.tensor([1.0, 5.5 / 3]))


def test_who_has_too_many_samples_is_refused() -> None:
    most = SUMS.most_weight(3)
    numbers_of(update(1.0, 2.0, samples=most), START, SUMS, 3, True)
    with pytest.raises(Refused, match=f"more samples than the {most} that"):
        numbers_of(update(1.0, 2.0, samples=most + 1), START, SUMS, 3, True)
    numbers_of(update(1.0, 2.0, samples=most + 1), START, SUMS, 3, False)


@pytest.mark.parametrize(
    "change",
    [{0: -1}, {0: 2}, {0: 2**62}, {1: -1}, {2: -1}, {3: 2**40}, {4: -(2**40)}],
    ids=["no weight", "fewer than sites", "too much", "steps", "clipped", "an entry", "an entry below"],
)
def test_what_is_no_sum(change: dict[int, int]) -> None:
    total = sum(numbers_of(update(1.5, 2.5, samples=1), START, SUMS, 3, True) for _ in range(3))
    summed(total, SUMS, 3, 3)
    for place, value in change.items():
        total[place] = value
    with pytest.raises(NoSum, match="beyond what they can have sent"):
        summed(total, SUMS, 3, 3)


def test_hashes() -> None:
    ones = torch.ones(4)
    others = [torch.ones(2, 2), torch.ones(4).double(), torch.tensor([1.0, 1, 1, 1 + 1e-7]), torch.ones(5)]
    assert tensor_hash(ones) == tensor_hash(torch.from_numpy(np.ones(4, dtype=np.float32)))
    assert len({tensor_hash(each) for each in [ones, *others]}) == 5
    assert told_alike(1, {"b": ones, "a": ones}) == told_alike(1, {"a": ones, "b": ones}) != told_alike(2, {"a": ones})
