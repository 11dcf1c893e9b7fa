"""find_head: the one rule for which layer of a module is its classifier head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import nn

from flsv.utilities.errors import ConfigurationError, listed


class FoundHead(NamedTuple):
    """Name of a module's classifier head, or None and the reason why there is none."""

    name: str | None
    problem: str = ""


def find_head(
    module: nn.Module,
    requested: str | None = None,
) -> FoundHead:
    """Find a module's classifier head: ``requested``, timm's, or the last linear layer, if it is trained.

    A layer is trained if its parameters require gradients and, in a fit, an optimizer holds them. There is no head if
    another trained layer has as many outputs and does not feed the last one, as in two networks.
    """
    if requested is not None:
        layers = dict(module.named_modules())
        if requested not in layers:
            raise ConfigurationError(
                f"head={requested!r} is not a layer of the module. Its linear layers: {[*_linear_layers(module)]}."
            )
        return FoundHead(requested)

    candidates = _candidates(module)
    if len(candidates) == 1:
        return FoundHead(candidates[0])
    if candidates:
        return FoundHead(
            None, f"each of its layers {listed(candidates, show=repr)} may be the head"
        )
    return FoundHead(None, "it has no nn.Linear layer that is trained")


def _candidates(module: nn.Module) -> list[str]:
    """Return the names of the layers that may be the head."""
    layers = _linear_layers(module)
    trained_layers = _trained_among(layers, module)
    timm_ids = _ids_of_timm_heads(module)
    timm_heads = [name for name, layer in trained_layers.items() if id(layer) in timm_ids]
    if timm_heads or not trained_layers:
        return timm_heads

    last_trained = list(trained_layers.values())[-1]
    candidates = []
    for name, layer in trained_layers.items():
        has_equal_outputs = layer.out_features == last_trained.out_features
        may_feed_last = layer.out_features == last_trained.in_features
        is_beside_last = has_equal_outputs and not may_feed_last
        if layer is last_trained or is_beside_last:
            candidates.append(name)
    # A frozen head has other outputs than the trained layers before it, unlike a teacher or a copy.
    last_name = list(layers)[-1]
    if layers[last_name].out_features != last_trained.out_features:
        candidates.append(last_name)
    return candidates


def _trained_among(layers: Mapping[str, nn.Linear], module: nn.Module) -> dict[str, nn.Linear]:
    trained_ids = _trained_ids(module)
    trained_layers = {}
    for name, layer in layers.items():
        if any(id(parameter) in trained_ids for parameter in layer.parameters()):
            trained_layers[name] = layer
    return trained_layers


def _trained_ids(module: nn.Module) -> set[int]:
    """Return the ids of parameters that the optimizers of a fit hold or, outside of a fit, that require gradients. Of a
    module that is not trained, return all.
    """
    all_ids = {id(parameter) for parameter in module.parameters()}
    ids = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
    trainer = getattr(module, "_trainer", None)  # of a LightningModule in a fit
    held_ids = set()
    for optimizer in getattr(trainer, "optimizers", ()):
        for group in optimizer.param_groups:
            held_ids |= {id(parameter) for parameter in group["params"]}
    return ids & held_ids or ids or all_ids


def _ids_of_timm_heads(module: nn.Module) -> set[int]:
    ids = set()
    inner_ids = set()  # of layers in a network that names its head
    for layer in module.modules():
        get_classifier = getattr(layer, "get_classifier", None)
        if id(layer) in inner_ids or not callable(get_classifier):
            continue
        try:
            ids.add(id(get_classifier()))
        except Exception:  # another package's method of this name may need arguments
            continue
        inner_ids |= {id(inner_layer) for inner_layer in layer.modules()}
    return ids


def _linear_layers(module: nn.Module) -> dict[str, nn.Linear]:
    layers = dict(module.named_modules())
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}
