"""Mean values over seeds, and their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.core import Values
from flsv.functional.intervals import (
    half_width,
    interval_over_seeds,
    prediction_stderr,
    seed_freedom,
)
from flsv.utilities.display import INTERVAL_LEVEL

#: Facts on each seed's values.
Evidence = Sequence[Mapping[str, Any]]


def mean_with_interval(
    values: Tensor,
    evidence: Evidence | None = None,
) -> Values:
    """Compute mean values over several seeds.

    Args:
        values: ``[S, n]``, each seed's values. A client's mean is over the seeds in which it is not NaN.
        evidence: facts on each seed's values by trained coalitions, see :meth:`flsv.values.query.Game.evidence`. If a
            seed has no values, there are no means. None: intervals are Student's t.
    """
    mean = values.nanmean(0)
    if evidence is None:
        freedom = (~values.isnan()).sum(0) - 1
        half_widths = _students_half_widths(values, freedom)
        return Values(mean, half_width=half_widths, freedom=freedom)

    has_values = (~values.isnan()).any(1)
    if has_values.all():
        half_widths = _half_widths_by_evidence(values, evidence)
    else:  # a coalition of some seed has no finite performance
        mean = torch.full_like(mean, torch.nan)
        half_widths = mean
    return Values(mean, half_width=half_widths, freedom=seed_freedom(len(values)))


def _half_widths_by_evidence(values: Tensor, evidence: Evidence) -> Tensor:
    # The usual difference between seeds and the error of predicted utilities are known.
    has_all = (~values.isnan()).all(0)
    known_values = values[:, has_all]
    stderr = stderr_over_seeds(evidence)
    half_widths = torch.full_like(values[0], torch.nan)
    half_widths[has_all] = interval_over_seeds(known_values, stderr[has_all])
    return half_widths


def _students_half_widths(values: Tensor, freedom: Tensor) -> Tensor:
    deviations = values - values.nanmean(0)
    variances = deviations.square().nansum(0) / freedom
    num_seeds = freedom + 1
    return half_width(variances / num_seeds, freedom, confidence_level=INTERVAL_LEVEL)


def stderr_over_seeds(evidence: Evidence) -> Tensor:
    """Return the standard error ``[n]`` of mean values over seeds that comes from coalitions that were not trained."""
    if "disagreement" in evidence[0]:
        return prediction_stderr(_means("disagreement", evidence))
    return _means("stderr", evidence)


def _means(name: str, evidence: Evidence) -> Tensor:
    numbers = [seed_evidence[name] for seed_evidence in evidence]  # [s, n]
    return torch.tensor(numbers, dtype=torch.float64).mean(0)
