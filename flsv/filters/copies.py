"""CopyFilter: a filter that finds copies of other clients' updates, or of the server's last step."""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from scipy.cluster.hierarchy import linkage
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform
from torch import Tensor

from flsv.core import ClientMatrix
from flsv.core.faults import COPY
from flsv.core.strategy import FederationInfo
from flsv.filters.base import Cohort, UpdateFilter

# All updates d_i of a round share a component, the direction to a better model. Similarity is therefore that of the
# directions without the cohort's mean direction, averaged over the rounds t in which both clients took part:
#
#     e_i = d_i / |d_i| - mean_j d_j / |d_j|,    s_ij = mean_t e_i . e_j / (|e_i| |e_j|)
#
# Clients with unrelated samples have about -1 / (k - 1), two with the same samples about 1. FoolsGold (Fung, Yoon,
# Beschastnikh, RAID 2020) takes cosines of summed updates. Where a third of the cohort or more shares a component that
# the others lack, subtracting the mean does not remove it, and similarities within this third rise.

ALIKE = 0.7
"""Mean similarity from which on two clients count as copies. It was chosen on the federations digits_sizes,
digits_dirichlet and digits_label_noise of the benchmark's tuning set: honest clients stay below 0.62 there, and eight
of nine copies reach 0.7 within ten rounds, most of them in the first."""
ROUNDS = 3
"""The number of rounds in which two clients must be similar to count as copies. Also the number of their first common
rounds to which the rule of :func:`isolated_groups` is applied."""
SPEAKING = 0.4
"""Similarity from which on two clients count as similar in a round. Chosen on the same federations as ``ALIKE``.
``docs/results/cheating.md`` has how often honest, copying and framed clients are named on other federations."""
GAP = 0.45
"""The default gap, chosen on the benchmark's tuning set. Honest clients are isolated by at most 0.41 there, in 16 runs
without and 96 runs with a copy. Of the 90 copies that are treated like the original, 83 are isolated by 0.45 or more
within three rounds, 69 of them in the first."""
LEAST = 6
"""The smallest cohort in which groups are looked for. Smaller ones have too few other pairs to compare with."""
ECHO = 0.9
"""The value of :func:`last_step_similarity`, as a mean over rounds, from which on a client counts as a free rider. It
was chosen on the benchmark's tuning set, where honest clients' means are below 0.6 and free riders' means are 1."""


def products_without_mean(gram: Tensor) -> Tensor:
    """Compute the inner products ``[k, k]`` of k updates, scaled to length 1 and then centered. ``gram`` has the inner
    products of the updates themselves. 0 for zero or infinite updates.
    """
    gram = gram.double()
    norms = gram.diagonal().clamp_min(0).sqrt()
    here = (norms > 0) & norms.isfinite()
    pairs = torch.outer(here, here)
    cosines = (gram / torch.outer(norms, norms)).where(pairs, 0.0)
    center = torch.diag(here.double()) - pairs / here.sum().clamp_min(1)
    return center @ cosines @ center


def similarities(gram: Tensor) -> Tensor:
    """Compute the k clients' similarities ``[k, k]`` in one round from their updates' inner products ``gram``: cosines
    after scaling the updates to length 1 and centering.
    """
    products = products_without_mean(gram)
    lengths = products.diagonal().clamp_min(0).sqrt()
    known = torch.outer(lengths, lengths) > 1e-12
    return (
        (products / torch.outer(lengths, lengths).where(known, 1.0)).where(known, 0.0).clamp(-1, 1)
    )


def same_group_pairs(similar: Tensor, threshold: float = ALIKE) -> Tensor:
    """Find pairs of clients in groups of copies, bool ``[k, k]``. A group's members are all similar to each other, by
    at least ``threshold``, and to no other client.
    """
    # A client that sends the sum of two others' updates is similar to both, and therefore in no group with them.
    pairs = (similar >= threshold).fill_diagonal_(False)
    found = torch.zeros_like(pairs)
    for group in groups_of(pairs):
        rows = torch.tensor(group)
        within = pairs[rows][:, rows]
        found[rows[:, None], rows] = within & bool(within.sum() == len(group) * (len(group) - 1))
    return found


