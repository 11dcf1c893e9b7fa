"""CopyFilter: a filter that finds copies of other clients' updates, or of the server's last step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from annotated_types import Gt, Le
from scipy.cluster.hierarchy import linkage
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform
from torch import Tensor

from flsv.core import ClientMatrix
from flsv.core.strategy import FederationInfo
from flsv.filters.base import COPY, Cohort, UpdateFilter

# All updates d_i of a round share a component, the direction to a better model. Similarity is therefore that of the
# directions without the cohort's mean direction, averaged over the rounds t in which both clients took part:
#
#     e_i = d_i / |d_i| - mean_j d_j / |d_j|,    s_ij = mean_t e_i . e_j / (|e_i| |e_j|)
#
# Clients with unrelated samples have about -1 / (k - 1), two with the same samples about 1. FoolsGold (Fung, Yoon,
# Beschastnikh, RAID 2020) takes cosines of summed updates. Where a third of the cohort or more shares a component that
# the others lack, subtracting the mean does not remove it, and similarities within this third rise.

MIN_COPY_SIMILARITY = 0.7
"""Mean similarity from which on two clients count as copies. It was chosen on the federations digits_sizes,
digits_dirichlet and digits_label_noise of the benchmark's tuning set: honest clients stay below 0.62 there, and eight
of nine copies reach 0.7 within ten rounds, most of them in the first."""
MIN_SIMILAR_ROUNDS = 3
"""The number of rounds in which two clients must be similar to count as copies."""
NUM_EARLY_ROUNDS = MIN_SIMILAR_ROUNDS
"""The number of a pair's first common rounds, to whose mean the rule of :func:`isolated_groups` is applied."""
HIGH_SIMILARITY = 0.4
"""Similarity from which on two clients count as similar in a round. It was chosen on the same federations as
``MIN_COPY_SIMILARITY``. ``docs/results/cheating.md`` has how often honest, copying and framed clients are named on
other federations."""
MIN_GAP = 0.45
"""The default gap, chosen on the benchmark's tuning set. Honest clients are isolated by at most 0.41 there, in 16 runs
without and 96 runs with a copy. Of the 90 copies that are treated like the original, 83 are isolated by 0.45 or more
within three rounds, 69 of them in the first."""
MIN_COHORT = 6
"""The smallest cohort in which groups are looked for. Smaller ones have too few other pairs to compare with."""
MIN_ECHO_SIMILARITY = 0.9
"""The value of :func:`last_step_similarity`, as a mean over rounds, from which on a client counts as a free rider. It
was chosen on the benchmark's tuning set, where honest clients' means are below 0.6 and free riders' means are 1."""
#: Product of two centered directions' lengths up to which rounding rules their cosine.
_MIN_LENGTH_PRODUCT = 1e-12


def products_without_mean(gram: Tensor) -> Tensor:
    """Compute the inner products ``[k, k]`` of k updates, scaled to length 1 and then centered. ``gram`` has the inner
    products of the updates themselves. 0 for zero or infinite updates.
    """
    gram = gram.double()
    norms = gram.diagonal().clamp_min(0).sqrt()
    has_update = (norms > 0) & norms.isfinite()
    are_updates = torch.outer(has_update, has_update)
    cosines = gram / torch.outer(norms, norms)
    cosines = cosines.where(are_updates, 0.0)

    # Subtracting the mean direction from each: C G C, where G are the cosines, and C = I - 11^T / k over the k valid
    # updates.
    num_updates = has_update.sum().clamp_min(1)
    centering = torch.diag(has_update.double()) - are_updates / num_updates
    return centering @ cosines @ centering


def similarities(gram: Tensor) -> Tensor:
    """Compute the k clients' similarities ``[k, k]`` in one round from their updates' inner products ``gram``: cosines
    after scaling the updates to length 1 and centering.
    """
    products = products_without_mean(gram)
    lengths = products.diagonal().clamp_min(0).sqrt()
    products_of_lengths = torch.outer(lengths, lengths)
    is_valid = products_of_lengths > _MIN_LENGTH_PRODUCT
    divisors = products_of_lengths.where(is_valid, 1.0)
    cosines = (products / divisors).where(is_valid, 0.0)
    return cosines.clamp(-1, 1)


def same_group_pairs(similar: Tensor, threshold: float = MIN_COPY_SIMILARITY) -> Tensor:
    """Find pairs of clients in groups of copies, bool ``[k, k]``. A group's members are all similar to each other, by
    at least ``threshold``, and to no other client.
    """
    is_pair = (similar >= threshold).fill_diagonal_(False)
    is_pair_in_group = torch.zeros_like(is_pair)
    for group in groups_of(is_pair):
        members = torch.zeros(len(is_pair), dtype=torch.bool)
        members[group] = True
        pairs_of_group = torch.outer(members, members).fill_diagonal_(False)
        # Not so if one client sends the sum of two others' updates: it is similar to both, and they are not.
        all_are_similar = is_pair[pairs_of_group].all()
        if all_are_similar:
            is_pair_in_group |= pairs_of_group
    return is_pair_in_group


