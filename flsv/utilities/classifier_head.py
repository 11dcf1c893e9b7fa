"""head_name: finds a module's classifier head."""

from __future__ import annotations

from torch import nn

from flsv.utilities.errors import ConfigurationError


def head_name(
    module: nn.Module,
    requested: str | None = None,
) -> str | None:
    """Return the name of a module's classifier head: ``requested``, timm's, or the last linear layer."""
    if requested is None:
        return _default_head(module)
    layers = dict(module.named_modules())
    if requested not in layers:
        raise ConfigurationError(
            f"head={requested!r} is not a layer of the module. Its linear layers: {_linear_layers(module)}."
        )
    return requested


def _default_head(module: nn.Module) -> str | None:
    name_by_id = {}
    for name, layer in module.named_modules():
        name_by_id[id(layer)] = name
    for layer in module.modules():
        get_classifier = getattr(layer, "get_classifier", None)
        if not callable(get_classifier):
            continue
        try:
            head = get_classifier()
        except Exception:  # another package's method of this name may need arguments
            continue
        if isinstance(head, nn.Linear) and id(head) in name_by_id:
            return name_by_id[id(head)]

    linear_layers = _linear_layers(module)
    if not linear_layers:
        return None
    return linear_layers[-1]


def _linear_layers(module: nn.Module) -> list[str]:
    layers = dict(module.named_modules())
    return [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
