r"""Confidence intervals for Shapley values of trained coalitions, from one seed or several.

The intervals are for the mean over many seeds. For several seeds see :func:`interval_over_seeds`.

**One seed.** Four parts of the difference between seeds can be estimated from one. With n clients and G the sum of all
positive values, the standard error of the value of client i is

    deviation_i = ( e_i^2 + (0.025 G)^2 + (s_0 / n)^2 + r^2 )^(1/2):

- e_i: the standard error due to coalitions that were not trained (0 if all were), see :func:`prediction_stderr`.
- 0.025 G: the usual deviation of one seed's values from the mean of other seeds, without the next two parts.
- s_0: the standard deviation of the utility between untrained models with different initial weights. The empty
  coalition's utility is part of every value, and its deviation shifts each value by s_0 / n. This part matters most in
  regressions and where little is gained. If s_0 is not known, 0.045 G replaces both parts.
- r: the standard deviation of a value over the last three rounds, as root mean square over the clients. It is largest
  where a sampler draws the clients, or a model still learns. 0 where only the last round has values.

The constants were chosen on the benchmark's tuning set: 32 federations of up to seven clients, in which all coalitions
were trained with three to five seeds. For 92 % of its clients the intervals without r contain the mean of the other
seeds, allowing for its own error. docs/results/retrain.md says what they contain with and without r while models still
learn. Prefer the interval from several seeds, which measures your own federation.
"""

from __future__ import annotations

import math

import torch
from scipy import stats
from torch import Tensor

from flsv.utilities.display import INTERVAL_LEVEL


def half_width(variance: Tensor, degrees_of_freedom: Tensor, confidence_level: float) -> Tensor:
    """Compute half the width of a Student's t interval. NaN where the degrees of freedom are not above 0."""
    quantiles = t_quantile(confidence_level, degrees_of_freedom).to(variance)
    widths = quantiles * variance.sqrt()
    return widths.masked_fill(~(degrees_of_freedom > 0), torch.nan)


def t_quantile(
    confidence_level: float,
    degrees_of_freedom: Tensor | float = math.inf,
) -> Tensor:
    """Compute Student's t quantile at (1 + confidence_level) / 2, float64. For infinite degrees it is the normal
    quantile.
    """
    degrees_of_freedom = torch.as_tensor(degrees_of_freedom, dtype=torch.float64, device="cpu")
    probability = (1 + confidence_level) / 2
    quantiles = stats.t.ppf(probability, degrees_of_freedom.numpy())
    return torch.as_tensor(quantiles, dtype=torch.float64)


#: Standard deviation of a value between seeds, as a fraction of the sum of all positive values: without and with the
#: part that comes from the untrained models.
SEED_DEVIATION = 0.025
SEED_DEVIATION_WITH_UNTRAINED = 0.045
#: Number of seeds with which the usual variance is weighted, in addition to those of the values.
PRIOR_SEEDS = 2
#: Standard error of predicted values, as a multiple of the difference between the two predictions.
STDERR_PER_DISAGREEMENT = 0.75


def one_seed_stderr(
    values: Tensor,
    stderr: Tensor,
    untrained_utilities: Tensor | None = None,
    recent_values: Tensor | None = None,
) -> Tensor:
    """Compute the standard error of one seed's Shapley values as estimates of their mean over many seeds.

    Args:
        values: one seed's values, ``[n]``, or ``[n, M]`` for M games.
        stderr: their standard error due to coalitions that were not trained.
        untrained_utilities: ``[R]`` or ``[R, M]``, those of R >= 2 untrained models with different initial weights.
        recent_values: ``[L, n]`` or ``[L, n, M]``, the values after each of the last L >= 2 rounds.
    """
    values = values.double()
    sum_of_gains = values.clamp_min(0).sum(0)
    if untrained_utilities is None:
        seed_deviation = SEED_DEVIATION_WITH_UNTRAINED
    else:
        seed_deviation = SEED_DEVIATION

    stderr_by_seeds = seed_deviation * sum_of_gains
    variance = stderr.double().square() + stderr_by_seeds.square()
    if untrained_utilities is not None:
        stderr_by_untrained = untrained_utilities.double().std(0) / len(values)
        variance = variance + stderr_by_untrained.square()
    if recent_values is not None:
        variance_over_rounds = recent_values.double().var(0)  # [n] or [n, M]
        mean_over_clients = variance_over_rounds.mean(0)
        variance = variance + mean_over_clients
    return variance.sqrt()


