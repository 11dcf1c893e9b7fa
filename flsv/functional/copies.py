"""Find clients that send copies of each other's updates, as one client under two names does.

All updates of a round have something in common: the way to a better model. What tells clients apart is what is left of
their directions without the mean direction of the cohort,

    e_i = d_i / |d_i| - mean_j d_j / |d_j|,    s_ij = mean_t e_i . e_j / (|e_i| |e_j|),

over the rounds t in which both took part. For clients whose samples have nothing to do with each other s_ij is near
-1 / (k - 1), however much their updates agree; for two that train on the same samples it is near 1. To look for clients
that are too much alike over rounds is the idea of Fung, Yoon, Beschastnikh, "The Limitations of Federated Learning in
Sybil Settings", RAID 2020 (FoolsGold), which takes cosines of summed updates; without the mean, clients that learn the
same well are no suspects. One coincidence proves nothing: nobody is judged before three rounds, each of which has to
speak for the pair by itself, with 0.4 or more, and all rounds count the same.

Two clients are alike from a threshold of s_ij on, if all who are alike to one of them are alike to the other: the sum
of two updates is like both, which are not like each other, and a copy of neither.
"""

from __future__ import annotations

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

ALIKE = 0.7
"""Chosen on digits_sizes, digits_dirichlet and digits_label_noise, of the benchmark's tuning set: honest clients stay
below 0.62 there, and eight of nine copies reach 0.7 within ten rounds, most of them in the first."""


ROUNDS = 3
"""Rounds that have to speak for a pair, and the first rounds of a pair that the gap is looked for in."""


SPEAKING = 0.4
"""Similarity from which on a round speaks for a pair; chosen on digits_sizes, digits_dirichlet and digits_label_noise.
``docs/results/cheating.md`` has how often honest, copying and framed clients are named on others."""


def products_without_mean(gram: Tensor) -> Tensor:
    """e_i . e_j, float64 ``[k, k]``; 0 for updates of zero or without end, which are no part of the mean.

    Args:
        gram: ``[k, k]``, the updates' products with each other.

    Example:
        >>> updates = torch.tensor([[1.0, 0.0], [-2.0, 0.0]])
        >>> products_without_mean(updates @ updates.T)
        tensor([[ 1., -1.],
                [-1.,  1.]], dtype=torch.float64)
    """
    gram = gram.double()
    norms = gram.diagonal().clamp_min(0).sqrt()
    here = (norms > 0) & norms.isfinite()
    pairs = torch.outer(here, here)
    cosines = (gram / torch.outer(norms, norms)).where(pairs, 0.0)
    center = torch.diag(here.double()) - pairs / here.sum().clamp_min(1)
    return center @ cosines @ center


def similarities(gram: Tensor) -> Tensor:
    """Of one round, float64 ``[k, k]``: e_i . e_j / (|e_i| |e_j|); 0 for clients of whom nothing is left without the
    mean.

    Args:
        gram: ``[k, k]``, the updates' products with each other.

    Example:
        >>> updates = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]])
        >>> similarities(updates @ updates.T).round(decimals=4)
        tensor([[ 1.,  1., -1.],
                [ 1.,  1., -1.],
                [-1., -1.,  1.]], dtype=torch.float64)
    """
    products = products_without_mean(gram)
    lengths = products.diagonal().clamp_min(0).sqrt()
    known = torch.outer(lengths, lengths) > 1e-12
    return (products / torch.outer(lengths, lengths).where(known, 1.0)).where(known, 0.0).clamp(-1, 1)


def alike(similar: Tensor, threshold: float = ALIKE) -> Tensor:
    """Who is alike together: the groups all of whose pairs are, and that are like nobody else.

    Args:
        similar: ``[k, k]``, see :func:`similarities`, or their mean over rounds.
        threshold: from which on two clients are.

    Returns:
        bool ``[k, k]``, symmetric: pairs within such a group.

    Example:
        >>> near = torch.eye(5)
        >>> near[0, 1] = near[1, 0] = 0.9
        >>> near[2, 3] = near[3, 2] = near[3, 4] = near[4, 3] = 0.8  # 3 is between 2 and 4, who are not alike
        >>> groups_of(alike(near))
        [[0, 1]]
    """
    pairs = (similar >= threshold).fill_diagonal_(False)
    found = torch.zeros_like(pairs)
    for group in groups_of(pairs):
        rows = torch.tensor(group)
        within = pairs[rows][:, rows]
        found[rows[:, None], rows] = within & bool(within.sum() == len(group) * (len(group) - 1))
    return found


def groups_of(alike: Tensor) -> list[list[int]]:
    """Connected components of the pairs, each ascending, by first member; without single clients.

    Args:
        alike: bool ``[n, n]``, symmetric.

    Example:
        >>> alike = torch.zeros(4, 4, dtype=torch.bool)
        >>> alike[0, 2] = alike[2, 0] = alike[2, 3] = alike[3, 2] = True
        >>> groups_of(alike)
        [[0, 2, 3]]
    """
    count, group = connected_components(alike.cpu().numpy(), directed=False)
    found = [(group == each).nonzero()[0].tolist() for each in range(count)]
    return sorted(rows for rows in found if len(rows) > 1)
