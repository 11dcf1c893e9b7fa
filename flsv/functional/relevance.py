"""Relevance of clients to each other by their label distributions, and how well clients' scores of each other match it.

Wu et al., "Rethinking Personalized Client Collaboration in Federated Learning", IEEE Transactions on Mobile Computing,
2024, section IV-B and figure 7. The paper shows both matrices; the AUROC that compares them is this package's addition.
"""

from __future__ import annotations

import torch
from scipy.stats import rankdata
from torch import Tensor


def label_overlap(class_counts: Tensor) -> Tensor:
    """Compute the overlap of label distributions for all pairs of clients: sum_c min(p_ic, p_jc) for clients i and j.

    p_ic is the share of class c in client i's samples. The overlap is above 0 for two clients with a class in common,
    which is the paper's definition of relevance. Where nearly every client has a few samples of every class (Dirichlet
    partitions), ``label_overlap(counts) > 0.1`` is more informative.

    Args:
        class_counts: the numbers of samples of each client and class, ``[n, M]``.

    Returns:
        ``[n, n]`` in [0, 1], symmetric; 0 for a client without samples.

    Raises:
        ValueError: ``class_counts`` is not a matrix, or a count is negative.

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
    """Compute the AUROC of scores: the probability that a relevant pair scores higher than an irrelevant one.

    Ties count half. A pair is an ordered pair of two different clients.

    Args:
        relevance: ``[n, n]``, the pairs' scores; NaN for pairs without a score, which are left out.
        truth: ``[n, n]``, above 0 (or True) for relevant pairs.

    Returns:
        A scalar in [0, 1], float64; NaN unless there are relevant and irrelevant pairs with scores.

    Raises:
        ValueError: ``relevance`` and ``truth`` are not square matrices of one size.

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
    # Mann and Whitney: from the ranks of the relevant pairs; tied scores get the mean of their ranks.
    rank_sum = torch.from_numpy(rankdata(scores.cpu()))[positive.cpu()].sum()
    return (rank_sum - wins * (wins + 1) / 2) / (wins * losses)
