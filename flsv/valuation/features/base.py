"""Features of samples, fitted without pooling raw data: the samples themselves, a model's, and principal components.

Principal components are fitted on the server's validation samples where it has any. Otherwise every client is asked for
the sum and the second moments of its samples, ``[d]`` and ``[d, d]``; their sums give the same components as the pooled
samples would. The moments of a client with fewer than d samples reveal the space that these span; only their sums are
used, which secure aggregation could compute without revealing any client's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor, nn

from flsv.core import Client, LocalData, map_clients
from flsv.core.parameter_space import ParameterSpace
from flsv.utilities.declared import Count, ValidatedArguments
from flsv.utilities.errors import ConfigurationError


class Features(ValidatedArguments, ABC):
    """Map from samples ``[m, ...]`` to features ``[m, d]``, the same at every client and at the server.

    Attributes:
        needs_model: whether the call needs the current global model.

    Example:
        >>> class Mean(Features):
        ...     def __call__(self, x, module=None):
        ...         return x.flatten(1).mean(1, keepdim=True)
        >>> import torch
        >>> Mean()(torch.ones(3, 1, 2, 2)).shape
        torch.Size([3, 1])
    """

    needs_model = False

    @abstractmethod
    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        """Compute features ``[m, d]`` of samples ``[m, ...]``; rows with NaN may become NaN, and change no other row.

        Args:
            x: the samples.
            module: the global model in evaluation mode, where ``needs_model``.
        """

    def fit(self, server: Tensor | None, clients: Sequence[Client]) -> None:
        """Fit the map before the first call; by default there is nothing to fit.

        Args:
            server: the server's own samples ``[m, ...]``, or None.
            clients: may be asked for statistics; the server receives only the questions' return values.
        """


def make_features(features: str | Features) -> Features:
    """Make features by name with their default options; return a ``Features`` object unchanged.

    Raises:
        ConfigurationError: an unknown name, or another object.

    Example:
        >>> make_features("pca")
        PCA()
    """
    if isinstance(features, Features):
        return features
    if features not in FEATURES:
        raise ConfigurationError(f"features={features!r}: expected one of {list(FEATURES)}, or a Features object.")
    return FEATURES[features]()


class Pixels(Features):
    """Inputs as the network sees them, flattened: d is the product of a sample's shape.

    Example:
        >>> import torch
        >>> Pixels()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 64])
    """

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        return x.flatten(1).float()


BATCH = 256


class Penultimate(Features):
    """Features that the current global model passes to its classifier head, ``[m, d]``.

    They change from round to round, so compare shares, not distances, of different rounds.

    Args:
        head: name of the head as in ``module.named_modules()``; by default timm's ``get_classifier()`` or the last
            ``nn.Linear``.

    Raises:
        ConfigurationError: at the call, no linear layer, an unknown name, or a head that the forward pass does not
            call.

    Example:
        >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 5), nn.ReLU(), nn.Linear(5, 3))
        >>> Penultimate()(torch.zeros(2, 1, 8, 8), net).shape
        torch.Size([2, 5])
    """

    needs_model = True

    def __init__(self, head: str | None = None) -> None:
        self.head = head

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        if module is None:
            raise ConfigurationError("Penultimate() needs a model, and there is none before training: choose PCA().")
        return head_inputs(module, x, self.head)


@torch.no_grad()
def head_inputs(module: nn.Module, x: Tensor, head: str | None = None) -> Tensor:
    """Compute the inputs ``[m, d]`` of a module's classifier head for samples ``[m, ...]``, in batches.

    Raises:
        ConfigurationError: as :class:`Penultimate`.
    """
    found = ParameterSpace(module, head).head
    if found is None:
        name = type(module).__name__
        raise ConfigurationError(
            f"{name} has no linear layer: name its last with Penultimate(head=...), or choose PCA()."
        )
    seen: list[Tensor] = []
    hook = module.get_submodule(found.name).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        for batch in x.split(BATCH):
            module(batch)
    finally:
        hook.remove()
    features = torch.cat([part.flatten(1) for part in seen]) if seen else torch.empty(0, 0)
    if len(features) != len(x):
        raise ConfigurationError(
            f"the head {found.name!r} of {type(module).__name__} was given {len(features)} rows for {len(x)} samples: "
            "it is not called once in every forward pass. Name another layer with Penultimate(head=...)."
        )
    return features.float()


@dataclass(frozen=True)
class Moments:
    """Number, sum and second moments of samples, which can be added.

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
        """Compute the moments of the finite rows of ``[m, d]``."""
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
        """Compute the mean, float64 ``[d]``."""
        return self.total / self.count

    def covariance(self) -> Tensor:
        """Compute the covariance, float64 ``[d, d]``, divided by the count."""
        mean = self.mean()
        return self.square / self.count - mean[:, None] * mean


class PCA(Features):
    """First principal components of the samples, not scaled, so that distances approximate those of the samples.

    With fewer samples or dimensions than ``components`` there are as many components as possible.

    Args:
        components: number of components.

    Raises:
        ConfigurationError: ``components`` below 1; at the fit, no finite sample at all, or samples of two sizes; at the
            call, samples of another size than those of the fit.

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
            answers = map_clients(clients, lambda client: client.ask(_moments))
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
    """Compute a client's moments, where the server has no samples to fit on; None for a client without samples."""
    if not int(local.class_counts.sum()):
        return None
    return Moments.of(local.samples()[0].flatten(1).cpu())


#: Features that need no arguments, by the name that configuration files use.
FEATURES: dict[str, Callable[..., Features]] = {"pca": PCA, "penultimate": Penultimate, "pixels": Pixels}
