"""ALittleIsEnough: colluders that stay within the spread of the honest updates.

Baruch, Baruch and Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019,
Algorithm 3. In the paper workers send gradients; here clients send updates, which point the opposite way.
"""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import Tensor

from flsv.attacks.collusion import Collusion, Knowledge


class ALittleIsEnough(Collusion):
    """Collusion in which all colluders send, in each entry, the mean minus z standard deviations of the updates that
    they know.

    With m colluders among k clients, the colluders need s = floor(k / 2 + 1) - m honest clients for a majority. The
    paper's z is the largest z for which s honest clients are expected to lie farther from the mean than z standard
    deviations: Phi(z) = (k - m - s) / (k - m), with Phi the distribution function of the normal distribution. If the
    colluders are a majority themselves (s <= 0), nothing bounds z, and s = 1 is used. A single colluder that knows only
    its own update, whose spread is 0, sends this update.

    Args:
        z: the number of standard deviations from the mean; by default the paper's, see :func:`largest_z`.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: share of the clients that attack, instead of ``clients``.
        seed: seed of the choice of clients.
        knows: the updates that colluders see, see :class:`flsv.attacks.Collusion`; ``"colluders"`` in the paper.

    Raises:
        ConfigurationError: an argument is out of range.

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
    """Compute the paper's z_max, the default number of standard deviations."""
    honest = cohort - colluders
    supporters = max(1, cohort // 2 + 1 - colluders)
    # Without honest clients, or with all of them needed, no z meets the equation.
    return NormalDist().inv_cdf((honest - supporters) / honest) if honest > supporters else 0.0
