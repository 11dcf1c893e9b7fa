"""What clients are worth to each other: FedCE, and the relevance of peers.

FedCE's contribution estimation: how far a client's update points away from the others', and how badly the others'
model does on its data.

Jiang et al., "Fair Federated Medical Image Segmentation via Client Contribution Estimation", CVPR 2023; formulas as in
the authors' code (NVIDIA FLARE, ``research/fed-ce``). With d_i the clients' updates, c_i their weights, and m_i the
score, on client i's own validation samples, of the aggregate without its part,

    cos_i = cos(d_i, sum_j c_j d_j - c_i d_i),
    a_i = 1 - mean over rounds of cos_i,    e_i = 1 - mean over rounds of m_i,
    c_i <- a_i e_i ("times") or a_i + e_i ("plus"),

a and e made to sum to 1 before, c after, and none below 0.001 each time.

Which clients are relevant to each other, by their data and by what clients have found.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, section IV-B and figure 7. The paper shows the matrices; the AUROC that compares them is ours.

pFedSV's aggregation weights: how much of each model a client mixes into its own.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, equations 6 and 7. For the client's own model equation 6 divides by the distance of a model to itself; what is put
there instead is said in ``self_weight``.

Its dynamic top-k download, whose models a client downloads in a round, is in section III-C of the same.
"""

from __future__ import annotations

from typing import Literal

import torch
from scipy.stats import rankdata
from torch import Generator, Tensor

from flsv.utilities.declared import Count, NonNegative, checked

Combine = Literal["times", "plus"]
#: A norm below it counts as this much, as in ``torch.nn.functional.cosine_similarity``.
EPSILON = 1e-8


def leave_one_out_cosines(gram: Tensor, weights: Tensor) -> Tensor:
    """Cosine of each client's update with the weighted sum of the others'.

    Args:
        gram: ``[k, k]``, the updates' products with each other.
        weights: ``[k]``, c.

    Returns:
        float64 ``[k]`` in [-1, 1]; 0 for an update of zero, and where the others' sum is zero.

    Raises:
        ValueError: shapes that do not fit.

    Example:
        >>> updates = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 2.0]])
        >>> leave_one_out_cosines(updates @ updates.T, torch.tensor([0.25, 0.25, 0.5]))
        tensor([0.2425, 0.2425, 0.0000], dtype=torch.float64)
    """
    k = len(weights)
    if weights.ndim != 1 or gram.shape != (k, k):
        raise ValueError(f"expected gram [k, k] and weights [k]; got {list(gram.shape)} and {list(weights.shape)}.")
    gram, weights = gram.double(), weights.to(gram.device).double()
    own = gram.diagonal()
    others = weights.expand(k, k) * (1 - torch.eye(k, dtype=torch.float64, device=gram.device))
    products = (gram * others).sum(dim=1)
    squares = torch.einsum("ia,ab,ib->i", others, gram, others)
    longest = (others.abs() * own.clamp_min(0).sqrt()).sum(dim=1)  # if all of them pointed one way
    norms = torch.where(squares > 1e-13 * longest.square(), squares, 0).sqrt()
    products = products.where(norms > 0, torch.zeros_like(products))  # what is left then is rounding
    cosines = products / (own.clamp_min(0).sqrt().clamp_min(EPSILON) * norms.clamp_min(EPSILON))
    return cosines.clamp(-1, 1)


@checked
def contribution_estimates(
    cosines: Tensor, scores: Tensor, combine: Combine = "times", floor: float = 1e-3, cap: float | None = None
) -> Tensor:
    """FedCE's weights.

    A score is what a client says of the others' model, and the worse it says that this is, the more it counts for: at
    will, where nothing bounds the errors 1 - m. With ``cap`` none counts beyond so many medians of the cohort's.

    Args:
        cosines: ``[n]``, means over the rounds so far, in [-1, 1].
        scores: ``[n]``, likewise of the aggregate without the client's part on the client's samples, in [0, 1].
        combine: ``"times"`` or ``"plus"``.
        floor: no share is below it.
        cap: the largest error that counts, in medians; None: what is told counts.

    Returns:
        float64 ``[n]``. As in the authors' code they sum to 1 up to what the floor has added.

    Raises:
        ConfigurationError: another way to combine.
        ValueError: scores outside [0, 1].

    Example:
        >>> contribution_estimates(torch.tensor([0.5, 0.5, -0.5]), torch.tensor([0.9, 0.8, 0.8]))
        tensor([0.1111, 0.2222, 0.6667], dtype=torch.float64)
        >>> contribution_estimates(torch.zeros(3), torch.tensor([0.8, 0.8, 0.0]), cap=1.25)
        tensor([0.3077, 0.3077, 0.3846], dtype=torch.float64)
    """
    if bool(((scores < 0) | (scores > 1)).any()):
        raise ValueError(f"FedCE's error is 1 - score, of a score in [0, 1]; got {scores.tolist()}.")
    directions = _shares(1 - cosines.double(), floor)
    told = 1 - scores.double()
    if cap is not None and len(told):
        told = told.clamp_max(cap * told.quantile(0.5))
    errors = _shares(told, floor)
    return _shares(directions * errors if combine == "times" else directions + errors, floor)


