"""NormCap and SampleCap: upper bounds on the norm of a client's update and on its reported number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from flsv.core import Strategy
from flsv.filters.base import Cohort, UpdateFilter
from flsv.functional.distances import distances
from flsv.utilities.errors import ConfigurationError


def length_factors(norms: Tensor, cap: float) -> Tensor:
    """Compute factors ``[k]`` in (0, 1] that clip the norms of k updates to ``cap`` times their median."""
    # A client can multiply its update (Bagdasaryan et al., AISTATS 2020) or count samples twice, which the server
    # cannot check. Sun et al. (arXiv:1911.07963) bound norms by a constant. A median can be moved arbitrarily only by
    # half of the cohort together.
    host_norms = norms.detach().cpu().double()
    factors = torch.ones_like(host_norms)
    is_valid = (host_norms > 0) & host_norms.isfinite()
    if is_valid.any():
        valid_norms = host_norms[is_valid]
        median_norm = valid_norms.quantile(0.5)
        limit = cap * median_norm
        factors[is_valid] = (limit / valid_norms).clamp_max(1)
    return factors


def capped_samples(num_samples: Tensor, cap: float) -> Tensor:
    """Bound numbers of samples ``[k]`` by ``cap`` times their median, rounded up."""
    if not len(num_samples):
        return num_samples
    median = num_samples.double().quantile(0.5)
    bound = (cap * median).ceil()
    return num_samples.clamp_max(bound.to(num_samples.dtype))


def scale_updates(
    rows: Tensor, initial_models: Tensor, factors: Tensor, num_parameters: int
) -> Tensor:
    """Multiply the parameters of the updates (``rows [k, P]`` minus ``initial_models``, ``[P]`` or ``[k, P]``) by
    ``factors [k]``. Rows with factor 1 stay bitwise identical.
    """
    changed_rows = (factors != 1).nonzero().flatten().tolist()
    if not changed_rows:
        return rows
    scaled = rows.clone()
    model_by_row = initial_models.expand_as(rows)
    for row in changed_rows:
        # parameters <- initial + factor (parameters - initial), in place
        initial = model_by_row[row, :num_parameters]
        factor = float(factors[row])
        scaled[row, :num_parameters].sub_(initial).mul_(factor).add_(initial)
    return scaled


class NormCap(UpdateFilter):
    """Filter that clips the norms of updates and keeps their directions.

    The filter limits the influence of a client that multiplies its update. It cannot be combined with a personalizer,
    or with a metric for which clients evaluate models on their own samples.

    Args:
        cap: the largest norm of an update, as a multiple of the median norm in the cohort.

    Raises:
        ConfigurationError: the cap is not positive, or the loop has a personalizer or such a metric.

    Example:
        >>> NormCap(1.25)
        NormCap(cap=1.25)
    """

    excludes = False
    compares = "norms of updates"

    def __init__(
        self, cap: Annotated[float, Gt(0), "It is a number of medians, such as 1.5."]
    ) -> None:
        self.cap = cap

    def check(self, personalizer: Strategy | None, evaluating: Sequence[str]) -> None:
        super().check(personalizer, evaluating)
        if evaluating:
            raise ConfigurationError(
                f"FederatedLoop(filters=[{self}]): for the metrics {list(evaluating)} clients subtract their own "
                "updates from the aggregate. This is wrong if the filter has clipped an update. Remove the filter or "
                "these metrics."
            )

    def apply(self, cohort: Cohort) -> Cohort:
        starts = [model for model in cohort.starts if model is not None]
        if len(starts) < len(cohort.updates):
            raise RuntimeError(
                f"{self!r} needs the norms of all updates, but the server does not know every client's initial "
                "model. Remove the filter, or the strategy by which clients choose their initial models."
            )
        initial_models = cohort.common_start  # [P] of all clients, or [k, P]
        if initial_models is None:
            initial_models = torch.stack(starts)
        num_parameters = cohort.num_parameters
        parameters = cohort.matrix[:, :num_parameters]
        norms = distances(parameters, initial_models[..., :num_parameters])
        factors = length_factors(norms, self.cap)
        matrix = scale_updates(cohort.matrix, initial_models, factors, num_parameters)
        return replace(cohort, matrix=matrix)


class SampleCap(UpdateFilter):
    """Filter that caps the numbers of samples that clients report, which the server cannot check.

    Args:
        cap: the greatest number of samples, as a multiple of the cohort's median number. The product is rounded up to
            an integer.

    Raises:
        ConfigurationError: the cap is not positive.

    Example:
        >>> SampleCap(1.25)
        SampleCap(cap=1.25)
    """

    excludes = False

    def __init__(
        self, cap: Annotated[float, Gt(0), "It is a number of medians, such as 1.5."]
    ) -> None:
        self.cap = cap

    def apply(self, cohort: Cohort) -> Cohort:
        num_samples = capped_samples(cohort.num_samples, self.cap)
        return replace(cohort, num_samples=num_samples)
