"""RandomModels: models with random parameters, whose outputs tell what a module's outputs are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.games.output_metric import are_probabilities, beyond_probabilities
from flsv.games.vector_evaluator import Build

#: Number of models, and scales of their parameters.
_NUM_MODELS, _SCALE = 8, 3.0
_SMALL_SCALE, _LARGE_SCALE = 0.1 * _SCALE, 10 * _SCALE


class RandomModels:
    """Models of a module whose parameters are normal random numbers, on one batch.

    Args:
        load: returns a module in evaluation mode that holds model i of a :data:`Build`.
        space: the map between the module and vectors.
        vector: ``[P]``, a model whose buffers the models have.
        x: the inputs.
        context: function that returns a context manager for a forward pass.
    """

    def __init__(
        self,
        load: Callable[[Build, int], nn.Module],
        *,
        space: ParameterSpace,
        vector: Tensor,
        x: Any,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        self._load = load
        self._num_parameters = space.num_parameters
        self._vector = vector
        self._x = x
        self._context = context

    def outputs(self, scale: float = _SCALE) -> Iterator[Any]:
        """Yield each model's outputs. ``scale`` is the standard deviation of the parameters."""
        generator = torch.Generator().manual_seed(0)

        def write_random_model(_: int, out: Tensor) -> None:
            out.copy_(self._vector)
            parameters = scale * torch.randn(self._num_parameters, generator=generator)
            out[: self._num_parameters] = parameters.to(out)

        for index in range(_NUM_MODELS):
            module = self._load(write_random_model, index)
            with self._context():
                outputs = module(self._x)
            yield outputs

    def small_outputs(self) -> Iterator[Any]:
        """Yield the outputs of models with small parameters."""
        return self.outputs(_SMALL_SCALE)

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
