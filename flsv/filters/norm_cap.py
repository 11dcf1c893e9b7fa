"""NormCap: a filter that shortens updates longer than a multiple of the cohort's median length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from annotated_types import Gt

from flsv.filters.base import UpdateFilter
from flsv.filters.cohort import Cohort
from flsv.functional.clipping import length_factors, scale_updates
from flsv.functional.distances import distances
from flsv.personalization import Personalizer
from flsv.utilities.errors import ConfigurationError


class NormCap(UpdateFilter):
    """Filter that shortens updates longer than a bound and keeps their direction.

    The filter limits the influence of a client that multiplies its update, see :mod:`flsv.functional.clipping`. It
    cannot be combined with a personalizer, or with a metric for which clients evaluate models on their own samples.

    Args:
        cap: the greatest length of an update, as a multiple of the median length in the cohort.

    Raises:
        ConfigurationError: the cap is not positive, or the loop has a personalizer or such a metric.

    Example:
        >>> NormCap(1.25)
        NormCap(cap=1.25)
    """

    excludes = False
    compares = "lengths of updates"

    def __init__(self, cap: Annotated[float, Gt(0), "It is a number of medians, such as 1.5."]) -> None:
        self.cap = cap

    def check(self, personalizer: Personalizer | None, evaluating: Sequence[str]) -> None:
        super().check(personalizer, evaluating)
        if evaluating:
            raise ConfigurationError(
                f"FederatedLoop(filters=[{self}]): metrics {list(evaluating)} let clients take their own updates out "
                "of the aggregate, in which they may be shorter than they know. Leave one of them out."
            )

    def apply(self, cohort: Cohort) -> Cohort:
        starts = [start for start in cohort.starts if start is not None]
        if len(starts) < len(cohort.updates):
            raise RuntimeError("updates have a known length only if the server knows all start points.")
        cut = cohort.num_parameters
        origin = torch.stack(starts) if cohort.common_start is None else cohort.common_start
        factors = length_factors(distances(cohort.matrix[:, :cut], origin[..., :cut]), self.cap)
        return replace(cohort, matrix=scale_updates(cohort.matrix, origin, factors, cut))
