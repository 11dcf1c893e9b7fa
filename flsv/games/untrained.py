"""Untrained models with random initial weights, which show how much scores depend on the initial weights."""

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
    """Return a function ``build(i, out)`` that writes the i-th of several untrained models into ``out [P]``.

    The weights of each layer with the method ``reset_parameters``, which torch's layers have, are drawn anew, unless
    they are frozen or start at zero, as those of adapters do; all other weights are those of ``initial``.

    Args:
        module: the module, which is restored.
        initial: the module's ``state_dict`` before the first round.
        space: the map between the module and its vectors ``[P]``.
        seed: the run's seed.

    Returns:
        The function, or None if there is no such layer.

    Example:
        >>> import torch
        >>> net = nn.Linear(1, 1)
        >>> build = untrained_models(net, net.state_dict(), ParameterSpace(net), seed=0)
        >>> first, second = torch.empty(2), torch.empty(2)
        >>> build(0, first), build(1, second), torch.equal(first, second)
        (None, None, False)
    """
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
            own = dict(layer.named_parameters(name))
            start = [initial[each] for each in own if each in initial]
            if frozen.isdisjoint(map(id, own.values())) and (not start or any(each.any() for each in start)):
                found.append(layer)
    return found
