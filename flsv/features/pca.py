"""Principal components, fitted without pooling samples.

On the server's validation samples where it has any. Otherwise every client is asked for the sum and the second moments
of its samples, ``[d]`` and ``[d, d]``; their sums give the same components as the pooled samples would. The moments of
a client with fewer than d samples tell the space that these span: they are used as sums only, which secure aggregation
could give without showing anyone's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from flsv.declared import Count
from flsv.errors import ConfigurationError
from flsv.features.base import Features
from flsv.participants import Client, LocalData, run_protocol


@dataclass(frozen=True)
class Moments:
    """Number, sum and second moments of samples; they add.

    Args:
        count: number of samples.
        total: float64 ``[d]``, the samples' sum.
        square: float64 ``[d, d]``, the sum of x x^T.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [3.0, 2.0]])
        >>> Moments.of(x).covariance()
        tensor([[1., 1.],
                [1., 1.]], dtype=torch.float64)
    """

    count: int
    total: Tensor
    square: Tensor

    @staticmethod
    def of(x: Tensor) -> Moments:
        """The moments of the finite rows of ``[m, d]``."""
        x = x[x.isfinite().all(1)].double()
        return Moments(len(x), x.sum(0), x.T @ x)

    def __add__(self, other: Moments) -> Moments:
        if len(self.total) != len(other.total):
            raise ConfigurationError(
                f"samples with {len(self.total)} and with {len(other.total)} numbers have no common components. Give "
                "every client inputs of one shape."
            )
        return Moments(self.count + other.count, self.total + other.total, self.square + other.square)

    def mean(self) -> Tensor:
        """float64 ``[d]``."""
        return self.total / self.count

    def covariance(self) -> Tensor:
        """float64 ``[d, d]``, divided by the count."""
        mean = self.mean()
        return self.square / self.count - mean[:, None] * mean


class PCA(Features):
    """The samples' first principal components, not scaled: distances are those of the samples, as far as these go.

    Where there are fewer samples or dimensions than ``components``, there are as many as can be.

    Args:
        components: how many.

    Raises:
        ConfigurationError: ``components`` below 1; at the fit, nobody has a finite sample, or samples of two sizes; at
            the call, samples of another size than those of the fit.

    Example:
        >>> x = torch.randn(100, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        >>> pca = PCA(components=3)
        >>> pca.fit(x, [])
        >>> pca(x).shape
        torch.Size([100, 3])
    """

    def __init__(self, components: Count = 50) -> None:
        self.components = components
        self._mean: Tensor | None = None
        self._axes = torch.empty(0)

    def fit(self, server: Tensor | None, clients: Sequence[Client]) -> None:
        x = None if server is None else server.flatten(1).cpu()
        if x is not None and x.isfinite().all(1).any():
            x = x[x.isfinite().all(1)].double()
            mean = x.mean(0)
            axes = torch.linalg.svd(x - mean, full_matrices=False).Vh
        else:
            answers = run_protocol(clients, lambda client: client.ask(_moments))
            parts = [part for part in answers if part is not None and part.count]
            if not parts:
                raise ConfigurationError(
                    f"{self!r} has nothing to be fitted on: neither the server nor any client has a finite sample."
                )
            moments = reduce(add, parts)
            mean = moments.mean()
            axes = torch.linalg.eigh(moments.covariance()).eigenvectors.flip(1).T[: moments.count]
        axes = axes[: self.components]
        # An axis has no sign of its own: the entry that is largest is made positive.
        largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
        self._mean, self._axes = mean.float(), (axes * largest.sign()).float()

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        if self._mean is None:
            raise RuntimeError(f"{self!r} is not fitted yet: call fit first.")
        x = x.flatten(1).float()
        if x.shape[1] != len(self._mean):
            raise ConfigurationError(
                f"{self!r} was fitted on samples of {len(self._mean)} numbers, and got {x.shape[1]}."
            )
        return (x - self._mean.to(x.device)) @ self._axes.to(x.device).T


def _moments(local: LocalData) -> Moments | None:
    """Asked of a client without public data to fit on; None where it has no samples."""
    if not int(local.class_counts.sum()):
        return None
    return Moments.of(local.samples()[0].flatten(1).cpu())
