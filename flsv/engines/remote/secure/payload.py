"""What is summed: a site's update, weighted, and how much it weighs; and the average that comes of it.

The numbers of a site are, in this order:

- three whole ones: its weight (its training samples, or 1), its optimizer steps, how many entries were clipped;
- its update, the weight in every entry;
- for each row that it may train beside, such as a coalition's model: two whole ones, its weight and how many entries
  were clipped, and the row's step, likewise. A site that does not train the row adds zeros.

So sums over several sets of sites are one masked vector. What all of them tell together of single sites is what the
sums over groups tell, of sites that are in the same sets: that is what has to be large enough.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flsv.engines.remote.policy import Refused
from flsv.engines.remote.secure.settings import SecureSums
from flsv.round import ClientUpdate, RowAverages

HEAD, ROW_HEAD = 3, 2


class NoSum(ValueError):
    """What sites have sent does not sum to what honest ones can have sent."""


@dataclass(frozen=True)
class Summed:
    """A sum in the clear.

    Args:
        weight: of all.
        steps: optimizer steps, of all.
        clipped: entries that were, of all.
        step: float64 ``[P]``, the weighted average of the updates.
        row_weights: of each row, of those who have trained it, ``[K]``.
        row_steps: float64 ``[K, Q]``, their weighted averages; zeros where there is nobody.
    """

    weight: int
    steps: int
    clipped: int
    step: Tensor
    row_weights: Tensor
    row_steps: Tensor

    def after(self, start: Tensor) -> Tensor:
        """``[P]``: the average of the models that have started from this one."""
        return (start.double() + self.step.to(start.device)).to(start.dtype)

    def rows_after(self, starts: Tensor) -> RowAverages:
        """The averages of the rows that have started from these, ``[K, Q]``."""
        rows = starts.double() + self.row_steps.to(starts.device)
        return RowAverages(rows.to(starts.dtype), self.row_weights.double())


@dataclass(frozen=True)
class Rows:
    """What a site has trained beside its model.

    Args:
        steps: ``[m, Q]``, of the rows that it trains.
        mine: bool ``[K]``, which these are.
    """

    steps: Tensor
    mine: Tensor


def groups_of(members: Tensor) -> list[list[int]]:
    """The sites that are in the same sets: no combination of the sums over these sets tells less than a group's sum.

    Args:
        members: bool ``[K, n]``, the sets.

    Example:
        >>> groups_of(torch.tensor([[True, True, False], [True, True, True]]))
        [[0, 1], [2]]
    """
    found: dict[tuple[bool, ...], list[int]] = {}
    for site, sets in enumerate(members.T.tolist()):
        found.setdefault(tuple(sets), []).append(site)
    return list(found.values())


def length(size: int, rows: tuple[int, int] = (0, 0)) -> int:
    """How many numbers a site adds, of a model of ``size`` numbers and of K rows of Q."""
    return HEAD + size + rows[0] * (ROW_HEAD + rows[1])


def numbers_of(
    update: ClientUpdate, start: Tensor, sums: SecureSums, sites: int, by_samples: bool, rows: Rows | None = None
) -> np.ndarray:
    """What a site adds to the sum, int64.

    Args:
        update: what it has trained; finite.
        start: ``[P]``, what it has started from.
        sums: what the federation agrees on.
        sites: how many take part, so that no sum overflows.
        by_samples: whether it weighs as much as it has samples; else 1.
        rows: what it has trained beside.

    Raises:
        Refused: it has too many samples for a sum that cannot overflow.
    """
    weight, most = update.num_samples if by_samples else 1, sums.most_weight(sites)
    if weight > most or update.num_steps > 2 ** (sums.ring - 2) // sites:
        raise Refused(
            f"it has more samples than the {most} that SecureSums(bits={sums.bits}) has room for with {sites} sites. "
            "Lower bits, or average with FedAvg('uniform')"
        )
    step = update.vector.detach().cpu().double() - start.detach().cpu().double()
    entries, cut = sums.to_whole(step.numpy(), weight)
    return np.concatenate([[weight, update.num_steps, cut], entries, _row_numbers(rows, sums, weight)])


def _row_numbers(rows: Rows | None, sums: SecureSums, weight: int) -> np.ndarray:
    if rows is None:
        return np.zeros(0, dtype=np.int64)
    numbers = np.zeros((len(rows.mine), ROW_HEAD + rows.steps.shape[1]), dtype=np.int64)
    for place, step in zip(rows.mine.nonzero().flatten().tolist(), rows.steps.cpu().double()):
        entries, cut = sums.to_whole(step.numpy(), weight)
        numbers[place] = [weight, cut, *entries]
    return numbers.reshape(-1)


def summed(total: np.ndarray, sums: SecureSums, sites: int, of: int, rows: tuple[int, int] = (0, 0)) -> Summed:
    """The average.

    Args:
        total: the sum, with a sign.
        sums: what the federation agrees on.
        sites: how many have sent something.
        of: how many took part at the beginning.
        rows: K and Q of the rows beside.

    Raises:
        NoSum: a number in it is beyond what sites can have sent together.
    """
    weight, steps, clipped = (int(each) for each in total[:HEAD])
    size = len(total) - length(0, rows)
    beside = total[HEAD + size :].reshape(rows[0], ROW_HEAD + rows[1])
    weights, cuts = beside[:, 0], beside[:, 1]
    possible = sites <= weight <= sites * sums.most_weight(of) and steps >= 0 and clipped >= 0
    possible &= bool(((weights >= 0) & (weights <= weight) & (cuts >= 0)).all())
    step = _average(total[None, HEAD : HEAD + size], np.array([weight]), sums) if possible else None
    row_steps = _average(beside[:, ROW_HEAD:], weights, sums) if possible else None
    if step is None or row_steps is None:
        raise NoSum("what sites have sent is beyond what they can have sent: one of them has sent something else")
    return Summed(weight, steps, clipped + int(cuts.sum()), step[0], torch.from_numpy(weights.copy()), row_steps)


def _average(entries: np.ndarray, weights: np.ndarray, sums: SecureSums) -> Tensor | None:
    """Float64 ``[K, Q]``; None where an entry is larger than it can be."""
    limits = weights.astype(np.int64)[:, None] * sums.top
    if ((entries < -limits) | (entries > limits)).any():
        return None
    return torch.from_numpy(entries.astype(np.float64) / (np.maximum(weights, 1)[:, None] * sums.scale))


def told_alike(seed: int, tensors: Mapping[str, Tensor], members: Tensor | None = None) -> dict[str, Any]:
    """What the server tells all sites: by name the hash of each tensor; and who is in which sum beside."""
    sets = {} if members is None else {"members": tensor_hash(members)}
    return {"seed": seed, **sets, **{name: tensor_hash(tensor) for name, tensor in sorted(tensors.items())}}


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 of its type, shape and numbers."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
