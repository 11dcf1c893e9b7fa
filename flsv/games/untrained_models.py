"""Untrained models with other initial weights, which show how much scores depend on these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.games.module_copies import ModuleCopies
from flsv.utilities.seeding import isolated_rngs

#: The number of untrained models that are evaluated.
NUM_UNTRAINED_MODELS = 8


def untrained_models(
    module: nn.Module, space: ParameterSpace, seed: int
) -> Callable[[int, Tensor], None] | None:
    """Return a function ``build(i, out)`` that draws the i-th model with random initial weights and writes it into
    ``out [P]``. None if no layer of the untrained ``module`` has weights that can be drawn.
    """
    module_copy = ModuleCopies(module, space).load()
    layers = _drawable_layers(module_copy, space)
    if not layers:
        return None

    def write_model(index: int, out: Tensor) -> None:
        with isolated_rngs(seed, "untrained", index):
            for layer in layers:
                layer.reset_parameters()
            space.read(module_copy, out=out)

    return write_model


def _drawable_layers(module: nn.Module, space: ParameterSpace) -> list[Any]:
    """List the layers whose weights can be drawn again by ``reset_parameters``."""
    frozen_ids = {id(tensor) for tensor in space.constants(module).values()}
    layers = []
    for layer in module.modules():
        if not callable(getattr(layer, "reset_parameters", None)):
            continue
        parameters = list(layer.parameters())
        has_frozen = any(id(parameter) in frozen_ids for parameter in parameters)
        # The initial weights of an adapter must be zero.
        is_adapter = len(parameters) > 0 and not any(parameter.any() for parameter in parameters)
        if not has_frozen and not is_adapter:
            layers.append(layer)
    return layers