def groups_of(pairs: Tensor) -> list[list[int]]:
    """Find the connected components of the graph ``pairs [n, n]``. List those of at least two clients, by first
    member.
    """
    count, group = connected_components(pairs.cpu().numpy(), directed=False)
    found = [(group == each).nonzero()[0].tolist() for each in range(count)]
    return sorted(rows for rows in found if len(rows) > 1)


def isolated_groups(similar: Tensor, gap: float = GAP) -> Tensor:
    """Find pairs of clients in isolated groups, bool ``[k, k]``. A group's members are more similar to each other than
    to others, by at least ``gap``. A group has at most half of the clients.
    """
    # min s_ij within G - max s_il to clients outside >= gap, for 2 <= |G| <= k / 2. It supplements ALIKE: where data
    # hardly differ, what is left of directions is noise, and even copies are less similar than the threshold. Only a
    # pair's first three rounds count: later, updates differ by noise only, and wrong labels in common make clients
    # similar. With few classes or parameters honest clients can be isolated by chance (by 0.6 among eight clients,
    # with three classes and 80 parameters).
    k = len(similar)
    found = torch.zeros(k, k, dtype=torch.bool)
    if k < LEAST:
        return found
    values = similar.double().clone().fill_diagonal_(1)
    # A group that is nearer to itself than to all others is a cluster of single linkage.
    joined = linkage(
        squareform((1 - (values + values.T) / 2).clamp_min(0).numpy(), checks=False), "single"
    )
    groups = {i: [i] for i in range(k)}
    for step, (left, right) in enumerate(joined[:, :2].astype(int).tolist()):
        members = groups[k + step] = groups[left] + groups[right]
        if len(members) > k / 2:
            continue
        others = [i for i in range(k) if i not in members]
        within = values[members][:, members].min()
        if within - values[members][:, others].max() >= gap:
            found[torch.tensor(members)[:, None], torch.tensor(members)] = True
    return found.fill_diagonal_(False)


def last_step_similarity(
    gram: Tensor, products: Tensor, square: float, num_samples: Tensor
) -> Tensor:
    """Compute each update's similarity to the server's last step, which free riders send back, float64 ``[k]``. ``gram
    [k, k]`` has the updates' inner products, ``products [k]`` those with the step, and ``square`` is its squared norm.
    """
    # An honest client's cosine can be near 1, too, if its weight rules the step. So the mean direction c of step and
    # updates is subtracted: r_i = cos(d_i / |d_i| - c, g / |g| - c). It is computed with equal weights in c, and with
    # n_j |d_j|, and the smaller r_i counts: c is near g's direction by the first if the server aggregates uniformly,
    # by the second if by samples.
    k = len(gram)
    all_products = torch.zeros(k + 1, k + 1, dtype=torch.float64)
    all_products[:k, :k], all_products[:k, k], all_products[k, :k] = gram, products, products
    all_products[k, k] = square
    norms = all_products.diagonal().clamp_min(0).sqrt()
    here = (norms > 0) & norms.isfinite()
    cosines = (all_products / torch.outer(norms, norms)).where(torch.outer(here, here), 0.0)
    claims = (num_samples.double().cpu() * norms[:k]).where(here[:k], 0.0)
    found = []
    for weights in (here[:k].double(), claims):
        clients = here[:k].sum() / (1 + here[:k].sum())
        center = torch.cat(
            [weights / weights.sum().clamp_min(1e-300) * clients, (1 - clients)[None]]
        )
        without = torch.eye(k + 1, dtype=torch.float64) - center
        left = without @ cosines @ without.T
        lengths = left.diagonal().clamp_min(0).sqrt()
        known = here[:k] & here[k] & (lengths[:k] * lengths[k] > 1e-12)
        found.append((left[:k, k] / (lengths[:k] * lengths[k]).where(known, 1.0)).where(known, 0.0))
    return torch.minimum(*found).clamp(-1, 1)


ECHOING = "echo"


