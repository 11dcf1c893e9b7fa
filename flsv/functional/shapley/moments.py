"""Running mean and standard error of independent samples."""

from __future__ import annotations

import torch
from torch import Tensor


class Moments:
    """Running mean and standard error of independent samples, updated batch by batch (Chan et al. 1979).

    Example:
        >>> moments = Moments()
        >>> moments.add(torch.tensor([[1.0], [2.0]]))
        >>> moments.add(torch.tensor([[3.0]]))
        >>> moments.mean, moments.stderr
        (tensor([2.]), tensor([0.5774]))
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = torch.zeros(())
        self._squares = torch.zeros(())

    def add(self, samples: Tensor) -> None:
        """Add a batch of B samples, ``[B, ...]``."""
        count, mean = len(samples), samples.mean(dim=0)
        shift, total = mean - self.mean, self.count + count
        self._squares = self._squares + (samples - mean).square().sum(dim=0) + shift**2 * (self.count * count / total)
        self.mean = self.mean + shift * (count / total)
        self.count = total

    @property
    def stderr(self) -> Tensor:
        """Compute the standard error of ``mean``; NaN with fewer than two samples."""
        if self.count < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self._squares / (self.count - 1) / self.count).sqrt()
