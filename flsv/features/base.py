"""Base class of features: a fit that pools no raw data, and a call. The plainest are the samples themselves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from torch import Tensor, nn

from flsv.declared import Declared
from flsv.errors import ConfigurationError
from flsv.participants import Client

#: Features that need no arguments, by the name that configuration files use; filled by ``flsv.features``.
FEATURES: dict[str, Callable[..., Features]] = {}


class Features(Declared, ABC):
    """A map from samples ``[m, ...]`` to features ``[m, d]``, the same one at every client and at the server.

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
        """Features ``[m, d]`` of samples ``[m, ...]``; rows that hold NaN may come out as NaN, and change no other.

        Args:
            x: the samples.
            module: the global model in evaluation mode, where ``needs_model``.
        """

    def fit(self, server: Tensor | None, clients: Sequence[Client]) -> None:
        """Learn what the map needs; called before the first call. By default nothing.

        Args:
            server: the server's own samples ``[m, ...]``, or None.
            clients: may be asked for statistics. What the questions return is all that crosses.
        """


def make_features(features: str | Features) -> Features:
    """Features by name, with their usual options, or as they are.

    Raises:
        ConfigurationError: an unknown name, or something else.

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
    """The inputs as the network sees them, flattened: d is the product of a sample's shape.

    Example:
        >>> import torch
        >>> Pixels()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 64])
    """

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        return x.flatten(1).float()