def groups_of(is_pair: Tensor) -> list[list[int]]:
    """Find the connected components of the graph ``is_pair [n, n]``. List those of at least two clients, by first
    member.
    """
    graph = is_pair.cpu().numpy()
    num_components, component_of_row = connected_components(graph, directed=False)
    groups = []
    for component in range(num_components):
        (rows,) = (component_of_row == component).nonzero()
        if len(rows) > 1:
            groups.append(rows.tolist())
    return sorted(groups)


def isolated_groups(similar: Tensor, gap: float = MIN_GAP) -> Tensor:
    """Find pairs of clients in isolated groups, bool ``[k, k]``. A group's members are more similar to each other than
    to others, by at least ``gap``. A group has at most half of the clients.
    """
    # Where data hardly differ, even copies stay below MIN_COPY_SIMILARITY, and this rule finds them.
    num_clients = len(similar)
    is_isolated = torch.zeros(num_clients, num_clients, dtype=torch.bool)
    if num_clients < MIN_COHORT:
        return is_isolated
    similarity = similar.double().clone().fill_diagonal_(1)
    for group in _clusters(similarity):
        if len(group) > num_clients / 2:
            continue
        outsiders = [row for row in range(num_clients) if row not in group]
        similarity_of_members = similarity[group]
        lowest_inside = similarity_of_members[:, group].min()
        highest_outside = similarity_of_members[:, outsiders].max()
        if lowest_inside - highest_outside >= gap:
            rows = torch.tensor(group)
            is_isolated[rows[:, None], rows] = True
    return is_isolated.fill_diagonal_(False)


def _clusters(similar: Tensor) -> list[list[int]]:
    """List the groups of rows that single linkage joins, one for each of its steps."""
    # A group whose members are all nearer to each other than to other rows is one of single linkage's clusters.
    num_rows = len(similar)
    distances = 1 - (similar + similar.T) / 2
    condensed = squareform(distances.clamp_min(0).numpy(), checks=False)
    # The first two columns have the numbers of the clusters that are joined.
    merges = linkage(condensed, "single")
    merged_pairs = merges[:, :2].astype(int).tolist()
    clusters = [[row] for row in range(num_rows)]  # then one more with each merge
    for cluster, other_cluster in merged_pairs:
        clusters.append(clusters[cluster] + clusters[other_cluster])
    return clusters[num_rows:]


def last_step_similarity(
    gram: Tensor,
    products: Tensor,
    square: float,
    num_samples: Tensor,
) -> Tensor:
    """Compute each update's similarity to the server's last step, which free riders send back, float64 ``[k]``. ``gram
    [k, k]`` has the updates' inner products, ``products [k]`` those with the step, and ``square`` is its squared norm.
    """
    # An honest client's cosine can be near 1, too, if its weight rules the step. So the mean direction c of step and
    # updates is subtracted: r_i = cos(d_i / |d_i| - c, g / |g| - c). It is computed with equal weights in c, and with
    # n_j |d_j|, and the smaller r_i counts: c is near g's direction by the first if the server aggregates uniformly,
    # by the second if by samples.
    k = len(gram)
    # all_products [k + 1, k + 1]: of the updates, and of the step in the last row and column.
    all_products = torch.zeros(k + 1, k + 1).double()
    all_products[:k, :k] = gram
    all_products[:k, k] = products
    all_products[k, :k] = products
    all_products[k, k] = square
    norms = all_products.diagonal().clamp_min(0).sqrt()
    is_valid = (norms > 0) & norms.isfinite()
    are_valid = torch.outer(is_valid, is_valid)
    cosines = all_products / torch.outer(norms, norms)
    cosines = cosines.where(are_valid, 0.0)

    equal_weights = is_valid[:k].double()
    claims = num_samples.double().cpu() * norms[:k]
    claims = claims.where(is_valid[:k], 0.0)
    similarity = _similarity_to_step(
        cosines,
        is_valid,
        weights=equal_weights,
    )
    similarity_by_claims = _similarity_to_step(
        cosines,
        is_valid,
        weights=claims,
    )
    smaller = torch.minimum(similarity, similarity_by_claims)
    return smaller.clamp(-1, 1)


