"""Allocation of a budget to clients in proportion to their contributions.

Contributions are in a metric's own unit, may be negative, and are NaN for clients that took part in no round. A payment
cannot be negative, so the caller has to choose a rule for negative values.
"""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from flsv.functional.joint_shares import proportions
from flsv.utilities.choices import Negatives as Negatives
from flsv.utilities.declared import NonNegative, Positive, checked
from flsv.utilities.errors import ConfigurationError

#: Binary digits of a float64: whole numbers are exact below 2 to this power.
MANTISSA_BITS = 53
#: Relative error of a float64 that was rounded twice.
TWO_ROUNDING_ERRORS = 4e-16


@checked
def allocate(
    values: Tensor,
    budget: NonNegative,
    negatives: Negatives = "zero",
    unit: Positive | None = None,
) -> Tensor:
    """Divide a budget among clients in proportion to their contributions.

    Args:
        values: the clients' contributions, ``[n]``, larger is better. NaN for clients without a value, which get
            nothing.
        budget: the amount to divide, such as 10000.0 euros. At least 0.
        negatives: the rule for negative values. ``"zero"``: a client with a negative value gets nothing, and the others
            share as if it did not exist. ``"shift"``: if the lowest value is negative, it is subtracted from all
            values. Its client gets nothing, and the others' shares become more equal. ``"softmax"``: client i has the
            share ``exp(v_i / s)``, divided by the sum of these numbers, with v the values and s their standard
            deviation, so that every client gets something (the form of ShapleyFL's weights, Sun et al., KDD 2023).
            ``"refuse"``: a negative value is an error.
        unit: the smallest amount, such as 0.01 for cents: amounts are whole multiples of it, rounded by Hamilton's
            method (largest remainders; of equal remainders, the first client's). None: amounts are not rounded.

    Returns:
        The amounts, float64 ``[n]``, each at least 0. With a unit they sum to the budget exactly. Without, as closely
        as float64 can (``math.fsum`` differs from the budget by rounding of the last place only).

    Raises:
        ConfigurationError: the rule is unknown, the budget is below 0, not a multiple of the unit, or 2^53 units or
            more, ``values`` is empty or not a vector, a value is infinite, the rule gives no client anything (such as
            ``"zero"`` if no value is above 0), or a value is below 0 with ``"refuse"``.

    Example:
        >>> allocate(torch.tensor([3.0, 1.0, -1.0, float("nan")]), 100.0)
        tensor([75., 25.,  0.,  0.], dtype=torch.float64)
        >>> allocate(torch.tensor([1.0, 1.0, 1.0]), 100.0, unit=0.01)
        tensor([33.3400, 33.3300, 33.3300], dtype=torch.float64)
    """
    values = _checked_values(values, negatives)
    if unit is None:
        shares = _shares_of_budget(values, negatives)
        amounts = _adjust_to_sum([share * budget for share in shares], budget)
    else:
        num_units = _whole_units(budget, unit)
        shares = _shares_of_budget(values, negatives)
        counts = largest_remainder(shares, num_units)
        amounts = [_exact_product(count, unit) for count in counts]
    return torch.tensor(amounts, dtype=torch.float64)


def _shares_of_budget(values: Tensor, negatives: Negatives) -> list[float]:
    has_value = ~values.isnan()
    claims = torch.zeros_like(values)
    claims[has_value] = proportions(_scaled_by_power_of_two(values[has_value]), negatives)
    total = math.fsum(claims.tolist())
    if not total > 0:
        raise ConfigurationError(
            f"allocate: no client gets a share of the budget by the values {_preview(values)} with "
            f'negatives={negatives!r}. Set negatives="shift" or "softmax", which give shares to negative values, too, '
            "unless all are equal."
        )
    return [claim / total for claim in claims.tolist()]


def _whole_units(budget: float, unit: float) -> int:
    """Return the budget in units. Raise ConfigurationError unless this is exact in float64."""
    quotient = budget / unit
    if quotient >= 2**MANTISSA_BITS:
        raise ConfigurationError(
            f"allocate(budget={budget:.6g}, unit={unit:.6g}): the budget has {quotient:.3g} units, but float64 is "
            f"exact only below 2^{MANTISSA_BITS} (9e15). Set a larger unit, or unit=None."
        )
    num_units = round(quotient)
    multiple = _exact_product(num_units, unit)
    tolerance = unit * 1e-6
    if not math.isclose(multiple, budget, rel_tol=TWO_ROUNDING_ERRORS, abs_tol=tolerance):
        raise ConfigurationError(
            f"allocate(budget={budget}, unit={unit}): the budget must be a multiple of the unit."
        )
    return num_units


def _exact_product(count: int, unit: float) -> float:
    """Multiply in decimal arithmetic, since 7 * 0.01 in float64 is above 0.07."""
    exact_unit = Decimal(str(unit))
    return float(count * exact_unit)


def largest_remainder(
    shares: list[float],
    units: int,
) -> list[int]:
    """Round shares to whole numbers that sum to ``units`` (Hamilton's method)."""
    parts = [Fraction(share) for share in shares]
    total = sum(parts)
    exact_counts = [part * units / total for part in parts]
    counts = [math.floor(exact_count) for exact_count in exact_counts]
    remainders = [exact - math.floor(exact) for exact in exact_counts]
    units_left = units - sum(counts)

    # Equal remainders stay in the order of the clients. Clients with a share of 0 get nothing.
    claimants = [client for client, share in enumerate(shares) if share > 0]
    claimants.sort(key=lambda client: -remainders[client])
    for position in range(units_left):
        client = claimants[position % len(claimants)]
        counts[client] += 1
    return counts


def _scaled_by_power_of_two(values: Tensor) -> Tensor:
    """Multiply values by the power of two that brings the largest magnitude into [0.5, 1)."""
    if len(values) == 0:
        return values
    # Scaling by a power of two does not round.
    largest = float(values.abs().max())
    _, exponent = math.frexp(largest)
    scaled = np.ldexp(values.numpy(), -exponent)
    return torch.from_numpy(scaled)


def _adjust_to_sum(
    amounts: list[float],
    budget: float,
) -> list[float]:
    """Change the largest amount in place so that the amounts sum to the budget."""
    largest = amounts.index(max(amounts))
    other_amounts = amounts[:largest] + amounts[largest + 1 :]
    amounts[largest] = max(0.0, budget - math.fsum(other_amounts))
    return amounts


def _checked_values(values: Tensor, negatives: Negatives) -> Tensor:
    values = torch.as_tensor(values).detach()
    values = values.cpu().double()
    if values.ndim != 1 or not len(values):
        raise ConfigurationError(
            f"allocate: expected one value per client, [n], but got shape {list(values.shape)}. Convert values per "
            "class by the metric's per_client(values)."
        )
    if values.isinf().any():
        raise ConfigurationError(
            f"allocate: expected finite values, but got {_preview(values)}. Remove infinite values."
        )
    if negatives == "refuse" and (values < 0).any():
        negative_clients = (values < 0).nonzero().flatten().tolist()
        raise ConfigurationError(
            f'allocate(negatives="refuse"): clients {negative_clients} have values below 0. Choose a rule for them: '
            'negatives="zero", "shift" or "softmax".'
        )
    return values


def _preview(values: Tensor) -> str:
    """Format up to six values for an error message."""
    texts = [f"{value:.4g}" for value in values[:6].tolist()]
    if len(values) > 6:
        texts.append("...")
    return f"[{', '.join(texts)}]"
