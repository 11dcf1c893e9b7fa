"""Isolated groups: clients that are far more similar to each other than to any other client.

This rule, the package's own, supplements the fixed threshold of :mod:`flsv.functional.copies`. If clients' data hardly
differ, most of what is left of the updates' directions without their mean is noise, and even copies are less similar
than the threshold. So a group's similarities are compared with those to the other clients. Only the first three rounds
in which both clients of a pair took part count: later, updates of nearly trained models differ by noise only, and
clients with the same wrong labels become similar because of these labels.

The rule needs a cohort of six or more, and a model with many more directions than there are clients. With few classes
or parameters honest clients can be isolated by chance (by 0.6 among eight clients, with three classes and 80
parameters).
"""

from __future__ import annotations

import torch
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import squareform
from torch import Tensor

GAP = 0.45
"""The default gap, chosen on the benchmark's tuning set. Honest clients are isolated by at most 0.41 there, in 16 runs
without and 96 runs with a copy. Of the 90 copies that are treated like the original, 83 are isolated by 0.45 or more
within three rounds, 69 of them in the first."""
LEAST = 6
"""The smallest cohort in which groups are looked for; smaller ones have too few other pairs to compare with."""


def isolated_groups(similar: Tensor, gap: float = GAP) -> Tensor:
    """Find groups G of at most half of the clients that are isolated from all other clients by a gap.

        min_{i, j in G} s_ij - max_{i in G, l not in G} s_il >= gap,    2 <= |G| <= k / 2

    Args:
        similar: the similarities s of k clients, ``[k, k]``, see :func:`flsv.functional.copies.similarities`. Among
            fewer than six clients no group is isolated.
        gap: the least difference between the smallest similarity within G and the largest similarity of a member of G
            to a client outside.

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
