"""pFedSV: weights of other clients' models, the choice of downloads, and how well values find relevant clients.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024: equations 6 and 7, sections III-C and IV-B, figure 7.
"""

from __future__ import annotations

from typing import Literal

import torch
from scipy.stats import rankdata
from torch import Generator, Tensor

from flsv.utilities.declared import Count, NonNegative, checked

SelfWeight = Literal["mean", "exclude", "min"] | NonNegative


@checked
def personalized_weights(
    values: Tensor, distances: Tensor, own: int, self_weight: SelfWeight = "mean"
) -> Tensor:
    r"""Compute a client's weights of its own and downloaded models (eqs. 6 and 7).

    .. math:: w_j = \frac{\max(v_j, 0)}{d_j}, \qquad w^*_j = w_j / \textstyle\sum_l w_l

    with v_j the Shapley value of model j and d_j its distance from the client's own model. If no other model has a
    value above 0, the own model has all weight. For a model at distance 0, w_j would be infinite. Models at distance 0
    with a value above 0 therefore get all weight, in proportion to their values. Such models equal the client's own
    model, so the mixture does, too.

    Args:
        values: the Shapley values of s models, the client's own among them, ``[s]``.
        distances: the models' Euclidean distances from the client's own model, ``[s]``, not negative. The distance of
            the own model is not read.
        own: the index of the client's own model.
        self_weight: the distance that replaces the own model's: the ``"mean"`` or the least (``"min"``) of the others'
            distances, or a number. The smaller it is, the closer the own weight is to 1, that is to local training.
            ``"exclude"``: the own model has no weight, unless no other model has a value above 0.

    Returns:
        The weights, ``[s]``, not negative, which sum to 1.

    Raises:
        ConfigurationError: ``self_weight`` is unknown or below 0.
        ValueError: the shapes differ, ``own`` is out of range, a value is not finite, or a distance is negative or
            infinite.

    Example:
        >>> values, distances = torch.tensor([0.3, 0.2, -0.1]), torch.tensor([0.0, 2.0, 4.0])
        >>> personalized_weights(values, distances, own=0)
        tensor([0.5000, 0.5000, 0.0000])
        >>> personalized_weights(values, distances, own=0, self_weight="min")
        tensor([0.6000, 0.4000, 0.0000])
        >>> personalized_weights(values, distances, own=0, self_weight=0.1)
        tensor([0.9677, 0.0323, 0.0000])
    """
    _check_weighting(values, distances, own)
    is_other = torch.arange(len(values), device=values.device) != own
    positive_values = values.double().clamp_min(0)
    is_helpful = is_other & (positive_values > 0)
    if not is_helpful.any():
        return (~is_other).to(values)  # the own model has all weight
    if self_weight == "exclude":
        positive_values = positive_values * is_other
    divisors = distances.double().clone()
    divisors[own] = _own_divisor(divisors[is_other], self_weight)

    is_same_model = (divisors == 0) & (positive_values > 0)
    if is_same_model.any():
        weights = positive_values * is_same_model
    else:
        tiny = torch.finfo(torch.float64).tiny
        weights = positive_values / divisors.clamp_min(tiny)
    return (weights / weights.sum()).to(values)


def _check_weighting(values: Tensor, distances: Tensor, own: int) -> None:
    are_vectors = values.ndim == 1 and values.shape == distances.shape
    if not are_vectors or not 0 <= own < len(values):
        raise ValueError(
            f"expected values [s], distances [s] and own in 0 .. s - 1, but got {list(values.shape)}, "
            f"{list(distances.shape)} and {own}."
        )
    is_valid = (distances >= 0) & distances.isfinite()
    is_valid[own] = True  # the client's distance from itself is not used
    if not values.isfinite().all() or not is_valid.all():
        raise ValueError(
            f"expected finite values and finite distances of at least 0, but got {values.tolist()} and "
            f"{distances.tolist()}."
        )


def _own_divisor(other_distances: Tensor, self_weight: SelfWeight) -> Tensor | float:
    if self_weight == "mean":
        return other_distances.mean()
    if isinstance(self_weight, str):
        return other_distances.min()
    return self_weight


Explore = Literal["score", "unvisited"]


@checked
def top_k_download(
    relevance: Tensor,
    available: Tensor,
    own: int,
    k: Count,
    explore: Explore = "score",
    generator: Generator | None = None,
) -> Tensor:
    """Choose the clients whose models a client downloads in a round, best first.

    A client is unvisited if its model was never downloaded. As long as there are unvisited clients, the k clients with
    the highest scores are chosen, where unvisited clients have the score 0 and ties are broken at random. Afterwards
    all clients with a positive score are chosen, or, if there are none, one client with the score 0. Clients with a
    negative score are never chosen again.

    Args:
        relevance: the scores of all n clients, ``[n]``. NaN for unvisited clients.
        available: bool ``[n]``, True if the server has the client's model.
        own: the index of the client that downloads. It never downloads its own model.
        k: how many models to download while there is an unvisited client, at least 1.
        explore: ``"score"``: the rule above. ``"unvisited"``: unvisited clients come first, and each is visited
            within the paper's bound of ceil((n - m - 1) / k) + max(ceil(m / k), 1) rounds, with m relevant clients.
        generator: the random generator that breaks ties. None: torch's default.

    Returns:
        The indices of the chosen clients, int64 ``[0]`` to ``[n - 1]``, on the CPU.

    Raises:
        ConfigurationError: ``k`` is below 1, or ``explore`` is unknown.
        ValueError: the shapes do not fit, or ``own`` is out of range.

    Example:
        >>> nan = float("nan")
        >>> relevance = torch.tensor([nan, 0.3, -0.2, 0.1, nan])
        >>> top_k_download(relevance, torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3, 4])
        >>> top_k_download(relevance.nan_to_num(-0.1), torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3])
    """
    are_vectors = relevance.ndim == 1 and relevance.shape == available.shape
    if not are_vectors or not 0 <= own < len(relevance):
        raise ValueError(
            f"expected relevance [n], available [n] and own in 0 .. n - 1, but got {list(relevance.shape)}, "
            f"{list(available.shape)} and {own}."
        )
    is_unvisited = relevance.isnan().cpu()
    scores = relevance.detach().cpu().double().nan_to_num(0.0)
    is_candidate = available.cpu() & (scores >= 0)
    is_candidate[own] = False
    num_downloads = k
    has_unvisited = (is_candidate & is_unvisited).any()
    if not has_unvisited:  # all helpful models are downloaded, whatever k is
        is_helpful = is_candidate & (scores > 0)
        num_downloads = max(1, int(is_helpful.sum()))

    ranking = _best_first(scores, generator)
    if explore == "unvisited":
        ranking = _true_first(ranking, is_unvisited)
    candidates = ranking[is_candidate[ranking]]
    return candidates[:num_downloads]