def prediction_stderr(disagreement: Tensor) -> Tensor:
    """Compute predicted values' standard error from their difference between interpolation and ensemble, ``[n]`` or
    ``[n, M]``.
    """
    mean_square = disagreement.double().square().mean(0)
    stderr = STDERR_PER_DISAGREEMENT * mean_square.sqrt()
    return stderr.expand(disagreement.shape).clone()


def interval_over_seeds(values: Tensor, fit: Tensor | float = 0.0) -> Tensor:
    r"""Compute half the widths of the 90 % confidence intervals for mean values over seeds.

    The spread of a few seeds is uncertain. So each player's variance over S seeds, with S - 1 degrees of freedom, is
    averaged with a usual variance that counts as two further degrees:

    .. math:: \sigma_i^2 = \frac{(S - 1) s_i^2 + 2 \max(\overline{s^2}, (0.025 G)^2)}{S + 1}, \qquad
        h_i = \sqrt{t_{S + 1}^2 \sigma_i^2 / S + z^2 f_i^2}

    with s_i the player's standard deviation over the seeds, G the sum of all positive mean values, f_i the standard
    error from coalitions that were not trained, and t and z the quantiles of Student's and the normal distribution.

    Args:
        values: ``[S, n]``, the Shapley values of n players in each seed's trainings.
        fit: ``[n]``, or one number for all players: the standard error of the mean values due to coalitions that were
            not trained. 0 if all were trained.

    Returns:
        float64 ``[n]``. A single seed shows no spread: then it is z times :func:`one_seed_stderr`.

    Raises:
        ValueError: ``values`` is not a matrix.

    Example:
        >>> interval_over_seeds(torch.tensor([[1.0, 3.0], [1.0, 5.0], [1.0, 4.0]])).round(decimals=3)
        tensor([0.6150, 1.0660], dtype=torch.float64)
    """
    if values.ndim != 2:
        raise ValueError(f"expected values [seeds, n], but got {list(values.shape)}.")
    num_seeds, num_players = values.shape
    values = values.double()
    fit_stderr = torch.as_tensor(fit, dtype=torch.float64).expand(num_players)
    if num_seeds == 1:
        return t_quantile(INTERVAL_LEVEL) * one_seed_stderr(values[0], fit_stderr)

    variance_over_seeds = values.var(0)  # [n]
    sum_of_gains = values.mean(0).clamp_min(0).sum()
    usual_deviation = SEED_DEVIATION * sum_of_gains
    usual_variance = torch.maximum(variance_over_seeds.mean(), usual_deviation.square())
    sum_of_squares = (num_seeds - 1) * variance_over_seeds + PRIOR_SEEDS * usual_variance
    degrees_of_freedom = num_seeds - 1 + PRIOR_SEEDS
    variance = sum_of_squares / degrees_of_freedom

    quantile = t_quantile(INTERVAL_LEVEL, degrees_of_freedom)
    squared_width_by_seeds = quantile**2 * variance / num_seeds
    width_by_fit = t_quantile(INTERVAL_LEVEL) * fit_stderr
    return (squared_width_by_seeds + width_by_fit.square()).sqrt()


def seed_covariance(values: Tensor, standard_errors: Tensor) -> Tensor:
    """Compute the covariance ``[n, n]`` of mean values over seeds.

    Its diagonal corresponds to the intervals of :func:`interval_over_seeds`, whose errors are Student's t. The
    covariances of pairs of values over a few seeds are shrunk in the same way as the variances.

    Args:
        values: ``[S, n]``, the values in each seed's trainings.
        standard_errors: ``[n]``, those of the mean values, by which their intervals were computed.
    """
    num_seeds = len(values)
    variances = standard_errors.double().square()
    if num_seeds == 1:
        return variances.diag()
    covariance_of_values = torch.cov(values.double().T)
    # torch.cov of one client is a scalar.
    covariance_of_values = torch.atleast_2d(covariance_of_values)
    # The prior seeds count here, too, with a covariance of 0.
    shrinkage = (num_seeds - 1) / (num_seeds - 1 + PRIOR_SEEDS)
    covariance = shrinkage * covariance_of_values / num_seeds
    covariance.diagonal().copy_(variances)
    return covariance


def seed_freedom(num_seeds: int) -> float:
    """Return the degrees of freedom of :func:`interval_over_seeds`. Infinite: the intervals are normal."""
    if num_seeds == 1:
        return math.inf
    return num_seeds - 1 + PRIOR_SEEDS
