"""CopyFilter: finds clients that send copies of each other's updates, as one client under several names does."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from flsv.arguments import check_number
from flsv.errors import ConfigurationError
from flsv.filters.base import Cohort, UpdateFilter
from flsv.functional.updates import (
    ALIKE,
    GAP,
    ROUNDS,
    SPEAKING,
    alike,
    groups_of,
    similarities,
    standing_apart,
)
from flsv.strategy import Federation

COPY = "copy"


class CopyFilter(UpdateFilter):
    """Finds clients whose updates are more alike than the cohort's common direction explains, over three rounds or
    more.

    They stay in the model and in the metrics; the payment of all of them is held back until somebody has looked at it,
    see ``loop.held``. The rules are those of :mod:`flsv.functional.updates`. The server keeps 32 bytes for every
    pair of clients.

    Args:
        threshold: two clients are alike from this similarity on, in (0, 1]. None: similarities by themselves are not
            judged.
        gap: a group stands apart where its members are by so much more alike than any of them is to others, in (0, 2],
            in the first three rounds that they spend together; for cohorts of six or more. None: not judged.

    Raises:
        ConfigurationError: a number out of range; neither rule.

    Example:
        >>> from flsv import FederatedLoop
        >>> from flsv.filters import OutlierFilter
        >>> loop = FederatedLoop(filters=[OutlierFilter(), CopyFilter(0.7, gap=0.45)])
        >>> loop.held
        []
    """

    faults: ClassVar = {COPY: "sent updates that are one another's but for little, in several rounds"}
    may_change = True

    def __init__(self, threshold: float | None = ALIKE, gap: float | None = GAP) -> None:
        if threshold is None and gap is None:
            raise ConfigurationError(
                "CopyFilter(threshold=None, gap=None): there is no rule. Give one, or leave it out."
            )
        if threshold is not None:
            check_number(self, "threshold", threshold, above=0, most=1)
        if gap is not None:
            check_number(self, "gap", gap, above=0, most=2)
        self.threshold, self.gap = threshold, gap
        # [4, n, n]: the sum of each pair's similarities, the rounds that it spent together, those that spoke for it,
        # and whether it was found to be alike, which stays.
        self._pairs = torch.zeros(4, 0, 0, dtype=torch.float64)

    def begin(self, federation: Federation) -> None:
        self._pairs = self._pairs.new_zeros(4, 0, 0)
        super().begin(federation)

    def resume(self, federation: Federation) -> None:
        super().resume(federation)
        if not self._pairs.numel():
            self._pairs = self._pairs.new_zeros(4, federation.num_clients, federation.num_clients)

    @property
    def groups(self) -> list[list[int]]:
        """All members of each group of clients that were found to be alike, ascending."""
        return groups_of(self._pairs[3] > 0)

    def apply(self, cohort: Cohort) -> Cohort:
        if cohort.gram is None:
            return cohort
        here = torch.tensor(cohort.ids, dtype=torch.long)
        similar = self._compare(here, cohort.gram)
        said = []
        for group in self.groups:
            members = [client for client in group if client in cohort.ids]
            if len(members) > 1 and self.notices.due(COPY, members):
                most = similar[members][:, members].fill_diagonal_(-1).max().item()
                said.append(
                    f"{self.notices.said(COPY, members)}, up to round {cohort.round_index} (similarity {most:.2f}): "
                    "they are aggregated and measured all the same, and the payment of each of them is held back until "
                    "somebody has looked at it (flsv pay --release)."
                )
        return cohort.say(*said)

    def _compare(self, here: Tensor, gram: Tensor) -> Tensor:
        """Fold the products of the clients ``here [k]`` in; the mean similarity of each of their pairs, ``[n, n]``."""
        total, together, speaking, found = self._pairs
        pairs = here[:, None], here
        similar, named = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.bool)
        if len(here) > 2:  # of two, nobody can say what they have in common
            now = similarities(gram)
            total, together = total.index_put(pairs, now, True), together.index_put(pairs, torch.ones_like(now), True)
            speaking = speaking.index_put(pairs, (now >= SPEAKING).double(), True)
            similar[pairs] = (total / together.clamp_min(1))[pairs]
        if self.threshold is not None:
            named |= alike(similar, self.threshold)
        if self.gap is not None:
            named[pairs] |= standing_apart(similar[pairs], self.gap) & (together[pairs] == ROUNDS)
        found = found.where(~named | (speaking < ROUNDS), 1.0)
        self._pairs = torch.stack([total, together, speaking, found])
        return similar

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pairs": self._pairs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._pairs = state["pairs"].cpu()
