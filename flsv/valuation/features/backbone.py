"""Features of a pretrained or random network from timm, torchvision or :data:`flsv.models.NETWORKS`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flsv.models.factory import build_network, import_timm
from flsv.utilities.declared import Count
from flsv.utilities.errors import ConfigurationError
from flsv.valuation.features.base import Features, head_inputs


class Backbone(Features):
    """Features of samples: the inputs of the classifier head of a network that the federation does not train.

    Pixel values are not changed, so normalize the data as the network's weights require. For a torchvision network,
    images with one channel are repeated to three channels; timm adapts a network's first layer instead.

    Args:
        name: name of the network, such as ``"resnet18.a1_in1k"`` or ``"torchvision:resnet18"``, see
            :func:`flsv.models.build_network`.
        pretrained: whether to load the library's weights, which are downloaded unless they are in the library's cache.
        weights: file of weights to load instead (``.pt``, ``.pth``, ``.safetensors``). It may lack the head's weights,
            or have them in another shape, since only the head's inputs are used. Without ``pretrained`` and ``weights``
            the weights are random; the features of a random network roughly preserve distances.
        image_size: side length in pixels to which images are resized, for networks that need larger images; None: they
            are not resized.
        seed: seed of random weights.
        options: further keyword arguments of the network.

    Raises:
        ConfigurationError: at construction: both ``pretrained`` and ``weights`` are given. At the first call: the
            network is unknown or does not accept the samples, or its weights are missing, do not fit, or cannot be
            downloaded.

    Example:
        >>> Backbone("lenet5")(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 84])
    """

    rules: ClassVar = ((lambda a: not a.pretrained or a.weights is None, "give pretrained or weights, not both."),)

    def __init__(
        self,
        name: str,
        pretrained: bool = False,
        weights: str | None = None,
        image_size: Count | None = None,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.pretrained = pretrained
        self.weights = weights
        self.image_size = image_size
        self.seed = seed
        self.options = options
        self._network: nn.Module | None = None

    def __call__(self, x: Tensor, module: nn.Module | None = None) -> Tensor:
        if self._network is None:
            self._network = self._build(tuple(x.shape[1:]))
        return head_inputs(self._network.to(x.device), x)

    def _build(self, shape: tuple[int, ...]) -> nn.Module:
        options = {**(self.options or {}), **({"pretrained": True} if self.pretrained else {})}
        prepare = _Prepare(3 if self.name.startswith("torchvision:") else None, self.image_size)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                network = build_network(self.name, 2, tuple(prepare(torch.zeros(1, *shape)).shape[1:]), **options)
        except OSError as error:
            raise ConfigurationError(
                f"{self!r}: no weights ({error}): give a file, Backbone(name, weights=...)."
            ) from error
        if self.weights is not None:
            _load(network, self.weights, repr(self))
        return nn.Sequential(prepare, network).eval().requires_grad_(False)


class _Prepare(nn.Module):
    """Preprocessing layer that repeats a single channel and resizes images."""

    def __init__(self, channels: int | None, size: int | None) -> None:
        super().__init__()
        self.channels, self.size = channels, size

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        if x.ndim == 4 and self.channels is not None and x.shape[1] == 1:
            x = x.expand(-1, self.channels, -1, -1)
        if x.ndim == 4 and self.size is not None:
            x = F.interpolate(x, size=(self.size, self.size), mode="bilinear", antialias=True)
        return x


def _load(network: nn.Module, path: str, name: str) -> None:
    """Load weights from the file ``path`` into the network."""
    timm = import_timm(name)
    if not Path(path).is_file():
        raise ConfigurationError(f"{name}: there is no file {Path(path).absolute()}.")
    try:
        given = timm.models.load_state_dict(path)
    except Exception as error:
        raise ConfigurationError(f"{name}: {path} holds no state_dict that can be read: {error}") from error
    mine = network.state_dict()
    fitting = {key: value for key, value in given.items() if key in mine and value.shape == mine[key].shape}
    *_, last = (layer for layer, module in network.named_modules() if isinstance(module, nn.Linear))
    missing = [key for key in mine if key not in fitting and not key.startswith(f"{last}.")]
    if missing:
        raise ConfigurationError(f"{name}: {path} does not fit: {missing[0]!r} is missing or of another shape.")
    network.load_state_dict(fitting, strict=False)
