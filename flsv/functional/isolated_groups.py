"""Isolated groups: clients that are far more similar to each other than to any other client.

How similar copies become depends on the federation: the less the clients' data differ, the more of the updates'
directions without their mean (:mod:`flsv.functional.copies`) is noise. This second rule, the package's own, therefore
compares a group's similarities with those of the federation's other pairs. It is applied to the first three rounds in
which both clients of a pair took part: in nearly trained models updates differ by noise only, and the updates of
clients with the same wrong labels are similar because of these labels.

The rule needs a cohort of six, and clients that can differ in more ways than there are clients: where few classes or
parameters leave few directions to differ in, honest clients become isolated by chance (eight clients of three classes
and 80 parameters: by 0.6).
"""

from __future__ import annotations

import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from torch import Tensor

GAP = 0.45
"""Chosen on the benchmark's tuning set. In its 16 honest runs, and among the others in 96 runs with a copy, no pair
stands apart by more than 0.41; of the 90 copies that are treated like the original, 83 do by 0.45 or more within three
rounds, 69 of them in the first."""
LEAST = 6
"""The smallest cohort in which groups are looked for: in smaller cohorts too few other pairs show what is usual."""


def isolated_groups(similar: Tensor, gap: float = GAP) -> Tensor:
    """Find groups of at most half of the clients that are isolated from all others by a gap.

        min_{i, j in G} s_ij - max_{i in G, l not in G} s_il >= gap,    2 <= |G| <= k / 2

    Args:
        similar: the similarities s of k clients, ``[k, k]``, see :func:`flsv.functional.copies.similarities`. Among
            fewer than six clients no group is isolated.
        gap: the least difference between the smallest similarity within a group G and the largest similarity of one of
            its members to another client.

    Returns:
        bool ``[k, k]``, symmetric, True for two clients of the same isolated group.

    Example:
        >>> from flsv.functional.copies import groups_of
        >>> similar = torch.full((6, 6), -0.2).fill_diagonal_(1)
        >>> similar[0, 3] = similar[3, 0] = 0.4
        >>> groups_of(isolated_groups(similar))
        [[0, 3]]
    """
    k = len(similar)
    found = torch.zeros(k, k, dtype=torch.bool)
    if k < LEAST:
        return found
    values = similar.double().clone().fill_diagonal_(1)
    # A group that is nearer to itself than to all others is a cluster of single linkage.
    joined = linkage(squareform((1 - (values + values.T) / 2).clamp_min(0).numpy(), checks=False), "single")
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
