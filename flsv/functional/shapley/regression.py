"""Weights and membership vectors of a layer of coalitions in the Shapley kernel (Lundberg and Lee, NeurIPS 2017)."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.shapley.layers import Layer


def centered(layer: Layer) -> Tensor:
    """Return the membership vectors of a layer's m drawn coalitions minus s/n, with s their size: float64 ``[m, n]``,
    each row of which sums to 0."""
    return layer.masks.to(torch.float64) - layer.size / layer.masks.shape[1]


def kernel_share(layer: Layer) -> float:
    """Compute a layer's total weight in the Shapley kernel, divided by n - 1.

    The weight is 1 / (s (n - s)) for coalitions of size s among n players, twice that for a layer of two sizes.
    """
    return layer.sizes / (layer.size * (layer.masks.shape[1] - layer.size))
