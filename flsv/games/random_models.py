"""RandomModels: models with random parameters, whose outputs tell what a module's outputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from flsv.games.output_metric import are_probabilities, beyond_probabilities
from flsv.games.vector_evaluator import Build

#: Number of models, and standard deviations of their parameters.
_NUM_MODELS = 8
_SCALE = 3.0
SMALL_SCALE = 0.1 * _SCALE
_LARGE_SCALE = 10 * _SCALE


@dataclass(frozen=True, eq=False)
class RandomModels:
    """Models of a module whose parameters are normal random numbers, on one batch.

    Args:
        load: returns a module in evaluation mode that holds model i of a :data:`Build`.
        num_parameters: number of parameters at the beginning of a model's vector, before the buffers.
        vector: ``[P]``, a model whose buffers the models have.
        x: the inputs.
        context: function that returns a context manager for a forward pass.
    """

    load: Callable[[Build, int], nn.Module]
    num_parameters: int
    vector: Tensor
    x: Any
    context: Callable[[], AbstractContextManager[Any]]

    def outputs(self, scale: float = _SCALE) -> Iterator[Any]:
        """Yield each model's outputs. ``scale`` is the standard deviation of the parameters."""
        generator = torch.Generator().manual_seed(0)

        def write_random_model(_: int, out: Tensor) -> None:
            out.copy_(self.vector)
            parameters = scale * torch.randn(self.num_parameters, generator=generator)
            out[: self.num_parameters] = parameters.to(out)

        for index in range(_NUM_MODELS):
            module = self.load(write_random_model, index)
            with self.context():
                outputs = module(self.x)
            yield outputs

    def give_probabilities(self) -> bool:
        """Return whether all models' outputs are probabilities."""
        return all(map(are_probabilities, self.outputs()))

    def give_logits(self) -> bool:
        """Return whether an output is outside [0, 1]."""
        return any(map(beyond_probabilities, self.outputs()))

    def have_bound(self) -> bool:
        """Return whether no output passes some bound, however large the parameters are."""
        lowest, highest = self._range_of_outputs(_SCALE)
        lowest_of_larger, highest_of_larger = self._range_of_outputs(_LARGE_SCALE)
        if _is_below(lowest, lowest_of_larger):
            return True
        return _is_below(-highest, -highest_of_larger)

    def _range_of_outputs(self, scale: float) -> tuple[float, float]:
        """Return the lowest and the highest output."""
        lowest = inf
        highest = -inf
        for outputs in self.outputs(scale):
            numbers = outputs[~outputs.isnan()]
            if len(numbers):
                lowest = min(lowest, float(numbers.min()))
                highest = max(highest, float(numbers.max()))
        return lowest, highest


def _is_below(bound: float, other_bound: float) -> bool:
    """Return whether ``bound`` is finite and below ``other_bound``, up to rounding."""
    rounding = 1e-3 * (1 + abs(bound))
    return isfinite(bound) and bound - rounding <= other_bound
