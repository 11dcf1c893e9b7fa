"""Mean values over seeds, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flsv.functional.intervals import half_width, interval_over_seeds, prediction_stderr
from flsv.utilities.display import INTERVAL_LEVEL


class Estimates(NamedTuple):
    """Values ``[n]`` and the ends of their 90 % intervals."""

    value: Tensor
    low: Tensor
    high: Tensor


def mean_with_interval(
    values: Tensor,
    evidence: Sequence[Mapping[str, Any]] | None = None,
) -> Estimates:
    """Compute mean values over several seeds.

    Args:
        values: ``[S, n]``, each seed's values. A client's mean is over the seeds in which it is not NaN.
        evidence: facts on each seed's values by trained coalitions, see :meth:`flsv.values.query.Game.evidence`. If a
            seed has no values, there are no means. None: intervals are Student's t.
    """
    mean = values.nanmean(0)
    if evidence is None:
        half_widths = _students_half_widths(values)
        return Estimates(mean, mean - half_widths, mean + half_widths)

    is_known = ~values.isnan()
    half_widths = torch.full_like(mean, torch.nan)
    if not is_known.any(1).all():  # a coalition of some seed has no finite performance
        return Estimates(half_widths, half_widths, half_widths)
    # The usual difference between seeds and the error of predicted utilities are known.
    has_all = is_known.all(0)
    stderr = stderr_over_seeds(evidence)
    known_values = values[:, has_all]
    half_widths[has_all] = interval_over_seeds(known_values, stderr[has_all])
    return Estimates(mean, mean - half_widths, mean + half_widths)


def _students_half_widths(values: Tensor) -> Tensor:
    num_seeds = (~values.isnan()).sum(0)
    deviations = values - values.nanmean(0)
    variances = deviations.square().nansum(0) / (num_seeds - 1)
    variances_of_means = variances / num_seeds
    return half_width(variances_of_means, num_seeds - 1, confidence_level=INTERVAL_LEVEL)


def stderr_over_seeds(evidence: Sequence[Mapping[str, Any]]) -> Tensor:
    """Return the standard error ``[n]`` of mean values over seeds that comes from coalitions that were not trained."""
    is_predicted = "disagreement" in evidence[0]
    name = "disagreement" if is_predicted else "stderr"
    by_seed = [seed_evidence[name] for seed_evidence in evidence]  # [s, n]
    means = torch.tensor(by_seed, dtype=torch.float64).mean(0)
    return prediction_stderr(means) if is_predicted else means
