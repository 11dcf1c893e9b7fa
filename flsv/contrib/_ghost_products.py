"""Inner products of a vector with each sample's part of a batch's gradient, from the layers' own passes."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flsv.utilities.errors import ConfigurationError

#: Layers that are linear in their parameters, and whose output for a sample depends on this sample only.
LINEAR_LAYERS: tuple[type[nn.Module], ...] = (
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
    """Hooks that compute the inner product of a reference vector with each sample's part of a batch's gradient."""

    # With (dL/dy)_z the gradient of the batch's loss at a layer's output for sample z, and f(x_z; g) its output with
    # the reference g in place of its parameters, the layer adds <(dL/dy)_z, f(x_z; g)> to the product of sample z.

    def __init__(self, module: nn.Module, reference: Mapping[str, Tensor]) -> None:
        check_layers(module, set(reference))
        self.batch_size: int | None = None  # of the watched batch
        parameters = list(module.parameters())
        self._device = parameters[0].device if parameters else None
        self._products: list[Tensor] = []
        # Each watched layer, its name, and a copy of it with the reference's tensors as parameters.
        self._watched_layers = _layers_with_reference(module, reference)
        self._handles: list[RemovableHandle] = []

    def watch(self, batch_size: int) -> None:
        """Compute products for the next batch, which has ``batch_size`` samples."""
        self.batch_size = batch_size
        products = torch.zeros(batch_size, dtype=torch.float64, device=self._device)
        self._products.append(products)
        if self._handles:  # the hooks of the batch before
            return
        for layer, name, reference_layer in self._watched_layers:
            hook = partial(self._after_forward, name, reference_layer)
            self._handles.append(layer.register_forward_hook(hook, with_kwargs=True))

    def take(self) -> Tensor:
        """Return the products of all samples since the last call, float64 ``[N]``."""
        no_products = torch.empty(0, dtype=torch.float64, device=self._device)
        products = torch.cat([no_products, *self._products])
        self._products = []
        return products

    def remove(self) -> None:
        """Remove the hooks until the next :meth:`watch`."""
        self.batch_size = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _after_forward(
        self,
        name: str,
        reference_layer: nn.Module,
        layer: nn.Module,
        args: Any,
        kwargs: Any,
        output: Any,
    ) -> None:
        """Let the backward pass add what a layer contributes to the samples' products. torch calls this after each
        forward pass of the layer ``name``, with its arguments and its output. ``reference_layer`` is the layer with the
        reference as parameters.
        """
        if not torch.is_grad_enabled() or not output.requires_grad:
            return
        if self.batch_size == 0 or len(output) != self.batch_size:
            raise ConfigurationError(
                f"layer {name!r} gives {len(output)} rows for a batch of {self.batch_size} samples, so that rows "
                "cannot be assigned to samples. In-run values need layers whose first dimension is the batch."
            )
        with torch.no_grad():
            reference_output = reference_layer.forward(*args, **kwargs)
        add_products = partial(
            _add_products, products=self._products[-1], reference_output=reference_output
        )
        output.register_hook(add_products)  # is called with the gradient of the output


def _layers_with_reference(
    module: nn.Module,
    reference: Mapping[str, Tensor],
) -> list[tuple[nn.Module, str, nn.Module]]:
    reference_of_parameter = {}
    for name, parameter in module.named_parameters():
        if name in reference and parameter.requires_grad:
            reference_of_parameter[parameter] = reference[name]

    layers = []
    for layer_name, layer in module.named_modules():
        references = {}  # None for a parameter without a reference
        for own_name, own_parameter in layer._parameters.items():
            if own_parameter is not None:
                references[own_name] = reference_of_parameter.get(own_parameter)
        has_reference = any(tensor is not None for tensor in references.values())
        if has_reference:
            layers.append((layer, layer_name, _copy_with_reference(layer, references)))
    return layers


def _add_products(
    output_gradient: Tensor,
    *,
    products: Tensor,
    reference_output: Tensor,
) -> None:
    """Add each sample's product of both arguments ``[B, ...]`` to ``products [B]``."""
    flat_reference_output = reference_output.flatten(1)
    flat_gradient = output_gradient.detach().flatten(1).to(flat_reference_output.dtype)
    layer_products = torch.linalg.vecdot(flat_gradient, flat_reference_output)
    products.add_(layer_products.to(products))


def check_layers(module: nn.Module, names: set[str]) -> None:
    """Check that every layer separates the gradients of a batch's samples."""
    name_of_trained = {}
    for parameter_name, parameter in module.named_parameters():
        if parameter_name in names and parameter.requires_grad:
            name_of_trained[parameter] = parameter_name

    for layer_name, layer in module.named_modules():
        if isinstance(layer, _BATCH_NORM) and layer.training:
            raise ConfigurationError(
                f"layer {layer_name!r}, {type(layer).__name__}, mixes the samples of a batch: no gradient is one "
                "sample's. Use GroupNorm or LayerNorm, or keep it in evaluation mode."
            )
        reason = _unsupported_reason(layer)
        parameters = layer.parameters(recurse=False)
        trained_names = [name_of_trained[p] for p in parameters if p in name_of_trained]
        if reason is not None and trained_names:  # an unsupported layer may be frozen
            supported = ", ".join(layer_class.__name__ for layer_class in LINEAR_LAYERS)
            raise ConfigurationError(
                f"parameter {trained_names[0]!r} is {type(layer).__name__}'s, {reason}. In-run values "
                f"know {supported}. Use these, or freeze it (requires_grad = False)."
            )


def _unsupported_reason(layer: nn.Module) -> str | None:
    """Return why a layer has no per-sample products, or None."""
    if isinstance(layer, _BATCH_NORM):
        return None  # in evaluation mode: linear, with constant statistics
    if not isinstance(layer, LINEAR_LAYERS):
        return "for which there is no ghost product"
    if isinstance(layer, _INSTANCE_NORM) and layer.track_running_stats:
        return "whose track_running_stats=True changes buffers in every pass"
    if not isinstance(layer, nn.Embedding):
        return None  # any options are supported
    if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
        return "whose max_norm, scale_grad_by_freq or sparse gradients are not supported"
    return None


def _copy_with_reference(layer: nn.Module, reference: dict[str, Tensor | None]) -> nn.Module:
    """Copy a layer, with ``reference`` or zeros in place of its parameters."""
    new_parameters = {}
    for name, reference_tensor in reference.items():
        parameter: Any = layer._parameters[name]
        if reference_tensor is None:
            new_parameters[name] = torch.zeros_like(parameter)
        else:
            new_parameters[name] = reference_tensor.detach().to(parameter)
    padding_row = getattr(layer, "padding_idx", None)
    if isinstance(layer, nn.Embedding) and padding_row is not None:  # it has no gradient
        new_parameters["weight"] = new_parameters["weight"].clone()
        new_parameters["weight"][padding_row] = 0
    layer_copy: Any = copy(layer)
    layer_copy._parameters = {**layer._parameters, **new_parameters}
    return layer_copy
