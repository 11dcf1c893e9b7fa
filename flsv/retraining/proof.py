"""Check of the training of coalitions: two models that should be equal are compared.

Each way of training coalitions also trains the coalition of all clients, which must come to the model of the run
itself. This check needs no knowledge of the state that a module or a callback keeps, or of faults of its copies.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flsv._lightning.rounding import Rounding


def difference(
    model: Tensor,
    run: Tensor,
    start: Tensor,
    again: Callable[[bool], tuple[Tensor, Tensor] | None],
    rounding: Rounding,
) -> float | None:
    """Return the distance of a retrained model from the run's, relative to that from ``start``, the initial model.

    None if rounding explains it. If the distance is above a fixed tolerance, the effect of rounding is measured by two
    more trainings: ``again(True)`` from slightly changed weights, and ``again(False)`` from the same. Each
    returns its initial and final model. If the latter does not give the same model, the training depends on something
    other than its seed, and rounding does not explain the difference.
    """

    def nudged() -> Tensor | None:
        same, other = again(False), again(True)
        if same is None or other is None:
            return None
        off, way = (same[1] - model).double().norm(), (model - start).double().norm()
        return other[1] - other[0] if off <= max(rounding.run, rounding.steps) * way else None

    return rounding.apart(model, run, start, nudged)
