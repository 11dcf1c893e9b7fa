"""MultiKrum: a filter that keeps the updates closest to their neighbors.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent",
NeurIPS 2017, section 4 (Krum) and its variant Multi-Krum, which averages the m best updates.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from flsv.core.strategy import FederationInfo
from flsv.filters.base import Cohort, UpdateFilter
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError


class MultiKrum(UpdateFilter):
    """Filter that keeps the ``keep`` clients with the lowest Krum scores, see :func:`krum_scores`.

    For the aggregator and the metrics the other clients have not taken part in this round. The aggregator determines
    the weights of the kept clients. The paper's mean is ``FedAvg(weighting="uniform")``. A cohort of less than 2 f + 3
    clients, as after dropouts, is kept whole, with a warning.

    Args:
        byzantine: f in the paper, the number of bad clients that a cohort may have. Krum needs at least 2 f + 3
            clients.
        keep: m in the paper, the number of clients to keep. None: k - f in a cohort of k clients. ``keep=1`` is Krum.

    Raises:
        ConfigurationError: an argument is out of range, or before training: the federation is too small, or a
            personalizer lets clients start from different models.

    Example:
        >>> MultiKrum(byzantine=2)
        MultiKrum(byzantine=2)
    """

    bounds = False
    compares = "distances of updates"

    def __init__(self, byzantine: Annotated[int, Ge(0)], keep: Count | None = None) -> None:
        self.byzantine = byzantine
        self.keep = keep

    def resume(self, federation: FederationInfo) -> None:
        super().resume(federation)
        clients = federation.num_clients  # a round's cohort may be smaller
        if clients < 2 * self.byzantine + 3:
            way = f"say byzantine={(clients - 3) // 2}" if clients > 2 else "leave it out"
            raise ConfigurationError(
                f"{self!r}: {clients} clients cannot outvote {self.byzantine} bad ones, for which it takes "
                f"{2 * self.byzantine + 3}. Have more clients, or {way}."
            )
        if self.keep is not None and self.keep > clients - self.byzantine:
            raise ConfigurationError(
                f"{self!r}: of {clients} clients {clients - self.byzantine} at most can be kept, if {self.byzantine} "
                f"may be bad. Say keep={clients - self.byzantine}."
            )

    def apply(self, cohort: Cohort) -> Cohort:
        clients = len(cohort.updates)
        if clients < 2 * self.byzantine + 3:
            return cohort.warn(
                f"in round {cohort.round_index + 1} {self!r} keeps all clients: {clients} cannot outvote "
                f"{self.byzantine} bad ones, for which it takes {2 * self.byzantine + 3}."
            )
        keep = (
            clients - self.byzantine
            if self.keep is None
            else min(self.keep, clients - self.byzantine)
        )
        kept = torch.zeros(clients, dtype=torch.bool)
        kept[krum_scores(self._distances(cohort), self.byzantine).argsort(stable=True)[:keep]] = (
            True
        )
        return cohort.keep(kept)

    def _distances(self, cohort: Cohort) -> Tensor:
        if cohort.gram is None:
            raise RuntimeError(
                f"{self!r}: updates can be compared only if the server knows all start points."
            )
        products = cohort.gram.double()
        squares = products.diag()
        return (squares[:, None] + squares - 2 * products).clamp_min(0)


def krum_scores(squared: Tensor, byzantine: int) -> Tensor:
    """Compute the Krum scores of k updates, ``[k]``, from squared distances ``[k, k]``. A score is the sum over the k -
    f - 2 closest others, with f = ``byzantine``.
    """
    others = squared.clone().fill_diagonal_(float("inf")).sort(1).values
    return others[:, : len(squared) - byzantine - 2].sum(1)
