"""Copies: clients that send copies of each other's updates, as one client under two names does.

All updates d_i of a round share a component, the direction to a better model. The similarity s_ij of two of the k
clients of a cohort is therefore computed from their directions without the mean direction of the cohort,

    e_i = d_i / |d_i| - mean_j d_j / |d_j|,    s_ij = mean_t e_i . e_j / (|e_i| |e_j|),

with the mean over the rounds t in which both clients took part. For clients with unrelated samples s_ij is near
-1 / (k - 1), however well their updates agree; for two clients that train on the same samples it is near 1. To look for
clients that are too similar over rounds is the idea of Fung, Yoon, Beschastnikh, "The Limitations of Federated Learning
in Sybil Settings", RAID 2020 (FoolsGold), who take cosines of summed updates. The subtraction of the mean is added
here, so that clients whose updates agree because they learn the same are not suspected. To rule out coincidences, a
pair can count as copies only after three rounds, each with a similarity of 0.4 or more; all rounds have equal weight.

Limitation: the mean direction is that of the whole cohort. If a third of the cohort or more shares a component that the
other updates lack, subtracting the mean does not remove it, and the similarities within this third rise.
"""

from __future__ import annotations

import torch
from scipy.sparse.csgraph import connected_components
from torch import Tensor

ALIKE = 0.7
"""Mean similarity from which on two clients count as copies. It was chosen on the federations digits_sizes,
digits_dirichlet and digits_label_noise of the benchmark's tuning set: honest clients stay below 0.62 there, and eight
of nine copies reach 0.7 within ten rounds, most of them in the first."""
ROUNDS = 3
"""The number of rounds in which two clients must be similar to count as copies; also the number of their first common
rounds to which the rule of :mod:`flsv.functional.isolated_groups` is applied."""
SPEAKING = 0.4
"""Similarity from which on two clients count as similar in a round; chosen on the same federations as ``ALIKE``.
``docs/results/cheating.md`` has how often honest, copying and framed clients are named on other federations."""


def products_without_mean(gram: Tensor) -> Tensor:
    """Compute the scalar products e_i . e_j, with e_i the direction of update i minus the cohort's mean direction.

    Args:
        gram: the scalar products of the k updates with each other, ``[k, k]``.

    Returns:
        float64 ``[k, k]``. An update that is zero or not finite has the products 0, and does not enter the mean.

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
    """Compute the clients' similarities in one round: cosines of their e_i, see :func:`products_without_mean`.

    Args:
        gram: the scalar products of the k updates with each other, ``[k, k]``.

    Returns:
        float64 ``[k, k]`` in [-1, 1]; 0 for updates that are zero or have the mean direction.

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


def same_group_pairs(similar: Tensor, threshold: float = ALIKE) -> Tensor:
    """Find groups of clients in which each client is similar to all other members, and to no client outside.

    A client that is similar to two clients that differ, such as one that sends the sum of their updates, is therefore
    in no group with them.

    Args:
        similar: the similarities of k clients, ``[k, k]``, see :func:`similarities`, or their mean over rounds.
        threshold: the similarity from which on two clients count as similar.

    Returns:
        bool ``[k, k]``, symmetric, True for two clients of the same group.

    Example:
        >>> near = torch.eye(5)
        >>> near[0, 1] = near[1, 0] = 0.9
        >>> near[2, 3] = near[3, 2] = near[3, 4] = near[4, 3] = 0.8  # 3 is similar to 2 and to 4, which differ
        >>> groups_of(same_group_pairs(near))
        [[0, 1]]
    """
    pairs = (similar >= threshold).fill_diagonal_(False)
    found = torch.zeros_like(pairs)
    for group in groups_of(pairs):
        rows = torch.tensor(group)
        within = pairs[rows][:, rows]
        found[rows[:, None], rows] = within & bool(within.sum() == len(group) * (len(group) - 1))
    return found


def groups_of(pairs: Tensor) -> list[list[int]]:
    """Find the connected components of a graph of clients that have two or more members.

    Args:
        pairs: bool ``[n, n]``, symmetric, True for two connected clients.

    Returns:
        The members of each component, ascending; the components are ordered by their first member.

    Example:
        >>> pairs = torch.zeros(4, 4, dtype=torch.bool)
        >>> pairs[0, 2] = pairs[2, 0] = pairs[2, 3] = pairs[3, 2] = True
        >>> groups_of(pairs)
        [[0, 2, 3]]
    """
    count, group = connected_components(pairs.cpu().numpy(), directed=False)
    found = [(group == each).nonzero()[0].tolist() for each in range(count)]
    return sorted(rows for rows in found if len(rows) > 1)
