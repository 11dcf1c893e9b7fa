"""Find free riders: clients that send back the server's last step.

Finds clients that send back the server's last step, and have learnt nothing: its cosine with the update is 1. So may
that of a client be that weighs more than all others and learns smoothly: the step is then nearly its own. What is left
without what all have in common tells them from each other, as it does copies, with the step g as one more update,

    r_i = cos(d_i / |d_i| - c, g / |g| - c),    c the mean of all these directions,

taken twice, once with a weight of n_j |d_j| (n_j samples) for client j in c, and the lesser of the two: where clients
go on in their directions, the second c is that of g under weights by samples, and the first nearly under equal ones.
"""

from __future__ import annotations

import torch
from torch import Tensor

ECHO = 0.9
"""r_i from which on an update is the server's last step; chosen on the benchmark's tuning set, of which honest clients'
means stay below 0.6, and those of an echo are 1."""


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
