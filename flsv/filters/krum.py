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

    def set_up(self, federation: FederationInfo) -> None:
        num_clients = federation.num_clients  # a round's cohort may be smaller
        min_clients = self._min_clients()
        if num_clients < min_clients:
            most_byzantine = (num_clients - 3) // 2
            if most_byzantine >= 0:
                advice = f"set byzantine={most_byzantine}"
            else:
                advice = "remove the filter"
            raise ConfigurationError(
                f"{self!r} needs at least {min_clients} clients (2 byzantine + 3), but the federation has "
                f"{num_clients}. Use more clients, or {advice}."
            )
        max_kept = num_clients - self.byzantine
        if self.keep is not None and self.keep > max_kept:
            raise ConfigurationError(
                f"{self!r} can keep at most {max_kept} of {num_clients} clients if {self.byzantine} of them may be "
                f"bad. Set keep={max_kept}."
            )

    def _min_clients(self) -> int:
        return 2 * self.byzantine + 3  # the paper's condition

    def apply(self, cohort: Cohort) -> Cohort:
        num_clients = len(cohort.updates)
        min_clients = self._min_clients()
        if num_clients < min_clients:
            return cohort.warn(
                f"in round {cohort.round_index + 1} {self!r} keeps all clients, since it needs {min_clients} but the "
                f"cohort has {num_clients}."
            )
        num_selected = num_clients - self.byzantine
        if self.keep is not None:
            num_selected = min(self.keep, num_selected)
        scores = krum_scores(self._squared_distances(cohort), self.byzantine)
        lowest_first = scores.argsort(stable=True)
        is_selected = torch.zeros(num_clients, dtype=torch.bool)
        is_selected[lowest_first[:num_selected]] = True
        return cohort.keep(is_selected)

    def _squared_distances(self, cohort: Cohort) -> Tensor:
        if cohort.gram is None:
            raise RuntimeError(
                f"{self!r} compares updates, but the server does not know every client's initial model. "
                "Remove the filter, or the strategy by which clients choose their initial models."
            )
        products = cohort.gram.double()
        squares = products.diag()
        # |a - b|^2 = |a|^2 + |b|^2 - 2 a.b
        squared_distances = squares[:, None] + squares - 2 * products
        return squared_distances.clamp_min(0)


def krum_scores(squared_distances: Tensor, byzantine: int) -> Tensor:
    """Compute the Krum scores of k updates, ``[k]``, from squared distances ``[k, k]``. A score is the sum over the k -
    f - 2 closest others, with f = ``byzantine``.
    """
    num_neighbors = len(squared_distances) - byzantine - 2
    to_others = squared_distances.clone().fill_diagonal_(float("inf"))
    ascending = to_others.sort(1).values
    return ascending[:, :num_neighbors].sum(1)
