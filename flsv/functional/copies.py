"""Copies: clients that send copies of each other's updates, as one client under two names does, or of the last step.

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
from scipy.cluster.hierarchy import linkage
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform
from torch import Tensor

ALIKE = 0.7
"""Mean similarity from which on two clients count as copies. It was chosen on the federations digits_sizes,
digits_dirichlet and digits_label_noise of the benchmark's tuning set: honest clients stay below 0.62 there, and eight
of nine copies reach 0.7 within ten rounds, most of them in the first."""
ROUNDS = 3
"""The number of rounds in which two clients must be similar to count as copies; also the number of their first common
rounds to which the rule of :func:`isolated_groups` is applied."""
SPEAKING = 0.4
"""Similarity from which on two clients count as similar in a round; chosen on the same federations as ``ALIKE``.
``docs/results/cheating.md`` has how often honest, copying and framed clients are named on other federations."""
GAP = 0.45
"""The default gap, chosen on the benchmark's tuning set. Honest clients are isolated by at most 0.41 there, in 16 runs
without and 96 runs with a copy. Of the 90 copies that are treated like the original, 83 are isolated by 0.45 or more
within three rounds, 69 of them in the first."""
LEAST = 6
"""The smallest cohort in which groups are looked for; smaller ones have too few other pairs to compare with."""
ECHO = 0.9
"""The value of :func:`last_step_similarity`, as a mean over rounds, from which on a client counts as a free rider. It
was chosen on the benchmark's tuning set, where honest clients' means are below 0.6 and free riders' means are 1."""


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


def isolated_groups(similar: Tensor, gap: float = GAP) -> Tensor:
    """Find groups G of at most half of the clients that are isolated from all other clients by a gap.

    This rule, the package's own, supplements the fixed threshold of :data:`ALIKE`. If clients' data hardly differ, most
    of what is left of the updates' directions without their mean is noise, and even copies are less similar than the
    threshold. So a group's similarities are compared with those to the other clients. Only the first three rounds in
    which both clients of a pair took part count: later, updates of nearly trained models differ by noise only, and
    clients with the same wrong labels become similar because of these labels. The rule needs a cohort of six or more,
    and a model with many more directions than there are clients. With few classes or parameters honest clients can be
    isolated by chance (by 0.6 among eight clients, with three classes and 80 parameters).

        min_{i, j in G} s_ij - max_{i in G, l not in G} s_il >= gap,    2 <= |G| <= k / 2

    Args:
        similar: the similarities s of k clients, ``[k, k]``, see :func:`similarities`. Among
            fewer than six clients no group is isolated.
        gap: the least difference between the smallest similarity within G and the largest similarity of a member of G
            to a client outside.

    Returns:
        bool ``[k, k]``, symmetric, True for two clients of the same isolated group.

    Example:
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


def last_step_similarity(gram: Tensor, products: Tensor, square: float, num_samples: Tensor) -> Tensor:
    """Compute how similar each update of a round is to the server's last step, which free riders send back.

    The cosine of such an update with the server's last step is 1. An honest client can have a cosine near 1, too: if
    its weight is much larger than all others', the server's step is nearly its own last update. As with copies, the
    mean direction of all updates is therefore subtracted before directions are compared.

    The similarity of the update d_i of client i to the step g is

        r_i = cos(d_i / |d_i| - c, g / |g| - c),    c the mean direction of g and all updates.

    r_i is computed twice, with equal weights of the updates in c, and with the weight n_j |d_j| for client j of n_j
    samples. The smaller r_i is returned. If clients keep their directions from round to round, c is close to the
    direction of g with the first weights if the server aggregates uniformly, with the second if by samples.

    Args:
        gram: the scalar products of the k updates with each other, ``[k, k]``.
        products: the updates' scalar products with the step, ``[k]``.
        square: the step's squared length.
        num_samples: the clients' numbers of samples, ``[k]``.

    Returns:
        The similarities, float64 ``[k]``, in [-1, 1]; 0 if an update or the step has the mean direction.

    Example:
        >>> updates, step = torch.eye(3), torch.tensor([0.0, 5.0, 0.0])
        >>> last_step_similarity(updates @ updates.T, updates @ step, 25.0, torch.ones(3)).round(decimals=2)
        tensor([-0.6500,  1.0000, -0.6500], dtype=torch.float64)
    """
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
        center = torch.cat([weights / weights.sum().clamp_min(1e-300) * clients, (1 - clients)[None]])
        without = torch.eye(k + 1, dtype=torch.float64) - center
        left = without @ cosines @ without.T
        lengths = left.diagonal().clamp_min(0).sqrt()
        known = here[:k] & here[k] & (lengths[:k] * lengths[k] > 1e-12)
        found.append((left[:k, k] / (lengths[:k] * lengths[k]).where(known, 1.0)).where(known, 0.0))
    return torch.minimum(*found).clamp(-1, 1)