def _true_first(clients: Tensor, condition: Tensor) -> Tensor:
    """Return the clients of which a ``condition [n]`` holds before all others, otherwise in the same order."""
    return clients[condition[clients].int().argsort(descending=True, stable=True)]


def _best_first(scores: Tensor, generator: Generator | None) -> Tensor:
    # Equal scores are in random order.
    clients = torch.randperm(len(scores), generator=generator)
    descending = scores[clients].argsort(descending=True, stable=True)
    return clients[descending]


def label_overlap(class_counts: Tensor) -> Tensor:
    """Compute the overlap sum_c min(p_ic, p_jc) of clients' label distributions.

    p_ic is the share of class c in client i's samples. The overlap is above 0 for two clients with a class in common,
    which is the paper's definition of relevance. Where nearly every client has a few samples of every class (Dirichlet
    partitions), ``label_overlap(counts) > 0.1`` is more informative.

    Args:
        class_counts: the numbers of samples of each client and class, ``[n, M]``.

    Returns:
        ``[n, n]`` in [0, 1], symmetric. 0 for a client without samples.

    Raises:
        ValueError: ``class_counts`` is not a matrix, or a count is negative.

    Example:
        >>> label_overlap(torch.tensor([[50, 50, 0], [0, 20, 20], [0, 0, 9]]))
        tensor([[1.0000, 0.5000, 0.0000],
                [0.5000, 1.0000, 0.5000],
                [0.0000, 0.5000, 1.0000]])
    """
    is_negative = class_counts < 0
    if class_counts.ndim != 2 or is_negative.any():
        raise ValueError(
            f"expected class_counts [n, M] of at least 0, but got shape {list(class_counts.shape)} and a smallest "
            f"count of {class_counts.min().item():g}."
        )
    counts = class_counts.float()
    totals = counts.sum(1, keepdim=True)
    shares = counts / totals.clamp_min(1)
    overlap = shares.new_zeros(len(shares), len(shares))
    # The sum is computed class by class, since [n, n, M] would be large for hundreds of clients.
    for class_shares in shares.T:
        column = class_shares[:, None]
        overlap += torch.minimum(column, class_shares)
    return overlap


def relevance_auroc(relevance: Tensor, truth: Tensor) -> Tensor:
    """Compute the AUROC of scores of pairs of clients. It is the probability that a relevant pair scores higher than an
    irrelevant one.

    Ties count half. A pair is an ordered pair of two different clients.

    Args:
        relevance: ``[n, n]``, the pairs' scores. NaN for pairs without a score, which are excluded.
        truth: ``[n, n]``, above 0 (or True) for relevant pairs.

    Returns:
        A scalar in [0, 1], float64. NaN unless there are relevant and irrelevant pairs with scores.

    Raises:
        ValueError: ``relevance`` and ``truth`` are not square matrices of one size.

    Example:
        >>> nan = float("nan")
        >>> relevance = torch.tensor([[nan, 0.2, -0.1], [0.3, nan, nan], [0.1, 0.2, nan]])
        >>> relevance_auroc(relevance, torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]))
        tensor(0.9167, dtype=torch.float64)
    """
    is_square = relevance.ndim == 2 and relevance.shape[0] == relevance.shape[1]
    if not is_square or relevance.shape != truth.shape:
        raise ValueError(
            f"expected two matrices [n, n], got {list(relevance.shape)} and {list(truth.shape)}."
        )
    has_score = ~relevance.isnan()
    has_score.fill_diagonal_(False)
    scores = relevance[has_score]
    is_relevant = truth.to(relevance.device)[has_score] > 0
    num_relevant = int(is_relevant.sum())
    num_irrelevant = int((~is_relevant).sum())

    # The Mann-Whitney statistic, from the ranks of the relevant pairs. Tied scores get the mean of their ranks.
    # SciPy 1.18 returns ranks in the type of the scores, and float32 is too coarse for their sum.
    ranks = torch.from_numpy(rankdata(scores.double().cpu()))
    rank_sum = ranks[is_relevant.cpu()].sum()
    lowest_sum = num_relevant * (num_relevant + 1) / 2
    num_pairs = num_relevant * num_irrelevant
    return (rank_sum - lowest_sum) / num_pairs  # 0 / 0 is NaN
