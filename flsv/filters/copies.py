"""CopyFilter: a filter that finds copies of other clients' updates, or of the server's last step."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from torch import Tensor

from flsv.core import ClientMatrix
from flsv.core.strategy import FederationInfo
from flsv.filters.base import UpdateFilter
from flsv.filters.cohort import Cohort
from flsv.functional.copies import (
    ALIKE,
    ECHO,
    GAP,
    ROUNDS,
    SPEAKING,
    groups_of,
    isolated_groups,
    last_step_similarity,
    same_group_pairs,
    similarities,
)

COPY, ECHOING = "copy", "echo"


class CopyFilter(UpdateFilter):
    """Filter that finds copies: clients whose updates are, over at least three rounds, more similar to each other than
    the common direction of all updates explains.

    It also finds clients that in at least three rounds send back the server's last step, that is, the change of the
    global model in the previous round.

    Their updates are not changed: aggregators and metrics see them. ``loop.copies`` and the report name the clients; a
    report that divides a budget names them beside the amounts. The rules are those of :mod:`flsv.functional.copies`.
    The server stores 32 bytes for every pair of clients, and the last round's model.

    Args:
        threshold: similarity, in (0, 1], from which on two clients count as copies. None: do not use this rule.
        gap: a group counts as copies if its members are more similar to each other than to other clients by at least
            this difference, in (0, 2], in the first three rounds in which they take part together, in cohorts of six or
            more clients. None: do not use this rule.
        echo: mean of :func:`flsv.functional.copies.last_step_similarity`, in (0, 1], from which on a client
            counts as sending the server's last step back. None: do not use this rule.

    Raises:
        ConfigurationError: a number is out of range, or all three rules are None.

    Example:
        >>> from flsv import FederatedLoop
        >>> from flsv.filters import OutlierFilter
        >>> loop = FederatedLoop(filters=[OutlierFilter(), CopyFilter(0.7, gap=0.45)])
        >>> loop.copies
        []
    """

    faults: ClassVar = {
        COPY: "sent almost the same updates as each other, in several rounds",
        ECHOING: "sent the server's own last step back, in several rounds",
    }
    may_change = True
    saved = ("_pairs", "_echoes", "_start")

    excludes = False
    bounds = False
    rules: ClassVar = (
        (lambda a: (a.threshold, a.gap, a.echo) != (None,) * 3, "there is no rule. Give one, or leave it out."),
    )

    def __init__(
        self,
        threshold: Annotated[float, Gt(0), Le(1)] | None = ALIKE,
        gap: Annotated[float, Gt(0), Le(2)] | None = GAP,
        echo: Annotated[float, Gt(0), Le(1)] | None = ECHO,
    ) -> None:
        self.threshold = threshold
        self.gap = gap
        self.echo = echo
        # [4, n, n]: for each pair of clients the sum of its similarities, the number of common rounds, the number of
        # rounds with a high similarity, and whether the two were ever found to be copies.
        self._pairs = torch.zeros(4, 0, 0, dtype=torch.float64)
        # [4, n]: the same four numbers for each client and the server's last step. _start is the last round's model.
        self._echoes = torch.zeros(4, 0, dtype=torch.float64)
        self._start: Tensor | None = None

    def begin(self, federation: FederationInfo) -> None:
        self._pairs, self._echoes, self._start = self._pairs.new_zeros(4, 0, 0), self._echoes.new_zeros(4, 0), None
        super().begin(federation)

    def resume(self, federation: FederationInfo) -> None:
        super().resume(federation)
        self._pairs = self._pairs.cpu()
        self._echoes = self._echoes.cpu()
        if not self._pairs.numel():
            self._pairs = self._pairs.new_zeros(4, federation.num_clients, federation.num_clients)
        if not self._echoes.numel():
            self._echoes = self._echoes.new_zeros(4, federation.num_clients)

    @property
    def groups(self) -> list[list[int]]:
        """List groups of clients that were found to be copies of each other, ascending."""
        together = groups_of(self._pairs[3] > 0)
        alone = {*(self._echoes[3] > 0).nonzero().flatten().tolist()}.difference(*together)
        return sorted([*together, *([client] for client in alone)])

    def apply(self, cohort: Cohort) -> Cohort:
        if cohort.gram is None:
            return cohort
        here = torch.tensor(cohort.ids, dtype=torch.long)
        similar, stepping = self._compare(here, cohort.gram), self._compare_step(here, cohort, cohort.gram)
        echoing = (self._echoes[3] > 0).nonzero().flatten().tolist()
        sentences = []
        for fault, group in [*((COPY, group) for group in self.groups), (ECHOING, echoing)]:
            members = [client for client in group if client in cohort.ids]
            if len(members) > (fault == COPY) and self.notices.is_first(fault, members):
                most = stepping[members] if fault == ECHOING else similar[members][:, members].fill_diagonal_(-1)
                sentences.append(
                    f"{self.notices.describe_fault(fault, members)}, up to round {cohort.round_index + 1} (similarity "
                    f"{most.max().item():.2f}): still aggregated and measured. Look into it before you pay "
                    "anything; the report names these clients beside their amounts."
                )
        return cohort.warn(*sentences)

    def _compare_step(self, here: Tensor, cohort: Cohort, gram: Tensor) -> Tensor:
        """Return each client's mean similarity to the server's last step so far, ``[n]``."""
        before, start, end = self._start, cohort.common_start, cohort.num_parameters
        self._start = None if start is None or self.echo is None else start.detach().clone()
        total, rounds, speaking, found = self._echoes
        if self.echo is not None and before is not None and start is not None:
            step = (start - before.to(start))[:end]
            products = ClientMatrix(cohort.matrix, [start] * len(here)).until(end).dot(step).cpu()
            now = last_step_similarity(gram, products, float(step.double() @ step.double()), cohort.num_samples)
            moved = float(bool((step != 0).any()))
            total, rounds = total.index_add(0, here, now), rounds.index_add(0, here, torch.full_like(now, moved))
            speaking = speaking.index_add(0, here, (now >= self.echo).double())
        mean = total / rounds.clamp_min(1)
        found = found.where((mean < (self.echo or 2)) | (speaking < ROUNDS), 1.0)
        self._echoes = torch.stack([total, rounds, speaking, found])
        return mean

    def _compare(self, here: Tensor, gram: Tensor) -> Tensor:
        """Return each pair's mean similarity over its common rounds, ``[n, n]``."""
        total, together, speaking, found = self._pairs
        pairs = here[:, None], here
        similar, named = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.bool)
        if len(here) > 2:  # two clients do not show a common direction
            now = similarities(gram)
            total, together = total.index_put(pairs, now, True), together.index_put(pairs, torch.ones_like(now), True)
            speaking = speaking.index_put(pairs, (now >= SPEAKING).double(), True)
            similar[pairs] = (total / together.clamp_min(1))[pairs]
        if self.threshold is not None:
            named |= same_group_pairs(similar, self.threshold)
        if self.gap is not None:
            named[pairs] |= isolated_groups(similar[pairs], self.gap) & (together[pairs] == ROUNDS)
        found = found.where(~named | (speaking < ROUNDS), 1.0)
        self._pairs = torch.stack([total, together, speaking, found])
        return similar
