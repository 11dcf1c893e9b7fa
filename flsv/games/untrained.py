"""Untrained models, which show how much scores depend on the initial weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.games.lent_module import lent
from flsv.utilities.seeding import isolated_rngs

#: The number of untrained models that are evaluated.
UNTRAINED = 8


def untrained_models(
    module: nn.Module, initial: Mapping[str, Any], space: ParameterSpace, seed: int
) -> Callable[[int, Tensor], None] | None:
    """Return a function that writes the i-th untrained model into ``out [P]``, or None if no layer can be drawn."""
    if not (layers := _drawn(module, initial, space)):
        return None

    def build(index: int, out: Tensor) -> None:
        with lent(module, space), isolated_rngs(seed, "untrained", index):
            module.load_state_dict(initial, strict=False)  # training may have registered buffers
            for layer in layers:
                layer.reset_parameters()
            space.read(module, out=out)

    return build


def _drawn(module: nn.Module, initial: Mapping[str, Any], space: ParameterSpace) -> list[Any]:
    """List the layers whose weights are drawn anew."""
    frozen, found = {id(each) for each in space.constants(module).values()}, []
    for name, layer in module.named_modules():
        if callable(getattr(layer, "reset_parameters", None)):
            # Adapters start at zero, and must stay there.
            own = dict(layer.named_parameters(name))
            start = [initial[each] for each in own if each in initial]
            if frozen.isdisjoint(map(id, own.values())) and (not start or any(each.any() for each in start)):
                found.append(layer)
    return found
