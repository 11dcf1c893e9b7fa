"""Judging updates by themselves: which are too large, which are copies of another's, and what numbers of samples claim.

Which updates of a cohort are suspiciously large.

The modified z-score of Iglewicz and Hoaglin, "How to Detect and Handle Outliers", ASQC Basic References in Quality
Control 16, 1993, of the logarithms of the updates' norms:

    z_i = 0.6745 (log |d_i| - median) / MAD,    MAD = median_j |log |d_j| - median|.

Their threshold is 3.5. Logarithms, because norms grow in proportion to what makes them differ: learning rates, numbers
of steps. Median and MAD stand up to nearly half of the cohort being wrong, where mean and standard deviation are
carried away by the outlier itself.

Finds clients that send copies of each other's updates, as one client under two names does.

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

How near copies come to each other depends on the federation: the less the clients' data differ, the more of what is
left is noise. So there is a second rule, relative to the federation's own pairs, which is ours: a group stands apart,
if its least alike pair is still more alike, by a gap, than any of its members is to anybody else,

    min_{i, j in G} s_ij - max_{i in G, l not in G} s_il >= gap,    2 <= |G| <= k / 2,

by the first three rounds that a pair spent together: models that are nearly trained differ by noise, and those of the
same wrong labels by what the labels have in common. It takes a cohort of six, and clients who can differ in more ways
than there are clients: where few classes or parameters leave few directions to differ in, honest clients come to stand
apart by chance (eight clients of three classes and 80 parameters: by 0.6).

The mean is everybody's: where a third of a cohort or more sends what nobody else does, what the others have in common
is not taken out of them as a whole, and they come near to each other.

Finds clients that send back the server's last step, and have learnt nothing: its cosine with the update is 1. So may
that of a client be that weighs more than all others and learns smoothly: the step is then nearly its own. What is left
without what all have in common tells them from each other, as it does copies, with the step g as one more update,

    r_i = cos(d_i / |d_i| - c, g / |g| - c),    c the mean of all these directions,

taken twice, once with a weight of n_j |d_j| (n_j samples) for client j in c, and the lesser of the two: where clients
go on in their directions, the second c is that of g under weights by samples, and the first nearly under equal ones.

Caps on what a client can claim: the length of its update and its number of samples.

Nobody can check either from outside, and both can be made larger at will: Bagdasaryan et al., "How To Backdoor
Federated Learning", AISTATS 2020, send several times an update, and whoever writes each sample down three times has
three times as many. What is linear in them pays for that. Norms are bounded for robustness by Sun et al., "Can You
Really Backdoor Federated Learning?", arXiv:1911.07963, 2019, at a constant; here the bound on a claim c_i is relative
to the cohort, whose median half of it has to be wrong to move at will:

    min(c_i, cap median_j c_j).

Those below the bound may still come up to it, and those above gain nothing by going further.
"""

from __future__ import annotations

import math

import torch
from scipy.cluster.hierarchy import linkage
from scipy.sparse.csgraph import connected_components
from scipy.spatial.distance import squareform
from torch import Tensor

OUTLYING = 3.5
FACTOR = 5.0
LARGEST = math.sqrt(torch.finfo(torch.float32).max)
"""1.8e19: what is longer has an infinite norm in float32."""


def large_updates(norms: Tensor, threshold: float = OUTLYING, factor: float = FACTOR) -> Tensor:
    """Which norms are too large for their cohort.

    An update is, if its modified z-score is above ``threshold`` and its norm above ``factor`` times the median. The
    second condition is for small cohorts, whose MAD may be next to nothing: three norms 1, 1.001 and 1.02 are no
    outlier. Of two clients nobody can say which one is wrong; but whatever the others do, a norm above 1.8e19 counts as
    too large. Updates of zero are left out of median and MAD.

    Args:
        norms: ``[k]``, not negative; infinite is too large.
        threshold: for the modified z-score.
        factor: for the ratio to the median.

    Returns:
        bool ``[k]``.

    Example:
        >>> large_updates(torch.tensor([1.0, 1.3, 0.8, 1e30, 0.0]))
        tensor([False, False, False,  True, False])
        >>> large_updates(torch.tensor([1.0, 1.001, 1.02]))
        tensor([False, False, False])
    """
    logs = norms.double().log()
    known = logs.isfinite()
    overflowing = ~(norms.double() <= LARGEST)
    if not known.any():
        return overflowing
    median = logs[known].quantile(0.5)
    above = logs - median
    mad = above[known].abs().quantile(0.5)
    return overflowing | ((0.6745 * above > threshold * mad) & (above > math.log(factor)))


def drowning_updates(norms: Tensor, model_norm: float = 0.0) -> Tensor:
    """Which norms are so large that a sum in float32 would have next to nothing of anything else.

    Those of 1 / eps = 8.4e6 times the model's norm and the median update's, and those above 1.8e19: a sum with one of
    them has lost what the others sent, and models that start from it overflow.

    Args:
        norms: ``[k]``, not negative; NaN where one is not known, which says nothing.
        model_norm: of the model that the updates start from.

    Returns:
        bool ``[k]``.

    Example:
        >>> drowning_updates(torch.tensor([1.0, 1.3, 1e6, 1e11, 0.0]), model_norm=2.0)
        tensor([False, False, False,  True, False])
    """
    norms = norms.double()
    moved = norms[(norms > 0) & norms.isfinite()]
    median = moved.log().quantile(0.5).exp().item() if len(moved) else 0.0
    scale = max(median, model_norm)
    most = min(LARGEST, scale / torch.finfo(torch.float32).eps) if scale > 0 else LARGEST
    return norms > most