def _shares(values: Tensor, floor: float) -> Tensor:
    """Shares of the sum, each at least ``floor``; equal ones where the sum is 0."""
    total = values.sum()
    shares = values / total if total > 0 else torch.full_like(values, 1 / max(len(values), 1))
    return shares.clamp_min(floor)


def without_own(aggregate: Tensor, own: Tensor, weight: float) -> Tensor | None:
    """The others' weighted average (A - w x) / (1 - w), from the average A of all.

    Args:
        aggregate: ``[P]``, A.
        own: ``[P]``, x, what the client has in it.
        weight: w in [0, 1].

    Returns:
        ``[P]``; None where nobody else has any weight.

    Raises:
        ValueError: a weight outside [0, 1].

    Example:
        >>> without_own(torch.tensor([3.0, 5.0]), torch.tensor([1.0, 1.0]), 0.5)
        tensor([5., 9.])
    """
    if not -1e-6 <= weight <= 1 + 1e-6:
        raise ValueError(f"a client's weight in the aggregate lies in [0, 1]; got {weight}.")
    rest = 1 - weight
    if rest < 1e-6:
        return None
    return (aggregate - weight * own) / rest


def label_overlap(class_counts: Tensor) -> Tensor:
    """The overlap of the label distributions of two clients: sum_c min(p_ic, p_jc).

    More than 0 for two clients with a label in common, which is the paper's relevance. Where nearly everybody has a
    few samples of every class (Dirichlet), ``label_overlap(counts) > 0.1`` says more.

    Args:
        class_counts: ``[n, M]`` samples of each client and class.

    Returns:
        ``[n, n]`` in [0, 1], symmetric; 0 for a client without samples.

    Raises:
        ValueError: not a matrix, or negative counts.

    Example:
        >>> label_overlap(torch.tensor([[50, 50, 0], [0, 20, 20], [0, 0, 9]]))
        tensor([[1.0000, 0.5000, 0.0000],
                [0.5000, 1.0000, 0.5000],
                [0.0000, 0.5000, 1.0000]])
    """
    if class_counts.ndim != 2 or bool((class_counts < 0).any()):
        raise ValueError(f"expected class_counts [n, M], none below 0; got {list(class_counts.shape)}.")
    counts = class_counts.float()
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    # Class by class: [n, n, M] would be large for hundreds of clients.
    return sum((torch.minimum(p[:, None], p[None, :]) for p in shares.T), start=shares.new_zeros(len(shares)))


def relevance_auroc(relevance: Tensor, truth: Tensor) -> Tensor:
    """The chance that a relevant pair of clients has a higher score than one that is not; ties count a half.

    Args:
        relevance: ``[n, n]`` scores; pairs that are NaN (never looked at) and the diagonal are left out.
        truth: ``[n, n]``, the pair is relevant where it is above 0 (or True).

    Returns:
        A scalar in [0, 1], float64; NaN unless there are pairs of both kinds.

    Raises:
        ValueError: the two are not square matrices of one size.

    Example:
        >>> nan = float("nan")
        >>> relevance = torch.tensor([[nan, 0.2, -0.1], [0.3, nan, nan], [0.1, 0.2, nan]])
        >>> relevance_auroc(relevance, torch.tensor([[1, 1, 0], [1, 1, 0], [0, 0, 1]]))
        tensor(0.9167, dtype=torch.float64)
    """
    if relevance.ndim != 2 or relevance.shape[0] != relevance.shape[1] or relevance.shape != truth.shape:
        raise ValueError(f"expected two matrices [n, n], got {list(relevance.shape)} and {list(truth.shape)}.")
    known = ~relevance.isnan()
    known.fill_diagonal_(False)
    scores, positive = relevance[known], truth.to(relevance.device)[known] > 0
    wins, losses = int(positive.sum()), int((~positive).sum())
    if wins == 0 or losses == 0:
        return torch.tensor(float("nan"), dtype=torch.float64)
    # Mann and Whitney: from the ranks of the relevant pairs, tied scores sharing the mean of theirs.
    rank_sum = torch.from_numpy(rankdata(scores.cpu()))[positive.cpu()].sum()
    return (rank_sum - wins * (wins + 1) / 2) / (wins * losses)


Policy = Literal["mean", "exclude", "min"]
SelfWeight = Policy | NonNegative


