"""MinMax: colluders whose update is no farther from any honest update than honest updates are from each other.

Shejwalkar and Houmansadr, "Manipulating the Byzantine: Optimizing Model Poisoning Attacks and Defenses for Federated
Learning", NDSS 2021, section IV-C (Min-Max).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.attacks.collusion import Collusion, Knowledge

Direction = Literal["unit", "std", "sign"]


class MinMax(Collusion):
    """Collusion in which all colluders send mean + gamma p, where mean is the mean of the updates d_i that they know, p
    a direction, and gamma the largest number for which max_i |mean + gamma p - d_i| <= max_ij |d_i - d_j|.

    The paper searches for gamma with halving steps. Here it is computed exactly: each |mean + gamma p - d_i|^2 is a
    parabola in gamma, which crosses the bound at two gammas; the result is the smallest, over i, of the larger of the
    two.

    Args:
        direction: the direction p: ``"unit"``: -mean / |mean|; ``"std"``: minus the standard deviation of each entry;
            ``"sign"``: minus the signs of the mean.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: share of the clients that attack, instead of ``clients``.
        seed: seed of the choice of clients.
        knows: the updates that colluders see, see :class:`flsv.attacks.Collusion`; ``"all"`` in the paper's strongest
            attack.

    Raises:
        ConfigurationError: an argument is out of range.

    Example:
        >>> attack = MinMax()
        >>> attack.collude(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 1, 5, torch.Generator())
        tensor([1., 0.])
    """

    def __init__(
        self,
        direction: Direction = "unit",
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "all",
    ) -> None:
        super().__init__(clients, fraction, seed, knows)
        self.direction = direction

    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        known = updates.double()
        mean = known.mean(0)
        if self.direction == "std":
            towards = -known.std(0, correction=0)
        elif self.direction == "sign":
            towards = -mean.sign()
        else:
            towards = -mean / mean.norm().clamp_min(torch.finfo(mean.dtype).tiny)
        square = towards @ towards
        if square == 0:  # the direction is 0, as where all updates are equal
            return mean.to(updates)
        away = mean - known
        bound = torch.cdist(known, known, compute_mode="donot_use_mm_for_euclid_dist").max().square()
        slope, room = away @ towards, (bound - away.square().sum(1)).clamp_min(0)
        gamma = ((-slope + (slope.square() + square * room).sqrt()) / square).min()
        return (mean + gamma * towards).to(updates)