class CopyFilter(UpdateFilter):
    """Filter that finds copies of updates. Such clients' updates are, over at least three rounds, more similar to each
    other than the common direction of all updates explains.

    It also finds clients that in at least three rounds send back the server's last step, that is, the change of the
    global model in the previous round.

    Their updates are not changed: aggregators and metrics see them. ``loop.copies`` and the report name the clients. A
    report that divides a budget names them beside the amounts. The server stores 32 bytes for every pair of clients,
    and the last round's model.

    Args:
        threshold: similarity, in (0, 1], from which on two clients count as copies. None: do not use this rule.
        gap: a group counts as copies if its members are more similar to each other than to other clients by at least
            this difference, in (0, 2], in the first three rounds in which they take part together, in cohorts of six or
            more clients. None: do not use this rule.
        echo: mean of :func:`flsv.filters.copies.last_step_similarity`, in (0, 1], from which on a client
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
        (
            lambda a: (a.threshold, a.gap, a.echo) != (None,) * 3,
            "there is no rule. Give one, or leave it out.",
        ),
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
        self._pairs, self._echoes, self._start = (
            self._pairs.new_zeros(4, 0, 0),
            self._echoes.new_zeros(4, 0),
            None,
        )
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
        similar, stepping = (
            self._compare(here, cohort.gram),
            self._compare_step(here, cohort, cohort.gram),
        )
        echoing = (self._echoes[3] > 0).nonzero().flatten().tolist()
        sentences = []
        for fault, group in [*((COPY, group) for group in self.groups), (ECHOING, echoing)]:
            members = [client for client in group if client in cohort.ids]
            if len(members) > (fault == COPY) and self.notices.is_first(fault, members):
                most = (
                    stepping[members]
                    if fault == ECHOING
                    else similar[members][:, members].fill_diagonal_(-1)
                )
                sentences.append(
                    f"{self.notices.describe_fault(fault, members)}, up to round {cohort.round_index + 1} (similarity "
                    f"{most.max().item():.2f}): still aggregated and measured. Look into it before you pay "
                    "anything; the report names these clients beside their amounts."
                )
        return cohort.warn(*sentences)

    def _compare_step(self, here: Tensor, cohort: Cohort, gram: Tensor) -> Tensor:
        """Add the similarities of a round's clients ``here`` to the server's last step. Return each client's mean so
        far, ``[n]``.
        """
        before, start, end = self._start, cohort.common_start, cohort.num_parameters
        self._start = None if start is None or self.echo is None else start.detach().clone()
        total, rounds, speaking, found = self._echoes
        if self.echo is not None and before is not None and start is not None:
            step = (start - before.to(start))[:end]
            products = ClientMatrix(cohort.matrix, [start] * len(here)).until(end).dot(step).cpu()
            now = last_step_similarity(
                gram, products, float(step.double() @ step.double()), cohort.num_samples
            )
            moved = float(bool((step != 0).any()))
            total, rounds = (
                total.index_add(0, here, now),
                rounds.index_add(0, here, torch.full_like(now, moved)),
            )
            speaking = speaking.index_add(0, here, (now >= self.echo).double())
        mean = total / rounds.clamp_min(1)
        found = found.where((mean < (self.echo or 2)) | (speaking < ROUNDS), 1.0)
        self._echoes = torch.stack([total, rounds, speaking, found])
        return mean

    def _compare(self, here: Tensor, gram: Tensor) -> Tensor:
        """Add the similarities of a round's clients ``here``. Return each pair's mean over its common rounds, ``[n,
        n]``.
        """
        total, together, speaking, found = self._pairs
        pairs = here[:, None], here
        similar, named = torch.zeros_like(total), torch.zeros_like(total, dtype=torch.bool)
        if len(here) > 2:  # two clients do not show a common direction
            now = similarities(gram)
            total, together = (
                total.index_put(pairs, now, True),
                together.index_put(pairs, torch.ones_like(now), True),
            )
            speaking = speaking.index_put(pairs, (now >= SPEAKING).double(), True)
            similar[pairs] = (total / together.clamp_min(1))[pairs]
        if self.threshold is not None:
            named |= same_group_pairs(similar, self.threshold)
        if self.gap is not None:
            named[pairs] |= isolated_groups(similar[pairs], self.gap) & (together[pairs] == ROUNDS)
        found = found.where(~named | (speaking < ROUNDS), 1.0)
        self._pairs = torch.stack([total, together, speaking, found])
        return similar
