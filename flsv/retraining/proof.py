"""Check of the training of coalitions: two models that should be equal are compared.

Each way of training coalitions also trains the coalition of all clients, which must come to the model of the run
itself. This check needs no knowledge of the state that a module or a callback keeps, or of faults of its copies.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flsv._lightning.rounding import Rounding


def difference(
    mine: Tensor, real: Tensor, start: Tensor, again: Callable[[bool], tuple[Tensor, Tensor] | None], rounding: Rounding
) -> float | None:
    """Return how far apart two models are that should be equal, relative to their training. None: rounding explains it.

    If they differ by more than a fixed tolerance, the effect of rounding is measured by two more trainings: one from
    nudged weights, and one that changes nothing. If the latter does not give the same model, the training depends on
    something other than its seed, and rounding does not explain the difference.
    """

    def nudged() -> Tensor | None:
        same, other = again(False), again(True)
        if same is None or other is None:
            return None
        off, way = (same[1] - mine).double().norm(), (mine - start).double().norm()
        return other[1] - other[0] if off <= max(rounding.run, rounding.steps) * way else None

    return rounding.apart(mine, real, start, nudged)
