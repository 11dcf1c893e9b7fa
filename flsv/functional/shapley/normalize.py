"""Normalized Shapley values (NSV) of a round's cohort: ShapleyFL's min-max form, and a form that keeps zero at zero."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.utilities.declared import checked

Normalization = Literal["min-max", "positive"]


@checked
def normalize_shapley(values: Tensor, how: Normalization = "min-max") -> Tensor:
    """Normalize Shapley values over the players to numbers in [0, 1].

    ``"min-max"`` is ShapleyFL's normalization (definition 4.2, eq. 2, and eq. 12) of the Shapley values SV_i:

        NSV_i = (SV_i - min SV) / (max SV - min SV).

    It does not keep zero at zero: a player that contributes nothing gets more than players with negative values.
    ``"positive"`` gives 0 both to a player that contributes nothing and to one that does harm:

        NSV_i = max(SV_i, 0) / max(0, max SV).

    If all values are equal, the paper leaves NSV undefined and its code divides 0 by 0. Here ``"min-max"`` gives every
    player 0.5, the initial value of the paper's surrogate Shapley values. Values count as equal if their spread is at
    most 8 machine epsilons of their dtype times the largest absolute value.

    Args:
        values: Shapley values, ``[n]``, or ``[n, M]`` to normalize each column by itself. NaN marks players without a
            value. They are left out and stay NaN.
        how: the normalization, ``"min-max"`` or ``"positive"``.

    Returns:
        The normalized values, of the same shape. With ``"min-max"`` they are 0.5 if all values are equal or there is
        only one. With ``"positive"`` they are 0 if no value is above 0.

    Raises:
        ConfigurationError: ``how`` is unknown.
        ValueError: a value is infinite.

    Example:
        >>> normalize_shapley(torch.tensor([1.0, 3.0, float("nan"), 2.0]))
        tensor([0.0000, 1.0000,    nan, 0.5000])
        >>> normalize_shapley(torch.tensor([0.2, 0.2]))
        tensor([0.5000, 0.5000])
        >>> normalize_shapley(torch.tensor([-0.2, 0.0, 0.1, 0.2]), "positive")
        tensor([0.0000, 0.0000, 0.5000, 1.0000])
    """
    if bool(torch.isinf(values).any()):
        players = torch.isinf(values).reshape(len(values), -1).any(dim=1).nonzero().flatten().tolist()
        raise ValueError(f"the Shapley values of players {players} are infinite; they cannot be normalized.")
    if len(values) == 0:
        return values
    values = values if values.dtype.is_floating_point else values.to(torch.float32)
    known = ~values.isnan()
    lowest = torch.where(known, values, torch.inf).amin(dim=0, keepdim=True)
    highest = torch.where(known, values, -torch.inf).amax(dim=0, keepdim=True)
    rounding = 8 * torch.finfo(values.dtype).eps * torch.maximum(lowest.abs(), highest.abs())
    if how == "positive":
        # The value of a player that contributes nothing is a sum of rounding errors.
        gains = torch.where(values > rounding, values, 0.0) / torch.where(highest > 0, highest, 1)
        return torch.where(known, gains, torch.nan)
    spread = highest - lowest
    equal = ~(spread > rounding)
    normalized = (values - lowest) / torch.where(equal, 1, spread)
    return torch.where(equal & known, 0.5, normalized)
