"""head_name: finds a module's classifier head."""

from __future__ import annotations

from torch import nn

from flsv.utilities.errors import ConfigurationError


def head_name(module: nn.Module, given: str | None = None) -> str | None:
    """Return the name of a module's classifier head: ``given``, timm's, or the last ``nn.Linear``."""
    if given is None:
        return _default_head(module)
    layers = dict(module.named_modules())
    if given not in layers:
        linear = [n for n, layer in layers.items() if isinstance(layer, nn.Linear)]
        raise ConfigurationError(
            f"head={given!r} is not a layer of the module. Its linear layers: {linear}."
        )
    return given


def _default_head(module: nn.Module) -> str | None:
    names = {id(layer): name for name, layer in module.named_modules()}
    for layer in module.modules():
        get_classifier = getattr(layer, "get_classifier", None)
        if callable(get_classifier):
            head = get_classifier()
            if isinstance(head, nn.Linear) and id(head) in names:
                return names[id(head)]
    linear = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear)]
    return linear[-1] if linear else None
