"""Free riders: clients that send back the server's last step without training.

The cosine of such an update with the server's last step is 1. An honest client can have a cosine near 1, too: if its
weight is much larger than all others', the server's step is nearly its own last update. As with copies
(:mod:`flsv.functional.copies`), the mean direction of all updates is therefore subtracted before directions are
compared.
"""

from __future__ import annotations

import torch
from torch import Tensor

ECHO = 0.9
"""The value of :func:`last_step_similarity`, as a mean over rounds, from which on a client counts as a free rider. It
was chosen on the benchmark's tuning set, where honest clients' means are below 0.6 and free riders' means are 1."""


def last_step_similarity(gram: Tensor, products: Tensor, square: float, num_samples: Tensor) -> Tensor:
    """Compute how similar each update of a round is to the server's last step.

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