def _similarity_to_step(
    cosines: Tensor,
    is_valid: Tensor,
    weights: Tensor,
) -> Tensor:
    """Compute the updates' cosines ``[k]`` with the step, the last row, without the mean direction by ``weights``."""
    # The mean direction of k updates and the step: the step counts as one of k + 1.
    k = len(weights)
    num_updates = is_valid[:k].sum()
    weight_of_updates = num_updates / (1 + num_updates)
    weight_of_step = 1 - weight_of_updates
    shares = weights / weights.sum().clamp_min(1e-300)  # 0 if no update is valid
    mean_weights = torch.cat([shares * weight_of_updates, weight_of_step[None]])  # w, [k + 1]

    # Inner products of the directions without their mean, [k + 1, k + 1]: C G C^T with C = I - 1 w^T, where G are the
    # cosines.
    centering = torch.eye(k + 1).double() - mean_weights[None, :]
    products = centering @ cosines @ centering.T
    lengths = products.diagonal().clamp_min(0).sqrt()

    products_of_lengths = lengths[:k] * lengths[k]
    both_valid = is_valid[:k] & is_valid[k]
    has_length = both_valid & (products_of_lengths > _MIN_LENGTH_PRODUCT)
    divisors = products_of_lengths.where(has_length, 1.0)
    return (products[:k, k] / divisors).where(has_length, 0.0)


