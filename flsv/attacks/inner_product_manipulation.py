"""InnerProductManipulation: colluders that send the opposite of the mean update, as long as filters allow.

Xie, Koyejo and Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019,
section 4: all attackers send -epsilon times the mean of the honest updates, so that its inner product with the
aggregate is negative. Here the length is a multiple of the median length of the cohort's updates, since servers compare
lengths with that median.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.attacks.collusion import Collusion, Knowledge
from flsv.utilities.declared import Positive


class InnerProductManipulation(Collusion):
    """Collusion in which all colluders send the same vector. It points in the direction opposite to the mean of the
    updates d that they know, and its length is c median |d|.

    With equal weights and m colluders in a cohort of k, the model moves backwards as soon as c m > (k - m) |mean| /
    median |d|: two of eight clients need c = 3 at most. A metric of agreement with the aggregate then gives positive
    values to the colluders only.

    Args:
        length: c, the length as a multiple of the median. The default is just below 5, from which on
            :class:`flsv.filters.OutlierFilter` can name a client.
        clients: the clients that attack, see :class:`flsv.data.ClientChoice`.
        fraction: share of the clients that attack, instead of ``clients``.
        seed: seed of the choice of clients.
        knows: the updates that colluders see, see :class:`flsv.attacks.Collusion`.

    Raises:
        ConfigurationError: the length is not above 0.

    Example:
        >>> attack = InnerProductManipulation(length=2.0)
        >>> attack.collude(torch.tensor([[3.0, 4.0], [3.0, 4.0], [6.0, 8.0]]), 1, 3, torch.Generator())
        tensor([-6., -8.])
    """

    def __init__(
        self,
        length: Positive = 4.9,
        clients: list[int] | None = None,
        fraction: float | None = None,
        seed: int | None = None,
        knows: Knowledge = "all",
    ) -> None:
        super().__init__(clients, fraction, seed, knows)
        self.length = length

    def collude(self, updates: Tensor, colluders: int, cohort: int, generator: torch.Generator) -> Tensor:
        known = updates.double()
        mean, lengths = known.mean(0), torch.linalg.vector_norm(known, dim=1)
        tiny = torch.finfo(mean.dtype).tiny  # avoids 0 / 0 where the mean is 0
        return (mean * (-self.length * lengths.quantile(0.5) / mean.norm().clamp_min(tiny))).to(updates)