ALIKE = 0.7
"""Chosen on digits_sizes, digits_dirichlet and digits_label_noise, of the benchmark's tuning set: honest clients stay
below 0.62 there, and eight of nine copies reach 0.7 within ten rounds, most of them in the first."""

GAP = 0.45
"""Chosen on the benchmark's tuning set. In its 16 honest runs, and among the others in 96 runs with a copy, no pair
stands apart by more than 0.41; of the 90 copies that are treated like the original, 83 do by 0.45 or more within three
rounds, 69 of them in the first."""
LEAST = 6
"""Clients of a cohort in which somebody can stand apart: fewer show too little of what is usual."""
ROUNDS = 3
"""Rounds that have to speak for a pair, and the first rounds of a pair that the gap is looked for in."""
ECHO = 0.9
"""r_i from which on an update is the server's last step; chosen on the benchmark's tuning set, of which honest clients'
means stay below 0.6, and those of an echo are 1."""
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


def echoes(gram: Tensor, products: Tensor, square: float, num_samples: Tensor) -> Tensor:
    """How far each update of a round is the server's last step, float64 ``[k]``: r_i; 0 where nothing is left without
    the mean.

    Args:
        gram: ``[k, k]``, the updates' products with each other.
        products: ``[k]``, theirs with the step.
        square: the step's with itself.
        num_samples: ``[k]``.

    Example:
        >>> updates, step = torch.eye(3), torch.tensor([0.0, 5.0, 0.0])
        >>> echoes(updates @ updates.T, updates @ step, 25.0, torch.ones(3)).round(decimals=2)
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


def standing_apart(similar: Tensor, gap: float = GAP) -> Tensor:
    """Groups of at most half of the clients whose similarity exceeds that to all others by the gap.

    Args:
        similar: ``[k, k]``, see :func:`similarities`; of fewer than six clients nobody stands apart.
        gap: least difference between a group's least similar pair and its nearest outsider.

    Returns:
        bool ``[k, k]``, symmetric: pairs within such a group.

    Example:
        >>> similar = torch.full((6, 6), -0.2).fill_diagonal_(1)
        >>> similar[0, 3] = similar[3, 0] = 0.4
        >>> groups_of(standing_apart(similar))
        [[0, 3]]
    """
    k = len(similar)
    found = torch.zeros(k, k, dtype=torch.bool)
    if k < LEAST:
        return found
    values = similar.double().clone().fill_diagonal_(1)
    # Whoever is nearer to its group than to all others is a group of single linkage.
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


def length_factors(norms: Tensor, cap: float) -> Tensor:
    """By how much updates are multiplied so that none is longer than the bound.

    Args:
        norms: ``[k]``, not negative. The median is that of the finite ones above 0.
        cap: the bound, in medians.

    Returns:
        float64 ``[k]`` in (0, 1], on the CPU.

    Example:
        >>> length_factors(torch.tensor([1.0, 2.0, 8.0, 0.0]), cap=2.0)
        tensor([1.0000, 1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    norms = norms.detach().cpu().double()
    known = (norms > 0) & norms.isfinite()
    factors = torch.ones_like(norms)
    if known.any():
        factors[known] = (cap * norms[known].quantile(0.5) / norms[known]).clamp_max(1)
    return factors


def counted(num_samples: Tensor, cap: float | None) -> Tensor:
    """The numbers of samples that count, of those that clients tell.

    Args:
        num_samples: integers ``[k]``.
        cap: the bound, in medians, rounded up to a whole number; None: there is none.

    Returns:
        ``[k]``, of the same type.

    Example:
        >>> counted(torch.tensor([10, 20, 90]), cap=1.5)
        tensor([10, 20, 30])
    """
    if cap is None or not len(num_samples):
        return num_samples
    bound = (cap * num_samples.double().quantile(0.5)).ceil()
    return num_samples.clamp_max(bound.to(num_samples.dtype))


def shortened(rows: Tensor, start: Tensor, factors: Tensor, end: int) -> Tensor:
    """Models whose updates are multiplied.

    Args:
        rows: ``[k, P]``, models. They are not changed.
        start: ``[P]``, which they started from, or ``[k, P]``.
        factors: ``[k]``.
        end: how many leading entries are parameters: the others are not multiplied.

    Returns:
        ``[k, P]``, ``rows`` itself where all factors are 1; rows of a factor of 1 are equal to the bit.

    Example:
        >>> shortened(torch.tensor([[3.0, 7.0], [2.0, 7.0]]), torch.ones(2), torch.tensor([0.5, 1.0]), end=1)
        tensor([[2., 7.],
                [2., 7.]])
    """
    changed = (factors != 1).nonzero().flatten().tolist()
    if not changed:
        return rows
    result, starts = rows.clone(), start.expand_as(rows)
    for i in changed:
        own = starts[i, :end]
        result[i, :end].sub_(own).mul_(float(factors[i])).add_(own)
    return result
