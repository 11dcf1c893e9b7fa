"""The proof that coalitions are trained as they would be alone: models that must be equal are compared.

Whatever trains coalitions also trains the coalition of all clients in the same way, and that must come to the model of
the run itself. Nothing need be known of what a module or a callback keeps, or of how a copy of it could be wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flsv._lightning.rounding import Rounding


def difference(
    mine: Tensor, real: Tensor, start: Tensor, again: Callable[[bool], tuple[Tensor, Tensor] | None], rounding: Rounding
) -> float | None:
    """Return by how much two models that must be equal differ, as a share of the way that training has moved them;
    None: by no more than rounding.

    What rounding causes is measured by two more trainings: one from nudged weights, and one that changes nothing and
    must come to the same model; if it does not, something else than rounding moves it.

    Args:
        mine: ``[P]``, a model that is to be checked.
        real: ``[P]``, the model that it must equal.
        start: ``[P]``, the model that both started from.
        again: a function that trains ``mine`` once more, for ``True`` from nudged weights, and returns the model
            ``[P]`` before training and the trained one; None: that failed.
        rounding: the tolerances of the arithmetic in which the models were trained.
    """

    def nudged() -> Tensor | None:
        same, other = again(False), again(True)
        if same is None or other is None:
            return None
        off, way = (same[1] - mine).double().norm(), (mine - start).double().norm()
        return other[1] - other[0] if off <= max(rounding.run, rounding.steps) * way else None

    return rounding.apart(mine, real, start, nudged)
