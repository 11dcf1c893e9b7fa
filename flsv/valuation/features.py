"""Features of samples, such as principal components, fitted without pooling raw data.

Tier: provisional.
"""
# Without validation samples every client sends the sum [d] and second moments [d, d] of its samples, whose sums give
# the components of the pooled samples. The moments of a client with fewer than d samples reveal the subspace that they
# span. Only sums over clients are used, so secure aggregation, which is not built in, could hide them.

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flsv.core import Client, LocalData, map_clients
from flsv.core.parameter_space import ParameterSpace
from flsv.models.factory import build_network
from flsv.utilities.declared import Count, ValidatedArguments
from flsv.utilities.errors import ConfigurationError

__all__ = ["FEATURES", "PCA", "Backbone", "Features", "Penultimate", "Pixels", "make_features"]


class Features(ValidatedArguments, ABC):
    """Base class of functions that map samples ``[m, ...]`` to features ``[m, d]``.

    A valuation calls :meth:`fit` once at the server, and then the object itself at every client and at the server.

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
        """Compute the features ``[m, d]`` of m samples."""

    def fit(self, server: Tensor | None, clients: Sequence[Client]) -> None:
        """Fit the features to the samples. Does nothing by default.

        Args:
            server: the server's validation samples ``[m, ...]``. None if it has none.
            clients: the clients. ``client.request(function)`` runs a function at the client, for example to compute
                statistics of its samples. The server receives only the function's return value.
        """


def make_features(features: str | Features) -> Features:
    """Return the :class:`Features` object with a name, or the given object.

    Example:
        >>> make_features("pca")
        PCA()
    """
    if isinstance(features, Features):
        return features
    if features not in FEATURES:
        raise ConfigurationError(
            f"features={features!r}: expected one of {list(FEATURES)}, or a Features object."
        )
    return FEATURES[features]()


class Pixels(Features):
    """A sample's own values as features, flattened to a vector.

    Example:
        >>> import torch
        >>> Pixels()(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 64])
    """

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        return x.flatten(1).float()


BATCH_SIZE = 256


class Penultimate(Features):
    """The inputs ``[m, d]`` of the current global model's classifier head as features.

    The model changes from round to round, and so does the unit of distances. Between rounds, compare the clients'
    contribution shares (:attr:`flsv.valuation.Valuation.shares`), which have no unit, not their distances.

    Args:
        head: name of the head as in ``module.named_modules()``. None: the layer that timm's ``get_classifier()``
            returns, or the last ``nn.Linear``, if it is trained.

    Raises:
        ConfigurationError: at the call: there is no model, it has no linear layer or no layer with the name ``head``,
            or its forward pass does not call the head exactly once.

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
            raise ConfigurationError(
                "Penultimate() needs a model, and there is none before training: choose PCA()."
            )
        return head_inputs(module, x, self.head)


@torch.no_grad()
def head_inputs(
    module: nn.Module,
    x: Tensor,
    head: str | None = None,
) -> Tensor:
    """Compute the inputs ``[m, d]`` of a module's classifier head for m samples."""
    space = ParameterSpace(module, head)
    head_of_module = space.head
    if head_of_module is None:
        raise ConfigurationError(
            f"{type(module).__name__} has no classifier head, since {space.why_no_head}. Name its last layer with "
            "Penultimate(head=...), or choose PCA()."
        )
    features = _flat_inputs(module, x, module.get_submodule(head_of_module.name))
    if len(features) != len(x):
        raise ConfigurationError(
            f"the head {head_of_module.name!r} of {type(module).__name__} was given {len(features)} rows for {len(x)} "
            "samples: it is not called once in every forward pass. Name another layer with Penultimate(head=...)."
        )
    return features.float()


def _flat_inputs(module: nn.Module, x: Tensor, layer: nn.Module) -> Tensor:
    inputs: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(1)))
    try:
        for batch in x.split(BATCH_SIZE):
            module(batch)
    finally:
        hook.remove()
    return torch.cat(inputs) if inputs else torch.empty(0, 0)


