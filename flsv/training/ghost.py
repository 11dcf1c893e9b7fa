"""Ghost dot products: the product of each sample's gradient with a fixed vector, without computing these gradients.

Wang et al., "Data Shapley in One Training Run", ICLR 2025. In the paper the fixed vector is the gradient of validation
samples that are part of the batch; here it is any vector g over the module's parameters. A layer with inputs x and
outputs y = f(x; theta) that is linear in its parameters theta adds to the product for sample z

    the sum over the sample's outputs of (dL/dy)_z f(x_z; g),

where L is the batch's loss. This takes one more forward pass of the layer, with g in place of theta, and one product
with the output gradient dL/dy, which the backward pass computes anyway. For a linear layer it is the paper's product of
activations and output gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flsv.utilities.errors import ConfigurationError

#: Layers that are linear in their parameters, and whose output for a sample depends on this sample only.
LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)
_BATCH_NORM = nn.modules.batchnorm._BatchNorm
_INSTANCE_NORM = nn.modules.instancenorm._InstanceNorm


class GhostProducts:
    """Hooks that compute each sample's inner product of a vector with its part of a batch's gradient."""

    def __init__(self, module: nn.Module, reference: Mapping[str, Tensor]) -> None:
        check_layers(module, set(reference))
        self._samples: int | None = None
        self._device = next((p.device for p in module.parameters()), None)
        self._products: list[Tensor] = []
        self._watched: list[tuple[nn.Module, str, nn.Module]] = []
        self._handles: list[RemovableHandle] = []
        by_parameter = {p: reference[name] for name, p in module.named_parameters() if name in reference}
        for name, layer in module.named_modules():
            own = layer._parameters
            if any(p in by_parameter and p.requires_grad for p in own.values() if p is not None):
                g = {
                    n: by_parameter[p] if p in by_parameter and p.requires_grad else None
                    for n, p in own.items()
                    if p is not None
                }
                self._watched.append((layer, name, _with(layer, own, g)))

    @property
    def samples(self) -> int | None:
        """Return the number of samples in the present batch, None if it is not measured."""
        return self._samples

    @samples.setter
    def samples(self, samples: int | None) -> None:
        self._samples = samples
        if samples is None:  # a hook that does nothing costs, too
            self.remove()
            return
        self._products.append(torch.zeros(samples, dtype=torch.float64, device=self._device))
        if not self._handles:
            self._handles = [
                layer.register_forward_hook(self._hook(name, twin), with_kwargs=True)
                for layer, name, twin in self._watched
            ]

    def take(self) -> Tensor:
        """Return the products of all samples since the last call, float64 ``[N]``."""
        products, self._products = self._products, []
        return torch.cat(products) if products else torch.empty(0, dtype=torch.float64, device=self._device)

    def remove(self) -> None:
        """Remove the hooks until :attr:`samples` is set again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _hook(self, name: str, twin: nn.Module) -> Callable[..., None]:
        """Return the forward hook for a layer, of which ``twin`` has the vector as parameters."""

        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            samples = self._samples
            if samples is None or not torch.is_grad_enabled() or not output.requires_grad:
                return
            if len(output) != samples or not samples:
                raise ConfigurationError(
                    f"layer {name!r} gives {len(output)} rows for a batch of {samples} samples, so that rows cannot be "
                    "assigned to samples. In-run values need layers whose first dimension is the batch."
                )
            products = self._products[-1]
            with torch.no_grad():
                ahead = twin.forward(*args, **kwargs)

            def add(gradient: Tensor) -> None:
                product = torch.linalg.vecdot(gradient.detach().flatten(1).to(ahead.dtype), ahead.flatten(1))
                products.add_(product.to(products))

            output.register_hook(add)

        return hook


def check_layers(module: nn.Module, names: set[str]) -> None:
    """Check that every layer separates the gradients of a batch's samples."""
    asked = {p: name for name, p in module.named_parameters() if name in names and p.requires_grad}
    for name, layer in module.named_modules():
        if isinstance(layer, _BATCH_NORM) and layer.training:
            raise ConfigurationError(
                f"layer {name!r}, {type(layer).__name__}, mixes the samples of a batch: no gradient is one sample's. "
                "Use GroupNorm or LayerNorm, or keep it in evaluation mode."
            )
        own = [p for p in layer.parameters(recurse=False) if p in asked]
        why = _why_not(layer) if own else None
        if why:
            raise ConfigurationError(
                f"parameter {asked[own[0]]!r} is {type(layer).__name__}'s, {why}. In-run values know "
                f"{', '.join(each.__name__ for each in LAYERS)}. Use these, or freeze it (requires_grad = False)."
            )


def _why_not(layer: nn.Module) -> str | None:
    """Return why a layer's samples have no products, as a relative clause, or None."""
    if isinstance(layer, _BATCH_NORM):
        return None  # in evaluation mode: linear, with constant statistics
    if not isinstance(layer, LAYERS):
        return "for which there is no ghost product"
    if isinstance(layer, nn.Embedding) and (layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse):
        return "whose max_norm, scale_grad_by_freq or sparse gradients are not known here"
    if isinstance(layer, _INSTANCE_NORM) and layer.track_running_stats:
        return "whose track_running_stats=True changes buffers in every pass"
    return None


def _with(layer: nn.Module, own: dict[str, Any], g: dict[str, Tensor | None]) -> nn.Module:
    """Copy a layer without its hooks, with the vector g as its parameters."""
    filled = {n: torch.zeros_like(own[n]) if value is None else value.detach().to(own[n]) for n, value in g.items()}
    padding = getattr(layer, "padding_idx", None)
    if isinstance(layer, nn.Embedding) and padding is not None:  # the padding row has no gradient
        filled["weight"] = filled["weight"].clone()
        filled["weight"][padding] = 0
    twin: Any = copy(layer)
    twin._parameters = {**layer._parameters, **filled}
    return twin
