"""The proof that coalitions are trained as they would be alone: models that must be equal are compared.

Whatever trains coalitions also trains the coalition of all clients in the same way, and that must come to the model of
the run itself. Nothing need be known of what a module or a callback keeps, or of how a copy of it could be wrong.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

#: Largest distance between two models that must be equal, relative to the distance that they have moved; and as a
#: multiple of the distance that rounding causes, which a training from weights changed by the relative amount NUDGE
#: shows.
TOLERANCE, FACTOR, NUDGE = 1e-4, 3.0, 1e-6
#: Largest part of a start's length that counts as rounding.
ROUNDING = 1e-6


def difference(
    mine: Tensor, real: Tensor, start: Tensor, again: Callable[[bool], Tensor | None], allowed: float = 0.0
) -> float | None:
    """Return by how much two models that must be equal differ, as a share of the way that training has moved them;
    None: by no more than rounding.

    Training amplifies rounding: for a convolutional network with a large learning rate, to a fifth of the distance that
    the model moves. So where models differ the allowed difference is measured, by two more trainings: one from weights
    that are changed by a millionth, and one that changes nothing and must come to the same model; if it does not,
    something else than rounding moves it.

    Args:
        mine: ``[P]``, a model that is to be checked.
        real: ``[P]``, the model that it must equal.
        start: ``[P]``, the model that both started from.
        again: a function that trains ``mine`` once more, for ``True`` from weights that are changed by a millionth, and
            returns the model ``[P]``; None: that failed.
        allowed: the share of the way that the precision allows, see :func:`flsv._lightning.evaluation.share_of_way`.

    Example:
        >>> import torch
        >>> start, real = torch.zeros(2), torch.tensor([3.0, 4.0])
        >>> difference(real + 1e-5, real, start, lambda _: None), difference(real + 1, real, start, lambda _: None)
        (None, 0.282842...)
    """
    mine, real, start = mine.double(), real.double(), start.double()
    way = (real - start).norm()
    apart = (mine - real).norm()
    if not real.isfinite().all():
        return None if mine.isfinite().equal(real.isfinite()) else 1.0
    share, enough = float(apart / way.clamp(min=1e-12)), max(TOLERANCE, allowed)
    if share <= enough or apart <= ROUNDING * start.norm():
        return None
    same, nudged = again(False), again(True)
    if same is None or nudged is None or not (mine - same.double()).norm() <= enough * way:
        return share
    return None if float(apart) <= FACTOR * float((mine - nudged.double()).norm()) else share