class PCA(Features):
    """The first principal components of the samples as features.

    Components are not scaled to unit variance, so that distances between features approximate those between samples.

    Args:
        components: number of components. With fewer samples or dimensions, as many as possible.

    Raises:
        ConfigurationError: ``components`` is below 1, or, at the fit, there is no finite sample, or, at the call,
            samples have another size.

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
        x = torch.empty(0, 0) if server is None else _finite_rows(server)
        if len(x):
            mean = x.mean(0)
            axes = torch.linalg.svd(x - mean, full_matrices=False).Vh  # a row per axis
        else:
            mean, axes = self._mean_and_axes(clients)

        axes = axes[: self.components]
        # The sign of an axis is arbitrary: its largest entry is made positive.
        positions = axes.abs().argmax(1, keepdim=True)
        largest = axes.gather(1, positions)
        self._mean = mean.float()
        self._axes = (axes * largest.sign()).float()

    def _mean_and_axes(self, clients: Sequence[Client]) -> tuple[Tensor, Tensor]:
        """Compute mean ``[d]`` and principal axes ``[c, d]`` from the clients' moments."""
        responses = map_clients(clients, lambda client: client.request(_moments))
        moments = [response for response in responses if response is not None]
        if not moments:
            raise ConfigurationError(
                f"{self!r} has nothing to be fitted on: neither the server nor any client has a finite sample."
            )
        # Of all clients together: the number of samples, their sum [d], and the sum of their outer products [d, d].
        count, sum_of_samples, sum_of_products = moments[0]
        for client_count, client_sum, client_products in moments[1:]:
            count += client_count
            sum_of_samples = sum_of_samples + client_sum
            sum_of_products = sum_of_products + client_products
        mean = sum_of_samples / count
        covariance = sum_of_products / count - mean[:, None] * mean
        eigenvectors = torch.linalg.eigh(covariance).eigenvectors  # columns, of ascending variance
        axes = eigenvectors.flip(1).T
        return mean, axes[:count]  # N samples lie in at most N directions

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        if self._mean is None:
            raise RuntimeError(f"{self!r} is not fitted yet: call fit first.")
        x = x.flatten(1).float()
        if x.shape[1] != len(self._mean):  # a single number would be subtracted from all means
            raise ConfigurationError(
                f"{self!r} was fitted on samples of {len(self._mean)} numbers, and got {x.shape[1]}."
            )
        centered = x - self._mean.to(x.device)
        return centered @ self._axes.to(x.device).T


def _finite_rows(x: Tensor) -> Tensor:
    x = x.flatten(1).cpu()
    is_finite = x.isfinite().all(1)
    return x[is_finite].double()


def _moments(local: LocalData) -> tuple[int, Tensor, Tensor] | None:
    """Return number, sum ``[d]`` and second moments ``[d, d]`` of a client's finite samples, None if it has none."""
    if not int(local.class_counts.sum()):
        return None
    samples, _labels = local.samples()
    x = _finite_rows(samples)
    if len(x) == 0:
        return None
    return len(x), x.sum(0), x.T @ x


#: Features without necessary arguments, ``{name in configuration files: class}``.
FEATURES: dict[str, Callable[..., Features]] = {
    "pca": PCA,
    "penultimate": Penultimate,
    "pixels": Pixels,
}


class Backbone(Features):
    """The inputs of a fixed network's classifier head as features.

    Pixel values are not changed, so normalize the data as the network's weights require.

    Args:
        name: name of the network, such as ``"resnet18.a1_in1k"``, see :func:`flsv.models.build_network`.
        pretrained: whether to load timm's weights, which are downloaded unless they are in its cache. Else the weights
            are random. The features of a random network roughly preserve distances.
        image_size: side length in pixels to which images are resized, for networks that need larger images. None: they
            are not resized.
        seed: seed of random weights.
        options: further keyword arguments of the network. With ``pretrained``, timm reads weights from a file by
            ``{"pretrained_cfg_overlay": {"file": path}}``.

    Raises:
        ConfigurationError: at the first call: the network is unknown or does not accept the samples.

    Example:
        >>> Backbone("lenet5")(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 84])
    """

    def __init__(
        self,
        name: str,
        pretrained: bool = False,
        image_size: Count | None = None,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.pretrained = pretrained
        self.image_size = image_size
        self.seed = seed
        self.options = options
        self._network: nn.Module | None = None

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        x = x.float()
        if self.image_size is not None:
            size = (self.image_size, self.image_size)
            x = F.interpolate(x, size=size, mode="bilinear", antialias=True)
        if self._network is None:
            input_shape = tuple(x.shape[1:])
            self._network = self._build_network(input_shape)
        return head_inputs(self._network.to(x.device), x)

    def _build_network(self, input_shape: tuple[int, ...]) -> nn.Module:
        options = dict(self.options or {})
        if self.pretrained:
            options["pretrained"] = True
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            # Two classes, as the head itself is not used.
            network = build_network(self.name, 2, input_shape, **options)
        return network.eval().requires_grad_(False)