ECHOING = "echo"
Similarity = Annotated[float, Gt(0), Le(1)]
SimilarityGap = Annotated[float, Gt(0), Le(2)]
#: The numbers that CopyFilter stores for each pair.
_NUM_STATISTICS = 4


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
        threshold: Similarity | None = MIN_COPY_SIMILARITY,
        gap: SimilarityGap | None = MIN_GAP,
        echo: Similarity | None = MIN_ECHO_SIMILARITY,
    ) -> None:
        self.threshold = threshold
        self.gap = gap
        self.echo = echo
        # [4, n, n], for each pair of clients: similarity_sum, num_rounds (common ones), num_high (rounds with a high
        # similarity) and is_copy (1 if the two were ever found to be copies, else 0).
        self._pairs = torch.zeros(_NUM_STATISTICS, 0, 0, dtype=torch.float64)
        # [4, n]: the same four numbers for each client and the server's last step.
        self._echoes = torch.zeros(_NUM_STATISTICS, 0, dtype=torch.float64)
        self._start: Tensor | None = None  # the model at the start of the last round

    def begin(self, federation: FederationInfo) -> None:
        self._pairs = self._pairs.new_zeros(_NUM_STATISTICS, 0, 0)
        self._echoes = self._echoes.new_zeros(_NUM_STATISTICS, 0)
        self._start = None
        super().begin(federation)

    def resume(self, federation: FederationInfo) -> None:
        super().resume(federation)
        self._pairs = self._pairs.cpu()
        self._echoes = self._echoes.cpu()
        num_clients = federation.num_clients
        if not self._pairs.numel():
            self._pairs = self._pairs.new_zeros(_NUM_STATISTICS, num_clients, num_clients)
        if not self._echoes.numel():
            self._echoes = self._echoes.new_zeros(_NUM_STATISTICS, num_clients)

    @property
    def groups(self) -> list[list[int]]:
        """List groups of clients that were found to be copies of each other, ascending.

        A client that sent the server's own step back is a group by itself.
        """
        _similarity_sum, _num_rounds, _num_high, is_copy = self._pairs  # each [n, n]
        groups = groups_of(is_copy > 0)
        clients_in_groups: set[int] = set()
        for group in groups:
            clients_in_groups.update(group)
        for client in self._echoing_clients():
            if client not in clients_in_groups:
                groups.append([client])
        return sorted(groups)

    def _echoing_clients(self) -> list[int]:
        _similarity_sum, _num_rounds, _num_high, is_echoing = self._echoes  # each [n]
        return is_echoing.nonzero().flatten().tolist()

    def apply(self, cohort: Cohort) -> Cohort:
        if cohort.gram is None:
            return cohort
        ids = torch.tensor(cohort.ids, dtype=torch.long)
        similarity = self._add_similarities(ids, cohort.gram)  # [n, n]
        similarity_to_step = self._add_similarities_to_step(ids, cohort, cohort.gram)  # [n]

        sentences = []
        for group in self.groups:
            members = [client for client in group if client in cohort.ids]
            if len(members) > 1 and self.notices.is_first(COPY, members):
                similarity_of_members = similarity[members][:, members]
                similarity_of_members.fill_diagonal_(-1)  # a client is no pair with itself
                highest = similarity_of_members.max().item()
                sentences.append(self._warning_text(COPY, members, highest, cohort))

        echoing_clients = [client for client in self._echoing_clients() if client in cohort.ids]
        if echoing_clients and self.notices.is_first(ECHOING, echoing_clients):
            highest = similarity_to_step[echoing_clients].max().item()
            sentences.append(self._warning_text(ECHOING, echoing_clients, highest, cohort))
        return cohort.warn(*sentences)

    def _warning_text(
        self,
        fault: str,
        clients: Sequence[int],
        similarity: float,
        cohort: Cohort,
    ) -> str:
        return (
            f"{self.notices.describe_fault(fault, clients)}, up to round {cohort.round_index + 1} (similarity "
            f"{similarity:.2f}): still aggregated and measured. Look into it before you pay anything; the report names "
            "these clients beside their amounts."
        )

    def _add_similarities_to_step(
        self,
        ids: Tensor,
        cohort: Cohort,
        gram: Tensor,
    ) -> Tensor:
        """Add a round's similarities to the server's last step. Return each client's mean so far, ``[n]``."""
        similarity_sum, num_rounds, num_high, is_echoing = self._echoes  # each [n]
        previous_model = self._start
        model = cohort.common_start
        self._start = None
        if self.echo is None:
            return similarity_sum / num_rounds.clamp_min(1)

        if model is not None:
            self._start = model.detach().clone()
        if model is not None and previous_model is not None:
            num_parameters = cohort.num_parameters
            step = (model - previous_model.to(model))[:num_parameters]
            initial_models = [model] * len(ids)
            updates = ClientMatrix(cohort.matrix, initial_models).first_columns(num_parameters)
            similarity = last_step_similarity(
                gram,
                products=updates.dot(step).cpu(),
                square=float(step.double() @ step.double()),
                num_samples=cohort.num_samples,
            )
            is_high = (similarity >= self.echo).double()
            has_moved = float(bool((step != 0).any()))  # a round without a step does not count
            similarity_sum = similarity_sum.index_add(0, ids, similarity)
            num_rounds = num_rounds.index_add(0, ids, torch.full_like(similarity, has_moved))
            num_high = num_high.index_add(0, ids, is_high)

        mean_similarity = similarity_sum / num_rounds.clamp_min(1)
        is_proven = (mean_similarity >= self.echo) & (num_high >= MIN_SIMILAR_ROUNDS)
        is_echoing = is_echoing.masked_fill(is_proven, 1.0)
        self._echoes = torch.stack([similarity_sum, num_rounds, num_high, is_echoing])
        return mean_similarity

    def _add_similarities(self, ids: Tensor, gram: Tensor) -> Tensor:
        """Add the similarities of a round's clients ``ids``. Return each pair's mean ``[n, n]``."""
        similarity_sum, num_rounds, num_high, is_copy = self._pairs  # each [n, n]
        cohort_pairs = ids[:, None], ids  # indices of the cohort's part, [k, k]
        mean_similarity = torch.zeros_like(similarity_sum)  # 0 for clients outside the cohort

        # Add this round's similarities.
        if len(ids) > 2:  # two clients do not show a common direction
            similarity = similarities(gram)  # [k, k]
            ones = torch.ones_like(similarity)
            is_high = (similarity >= HIGH_SIMILARITY).double()
            similarity_sum = similarity_sum.index_put(cohort_pairs, similarity, accumulate=True)
            num_rounds = num_rounds.index_put(cohort_pairs, ones, accumulate=True)
            num_high = num_high.index_put(cohort_pairs, is_high, accumulate=True)
            means = similarity_sum / num_rounds.clamp_min(1)
            mean_similarity[cohort_pairs] = means[cohort_pairs]

        # Judge by the sums.
        is_suspicious = self._suspicious_pairs(mean_similarity, num_rounds, cohort_pairs)
        is_proven = is_suspicious & (num_high >= MIN_SIMILAR_ROUNDS)
        is_copy = is_copy.masked_fill(is_proven, 1.0)  # floating-point, as the other statistics
        self._pairs = torch.stack([similarity_sum, num_rounds, num_high, is_copy])
        return mean_similarity

    def _suspicious_pairs(
        self, mean_similarity: Tensor, num_rounds: Tensor, cohort_pairs: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Find pairs of clients as similar as copies, bool ``[n, n]``, whatever the number of their rounds."""
        is_suspicious = torch.zeros_like(mean_similarity, dtype=torch.bool)
        if self.threshold is not None:
            is_suspicious |= same_group_pairs(mean_similarity, self.threshold)
        if self.gap is not None:
            # This rule is applied once to a pair, after its first rounds, for whose mean the gap is chosen. Later,
            # updates differ by noise, and common wrong labels make clients similar.
            is_isolated = isolated_groups(mean_similarity[cohort_pairs], self.gap)
            is_last_early_round = num_rounds[cohort_pairs] == NUM_EARLY_ROUNDS
            is_suspicious_by_gap = is_isolated & is_last_early_round
            is_suspicious[cohort_pairs] |= is_suspicious_by_gap
        return is_suspicious