@checked
def personalized_weights(values: Tensor, distances: Tensor, own: int, self_weight: SelfWeight = "mean") -> Tensor:
    r"""Weights of the models that a client has at hand.

    .. math:: w_j = \frac{\max(v_j, 0)}{d_j}, \qquad w^*_j = w_j / \textstyle\sum_l w_l

    Nobody worth more than 0: the client keeps its own model. A model at distance 0 has no finite w; in the limit all
    weight goes to the models at distance 0 that are worth more than 0, in proportion to their values. They equal the
    client's own, so it keeps its model then too.

    Args:
        values: ``[s]`` Shapley values v of the models, the client's own among them.
        distances: ``[s]`` Euclidean distances d of the models to the client's own, not negative; the entry of its own
            is not read.
        own: the place of the client's own model.
        self_weight: the distance that its own model is given: the ``"mean"`` of the others' or the least of them
            (``"min"``). ``"exclude"``: its own model has no weight, unless no other is worth more than 0. A number:
            that distance. The smaller it is, the nearer the own weight comes to 1, which is local training.

    Returns:
        ``[s]``, not negative, sums to 1.

    Raises:
        ConfigurationError: an unknown ``self_weight``, or a distance below 0.
        ValueError: shapes that differ, a place outside them, values that are not finite, negative distances.

    Example:
        >>> values, distances = torch.tensor([0.3, 0.2, -0.1]), torch.tensor([0.0, 2.0, 4.0])
        >>> personalized_weights(values, distances, own=0)
        tensor([0.5000, 0.5000, 0.0000])
        >>> personalized_weights(values, distances, own=0, self_weight="min")
        tensor([0.6000, 0.4000, 0.0000])
        >>> personalized_weights(values, distances, own=0, self_weight=0.1)
        tensor([0.9677, 0.0323, 0.0000])
    """
    if values.ndim != 1 or values.shape != distances.shape or not 0 <= own < len(values):
        raise ValueError(
            f"expected values [s], distances [s] and own in 0 .. s - 1, got {list(values.shape)}, "
            f"{list(distances.shape)} and {own}."
        )
    others = torch.arange(len(values), device=values.device) != own
    worth, apart = values.double().clamp_min(0), distances.double().clone()
    if not bool(values.isfinite().all()) or not bool((apart[others] >= 0).all()) or bool(apart[others].isinf().any()):
        raise ValueError(f"expected finite values and distances not below 0: {values.tolist()}, {distances.tolist()}.")
    if self_weight == "exclude":
        worth = worth * others
    if not bool((worth * others > 0).any()):
        return (~others).to(values)
    if isinstance(self_weight, str):
        apart[own] = apart[others].mean() if self_weight == "mean" else apart[others].min()
    else:
        apart[own] = self_weight
    same = (apart == 0) & (worth > 0)
    weights = worth * same if bool(same.any()) else worth / apart.clamp_min(torch.finfo(torch.float64).tiny)
    return (weights / weights.sum()).to(values)


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
    """The clients to download, best first.

    A client with a negative score is never downloaded again. While there is one that was never looked at, k clients
    are downloaded, by score, those never looked at counting as 0 and ties falling at random; afterwards as many as have
    a positive score, at least 1 (if anybody is left who is not negative).

    Args:
        relevance: ``[n]`` scores of all clients, NaN: never looked at.
        available: bool ``[n]``, whose model the server has.
        own: who downloads; never itself.
        k: downloads a round to start with, at least 1.
        explore: ``"score"`` is the above. ``"unvisited"`` gives the k places to those never looked at first, which
            keeps the paper's bound, ceil((n - m - 1) / k) + max(ceil(m / k), 1) rounds for m relevant clients of n.
        generator: of the ties.

    Returns:
        int64 ``[k']`` on the CPU, k' from 0 to n - 1.

    Raises:
        ConfigurationError: k below 1, an unknown ``explore``.
        ValueError: shapes that do not fit.

    Example:
        >>> nan = float("nan")
        >>> relevance = torch.tensor([nan, 0.3, -0.2, 0.1, nan])
        >>> top_k_download(relevance, torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3, 4])
        >>> top_k_download(relevance.nan_to_num(-0.1), torch.ones(5, dtype=torch.bool), own=0, k=3)
        tensor([1, 3])
    """
    if relevance.ndim != 1 or relevance.shape != available.shape or not 0 <= own < len(relevance):
        raise ValueError(
            f"expected relevance [n], available [n] and own in 0 .. n - 1, got {list(relevance.shape)}, "
            f"{list(available.shape)} and {own}."
        )
    unvisited = relevance.isnan().cpu()
    scores = relevance.detach().cpu().double().nan_to_num(0.0)
    candidates = available.cpu() & (scores >= 0)
    candidates[own] = False
    if not bool((candidates & unvisited).any()):
        k = max(int((candidates & (scores > 0)).sum()), 1)
    # A random order, then stable sorts by what matters less to what matters more.
    order = torch.randperm(len(scores), generator=generator)
    order = order[scores[order].argsort(descending=True, stable=True)]
    if explore == "unvisited":
        order = order[unvisited[order].int().argsort(descending=True, stable=True)]
    return order[candidates[order]][:k]
