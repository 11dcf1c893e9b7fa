"""Intervals of shares, from joint draws of all values.

A client's share depends on all values: if one value is larger than measured, all other shares are smaller. So all
values are drawn jointly, each draw is converted to shares by the rule of the payment, and a share's interval reaches
from the 5th to the 95th percentile of its draws. The shares of a draw sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Generator, Tensor

from flsv.utilities.choices import Negatives
from flsv.utilities.display import INTERVAL_LEVEL

#: Number of joint draws, with which the ends of an interval vary by a fiftieth of its width.
NUM_DRAWS = 10_000
#: Probabilities of a draw below each end of an interval.
INTERVAL_ENDS = ((1 - INTERVAL_LEVEL) / 2, (1 + INTERVAL_LEVEL) / 2)


@dataclass(frozen=True, eq=False)
class ValueErrors:
    """Errors of n values from one source, such as the seeds, with a covariance between the values.

    Args:
        covariance: ``[n, n]``.
        freedom: the degrees of freedom with which the covariance was estimated. The errors are then distributed as
            Student's t. None: the normal distribution.
    """

    covariance: Tensor
    freedom: int | None = None


@dataclass(frozen=True, eq=False)
class JointShares:
    """Shares of the values' joint draws.

    Attributes:
        low: float64 ``[n]``, the lower ends of the shares' intervals. NaN for a client without a value, and for all if
            the values give no client a share or a covariance is not known.
        high: float64 ``[n]``, the upper ends.
        moved: the mean fraction of a payment that a draw gives to other clients than the values themselves do.
        without_gain: the fraction of the draws in which the values sum to 0 or less.
    """

    low: Tensor
    high: Tensor
    moved: float
    without_gain: float


@dataclass(frozen=True, eq=False)
class CaseValues:
    """Values of clients on parts of the validation samples, which show how much they depend on the samples.

    Args:
        values: float64 ``[n, V]``, the values on each of V samples, or on each of V resamples.
        strata: as in :func:`covariance_over_cases`.
        is_resampled: whether the parts are samples of the validation samples, drawn with replacement (a bootstrap).
    """

    values: Tensor
    strata: Tensor | None = None
    is_resampled: bool = False

    def covariance(self) -> Tensor:
        """Compute the covariance ``[n, n]`` of the values between draws of validation samples."""
        if self.is_resampled:
            return torch.atleast_2d(torch.cov(self.values))
        return covariance_over_cases(self.values.T, strata=self.strata)


def covariance_over_cases(case_values: Tensor, strata: Tensor | None = None) -> Tensor:
    r"""Compute the covariance of values between draws of as many validation samples.

    If a model's performance is a mean over V samples, each sample x has its own Shapley values :math:`\phi_i(x)`, and a
    client's value is their mean. Its standard error is their standard deviation divided by the root of V.

    Args:
        case_values: ``[V, n]``, each sample's values.
        strata: int64 ``[V]``, parts of the samples with fixed sizes. None: only the number of samples is fixed.

    Returns:
        float64 ``[n, n]``. NaN if there are fewer than two samples.

    Example:
        >>> covariance_over_cases(torch.tensor([[1.0], [3.0]]))
        tensor([[1.]], dtype=torch.float64)
    """
    centered = case_values.double()
    num_samples, num_clients = centered.shape
    if strata is None:
        strata = torch.zeros(num_samples, dtype=torch.int64)
    for stratum in strata.unique():
        is_member = strata == stratum
        mean = centered[is_member].mean(0)
        centered = torch.where(is_member[:, None], centered - mean, centered)

    if num_samples < 2:
        return torch.full((num_clients, num_clients), math.nan, dtype=torch.float64)
    correction = num_samples / (num_samples - 1)
    corrected = correction * centered.T  # [n, V]
    return corrected @ centered / num_samples**2


def draw_values(
    values: Tensor,
    errors: Sequence[ValueErrors],
    draws: int = NUM_DRAWS,
) -> Tensor:
    """Draw values jointly: the values ``[n]`` plus an error from each source, float64 ``[draws, n]``.

    The errors of different sources are independent.
    """
    generator = Generator().manual_seed(0)
    value_draws = values.double().expand(draws, -1)
    for source in errors:
        normal = _normal_numbers(draws, len(values), generator)
        noise = normal @ _symmetric_root(source.covariance.double())
        if source.freedom is not None:
            # Student's t: normal noise over the root of a chi-squared number, divided by its degrees of freedom.
            squares = _normal_numbers(draws, source.freedom, generator).square()
            chi_squared = squares.sum(1, keepdim=True)
            noise = noise * (source.freedom / chi_squared).sqrt()
        value_draws = value_draws + noise
    return value_draws


def _normal_numbers(draws: int, columns: int, generator: Generator) -> Tensor:
    return torch.randn(draws, columns, dtype=torch.float64, generator=generator)


def _symmetric_root(covariance: Tensor) -> Tensor:
    """Compute the symmetric matrix ``[n, n]`` whose square is the covariance.

    It is unique, whereas a root by eigenvectors alone depends on their signs, and so on the machine.
    """
    variances, directions = torch.linalg.eigh(covariance)
    deviations = variances.clamp_min(0).sqrt()
    return (directions * deviations) @ directions.T


def joint_intervals(
    values: Tensor,
    errors: Sequence[ValueErrors],
) -> tuple[Tensor, Tensor]:
    """Compute the ends ``[n]`` of the values' intervals, as percentiles of :func:`draw_values`.

    NaN for a client without a value.
    """
    has_value = ~values.isnan()
    low = torch.full(values.shape, math.nan, dtype=torch.float64)
    high = low.clone()
    value_draws = draw_values(values[has_value], _errors_of_clients(errors, has_value))
    quantiles = np.quantile(value_draws, INTERVAL_ENDS, axis=0)  # [2, clients with a value]
    low_quantiles, high_quantiles = torch.from_numpy(quantiles)
    low[has_value] = low_quantiles
    high[has_value] = high_quantiles
    return low, high


def _errors_of_clients(
    errors: Sequence[ValueErrors],
    is_client: Tensor,
) -> list[ValueErrors]:
    """Return the errors of some of the clients."""
    parts = []
    for source in errors:
        covariance = source.covariance[is_client][:, is_client]
        parts.append(ValueErrors(covariance, source.freedom))
    return parts


def proportions(values: Tensor, negatives: Negatives) -> Tensor:
    """Convert contributions ``[..., n]`` to weights of the budget's shares, at least 0, by the rule ``negatives``."""
    if not values.shape[-1]:
        return values
    if negatives == "shift":
        lowest = values.amin(-1, keepdim=True)
        return values - lowest.clamp(max=0)
    if negatives == "softmax":
        deviation = values.std(-1, correction=0, keepdim=True)
        # Equal values have a deviation of 0, and get equal shares.
        scaled = torch.where(deviation > 0, values / deviation, 0.0)
        highest = scaled.amax(-1, keepdim=True)
        return (scaled - highest).exp()
    return values.clamp(min=0)


