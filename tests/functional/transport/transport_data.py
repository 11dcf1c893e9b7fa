"""Real features for the tests of this folder."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

ROOT = os.environ.get("FLSV_DATA_ROOT")
needs_data = pytest.mark.skipif(ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data")


def mnist_features(count: int, validation: int, features: int = 50) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Client and validation samples of MNIST on principal components of the latter, with their labels."""
    from torchvision.datasets import MNIST

    data = MNIST(ROOT, train=True)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[: count + validation]
    x, y = data.data[order].flatten(1) / 255, data.targets[order]
    mean = x[count:].mean(0)
    basis = torch.linalg.svd(x[count:] - mean, full_matrices=False).Vh[:features].T
    x = (x - mean) @ basis
    return x[:count], y[:count], x[count:], y[count:]
