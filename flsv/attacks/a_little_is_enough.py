"""ALittleIsEnough: colluders that stay within the spread of the honest updates.

Baruch, Baruch and Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019,
Algorithm 3. Workers send gradients there and clients send updates here, which point the other way.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from flsv.attacks.collusion import Collusion, Knowledge


class ALittleIsEnough(Collusion):
    """All colluders send mean - z std of the updates that they know, entry by entry.

    With k clients and m colluders, s = floor(k / 2 + 1) - m honest clients are needed for a majority; z is the largest
    number for which so many honest ones are expected to lie farther from the mean: Phi(z) = (k - m - s) / (k - m). With
    a majority of colluders (s <= 0) nothing bounds z: it is the one of s = 1. A colluder who knows nothing but its own
    update has no spread, and sends it.

    Args:
        z: standard deviations from the mean; None: the paper's, by the cohort.
        clients: whom it concerns, see :class:`flsv.data.ClientChoice`.
        fraction: likewise.
        seed: seed of the choice of clients.
        knows: see :class:`flsv.attacks.Collusion`; the paper's know their own updates only.

    Raises:
        ConfigurationError: an argument out of range.

    Example:
        >>> attack = ALittleIsEnough(z=1.0)
        >>> attack.collude(torch.tensor([[1.0, 0.0], [3.0, 0.0]]), 2, 5, torch.Generator())
        tensor([1., 0.])
    """

    def __init__(
        self,
        z: float | None = None,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "colluders",
    ) -> None:
        super().__init__(clients, fraction, seed, knows)
        self.z = z

    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        z = largest_z(cohort, colluders) if self.z is None else self.z
        return updates.mean(0) - z * updates.std(0, correction=0)


def largest_z(cohort: int, colluders: int) -> float:
    """The paper's z_max for a cohort of k clients with m colluders.

    Example:
        >>> round(largest_z(50, 24), 2)  # the paper's example has s = 2 of 26
        1.43
    """
    honest = cohort - colluders
    supporters = max(1, cohort // 2 + 1 - colluders)
    # Nobody honest is left, or all of them are needed: there is no such number.
    return NormalDist().inv_cdf((honest - supporters) / honest) if honest > supporters else 0.0