def shares_of_draws(draws: Tensor, negatives: Negatives) -> Tensor:
    """Convert each draw of values ``[D, n]`` to shares by the rule ``negatives``, float64 ``[D, n]``.

    Each row sums to 1, or is NaN if its values give no client a share.
    """
    claims = proportions(draws.double(), negatives)
    return claims / claims.sum(1, keepdim=True)


def joint_shares(
    values: Tensor,
    errors: Sequence[ValueErrors],
    negatives: Negatives = "zero",
) -> JointShares:
    """Compute 90 % intervals of shares from joint draws of the values.

    Args:
        values: the clients' values, ``[n]``. NaN for clients without a value, which get nothing.
        errors: the independent sources of the values' errors, see :class:`ValueErrors`. Rows and columns of clients
            without a value are not read. NaN elsewhere means that the covariance is not known.
        negatives: the rule for values below 0, see :func:`flsv.allocate`. ``"refuse"`` draws in the same way as
            ``"zero"``.

    Example:
        Two values with the same error. The intervals of the two clients are mirror images.

        >>> found = joint_shares(torch.tensor([3.0, 1.0]), [ValueErrors(0.01 * torch.eye(2))])
        >>> found.low.round(decimals=2), found.high.round(decimals=2)
        (tensor([0.7200, 0.2200], dtype=torch.float64), tensor([0.7800, 0.2800], dtype=torch.float64))
    """
    has_value = ~values.isnan()
    no_bounds = torch.full_like(values, math.nan, dtype=torch.float64)
    sources = _errors_of_clients(errors, has_value)
    if any(source.covariance.isnan().any() for source in sources):
        return JointShares(no_bounds, no_bounds.clone(), moved=math.nan, without_gain=math.nan)

    known_values = values[has_value].double()
    value_draws = draw_values(known_values, sources)  # [draws, known values]
    shares = shares_of_draws(known_values[None, :], negatives)  # [1, known values]
    share_draws = shares_of_draws(value_draws, negatives)
    gives_shares = share_draws.isfinite().all(1)
    share_draws = share_draws[gives_shares]
    low, high = _bounds_of_shares(shares, share_draws)

    distances = (share_draws - shares).abs().sum(1)  # what moves is counted at giver and receiver
    has_no_gain = value_draws.sum(1) <= 0
    return JointShares(
        low=no_bounds.masked_scatter(has_value, low),
        high=no_bounds.masked_scatter(has_value, high),
        moved=float(distances.mean() / 2),
        without_gain=float(has_no_gain.double().mean()),
    )


def _bounds_of_shares(shares: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    # [k] by shares [1, k] and draws [D, k]
    rows = torch.cat([draws, shares])
    quantiles = np.quantile(rows, INTERVAL_ENDS, axis=0)
    low, high = torch.from_numpy(quantiles)
    # If many draws are 0, the share itself may lie outside its quantiles.
    low = low.minimum(shares[0])
    high = high.maximum(shares[0])
    return low, high
