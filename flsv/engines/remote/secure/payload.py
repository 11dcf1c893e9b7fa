"""What is summed: a site's update, weighted, and how much it weighs; and the average that comes of it.

The numbers of a site are, in this order:

- three whole ones: its weight (its training samples, or 1), its optimizer steps, how many entries were clipped;
- its update, the weight in every entry.
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
from flsv.round import ClientUpdate

HEAD = 3


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
    """

    weight: int
    steps: int
    clipped: int
    step: Tensor

    def after(self, start: Tensor) -> Tensor:
        """``[P]``: the average of the models that have started from this one."""
        return (start.double() + self.step.to(start.device)).to(start.dtype)


def numbers_of(update: ClientUpdate, start: Tensor, sums: SecureSums, sites: int, by_samples: bool) -> np.ndarray:
    """What a site adds to the sum, int64.

    Args:
        update: what it has trained; finite.
        start: ``[P]``, what it has started from.
        sums: what the federation agrees on.
        sites: how many take part, so that no sum overflows.
        by_samples: whether it weighs as much as it has samples; else 1.

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
    return np.concatenate([[weight, update.num_steps, cut], entries])


def summed(total: np.ndarray, sums: SecureSums, sites: int, of: int) -> Summed:
    """The average.

    Args:
        total: the sum, with a sign.
        sums: what the federation agrees on.
        sites: how many have sent something.
        of: how many took part at the beginning.

    Raises:
        NoSum: a number in it is beyond what sites can have sent together.
    """
    weight, steps, clipped = (int(each) for each in total[:HEAD])
    entries, limit = total[HEAD:], weight * sums.top
    possible = sites <= weight <= sites * sums.most_weight(of) and steps >= 0 and clipped >= 0
    if not possible or int(entries.min()) < -limit or int(entries.max()) > limit:
        raise NoSum("what sites have sent is beyond what they can have sent: one of them has sent something else")
    return Summed(weight, steps, clipped, torch.from_numpy(entries.astype(np.float64) / (weight * sums.scale)))


def told_alike(seed: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the server tells all sites: by name the hash of each tensor."""
    return {"seed": seed, **{name: tensor_hash(tensor) for name, tensor in sorted(tensors.items())}}


def tensor_hash(tensor: Tensor) -> str:
    """SHA-256 of its type, shape and numbers."""
    found = hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode())
    found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
