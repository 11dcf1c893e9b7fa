"""ShapleyFL's normalized Shapley values (NSV), and the inclusion probabilities of AFedSV+."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.utilities.declared import Positive, checked
from flsv.utilities.errors import ConfigurationError

Normalization = Literal["min-max", "positive"]
#: Rounding error of a value in machine epsilons, relative to the largest value.
ROUNDING_EPSILONS = 8


@checked
def normalize_shapley(values: Tensor, how: Normalization = "min-max") -> Tensor:
    """Normalize Shapley values over the players to numbers in [0, 1].

    ``"min-max"`` is ShapleyFL's normalization (definition 4.2, eq. 2, and eq. 12) of the Shapley values SV_i:

        NSV_i = (SV_i - min SV) / (max SV - min SV).

    It does not keep zero at zero: a player that contributes nothing gets more than players with negative values.
    ``"positive"`` gives 0 both to a player that contributes nothing and to a harmful one:

        NSV_i = max(SV_i, 0) / max(0, max SV).

    If all values are equal, the paper leaves NSV undefined and its code divides 0 by 0. Here ``"min-max"`` gives every
    player 0.5, the initial value of the paper's surrogate Shapley values. Values count as equal if their spread is at
    most 8 machine epsilons of their dtype times the largest absolute value.

    Args:
        values: Shapley values, ``[n]``, or ``[n, M]`` to normalize each column separately. NaN for players without a
            value, which are excluded and stay NaN.
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
    _check_no_infinity(values)
    if len(values) == 0:
        return values
    if not values.dtype.is_floating_point:
        values = values.to(torch.float32)

    is_valid = ~values.isnan()
    lowest = values.where(is_valid, torch.inf).amin(0, keepdim=True)
    highest = values.where(is_valid, -torch.inf).amax(0, keepdim=True)
    magnitude = torch.maximum(lowest.abs(), highest.abs())
    epsilon = torch.finfo(values.dtype).eps
    rounding_error = ROUNDING_EPSILONS * epsilon * magnitude

    if how == "positive":
        # The value of a player that contributes nothing is a sum of rounding errors.
        positive_values = torch.where(values > rounding_error, values, 0.0)
        largest_value = torch.where(highest > 0, highest, 1)
        return torch.where(is_valid, positive_values / largest_value, torch.nan)

    spread = highest - lowest  # -inf where no player has a value
    has_spread = spread > rounding_error
    divisor = torch.where(has_spread, spread, 1)
    normalized = (values - lowest) / divisor
    is_equal_to_all = is_valid & ~has_spread
    return torch.where(is_equal_to_all, 0.5, normalized)


def _check_no_infinity(values: Tensor) -> None:
    is_infinite = torch.isinf(values)
    if is_infinite.any():
        has_infinity = is_infinite.reshape(len(values), -1).any(dim=1)
        players = has_infinity.nonzero().flatten().tolist()
        raise ValueError(
            f"the Shapley values of players {players} are infinite, so they cannot be normalized."
        )


@checked
def importance_probabilities(weights: Tensor, expected_cohort: Positive) -> Tensor:
    """Compute the inclusion probabilities that minimize the variance of the Horvitz-Thompson aggregate.

        min_p sum_i w_i^2 / p_i    subject to  sum_i p_i = m,  0 <= p_i <= 1           (eq. 8)

    with w_i the weight and p_i the probability of client i, and m the expected number of clients. The l clients with
    the largest weights get probability 1, each other client i gets (m - l) w_i / (the sum of the other clients'
    weights) (eq. 9).

    The paper compares the objectives of all l in 0..m-1 whose probabilities are in [0, 1] (the theorem's text omits
    this condition, its proof in appendix C.1 has it), and takes the l with the smallest objective. This is always the
    smallest such l (the Karush-Kuhn-Tucker point), which is taken here, for any real m. Clients of equal weight get
    equal probabilities. Clients of weight 0 get probability 0, unless fewer than m clients have a positive weight. Then
    they share the rest of m equally.

    Args:
        weights: the clients' aggregation weights, ``[n]``, not negative and finite. Their scale does not matter.
        expected_cohort: m, the expected number of clients per round, in (0, n].

    Returns:
        Inclusion probabilities ``[n]`` in [0, 1], summing to m, in the dtype of ``weights`` (float32 for integers).

    Raises:
        ConfigurationError: ``expected_cohort`` is outside (0, n].
        ValueError: a weight is negative, NaN or infinite, or the weights are not a vector.

    Example:
        >>> importance_probabilities(torch.tensor([6.0, 1.0, 1.0, 2.0]), 2)
        tensor([1.0000, 0.2500, 0.2500, 0.5000])
    """
    _check_weights(weights, expected_cohort)
    w = weights.to(torch.float64)
    tiny = torch.finfo(torch.float64).tiny
    w = w / w.max().clamp_min(tiny)
    descending, order = w.sort(descending=True, stable=True)
    probabilities = torch.empty_like(w)
    probabilities[order] = _descending_probabilities(descending, expected_cohort)
    dtype = weights.dtype if weights.dtype.is_floating_point else torch.float32
    return probabilities.to(weights.device, dtype)


def _descending_probabilities(weights: Tensor, expected_cohort: float) -> Tensor:
    # The l clients with the largest weights are drawn with certainty, the others (the tail) in proportion to their
    # weights. This is feasible if the largest probability in the tail is at most 1. All l from 0 to n - 1 are tried.
    num_clients = len(weights)
    num_certain = torch.arange(num_clients, device=weights.device).to(torch.float64)
    tail_sums = weights.flip(0).cumsum(0).flip(0)
    equal_shares = 1 / (num_clients - num_certain)
    largest_shares = torch.where(tail_sums > 0, weights / tail_sums, equal_shares)
    tail_cohorts = expected_cohort - num_certain
    is_feasible = tail_cohorts * largest_shares <= 1 + 1e-12

    probabilities = torch.ones_like(weights)
    if is_feasible.any():
        smallest = int(is_feasible.int().argmax())  # the smallest feasible l
        tail_cohort = tail_cohorts[smallest].clamp_min(0)
        tail = weights[smallest:]
        tail_sum = tail_sums[smallest]
        equal_share = 1 / len(tail)
        tail_shares = torch.where(tail_sum > 0, tail / tail_sum, equal_share)
        probabilities[smallest:] = tail_cohort * tail_shares
    return probabilities.clamp_max(1)


def _check_weights(weights: Tensor, expected_cohort: float) -> None:
    if weights.ndim != 1:
        raise ValueError(
            f"importance_probabilities: expected weights [n], but got shape {tuple(weights.shape)}."
        )
    if expected_cohort > len(weights):
        raise ConfigurationError(
            f"importance_probabilities(expected_cohort={expected_cohort}) is above the number of clients, "
            f"{len(weights)}. Lower expected_cohort."
        )
    is_invalid = ~torch.isfinite(weights) | (weights < 0)
    invalid_clients = is_invalid.nonzero().flatten().tolist()
    if invalid_clients:
        raise ValueError(
            f"importance_probabilities: the weights of clients {invalid_clients} are negative, NaN or infinite."
        )
