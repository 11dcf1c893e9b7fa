"""SampleCap: a filter that caps numbers of samples at a multiple of the cohort's median."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from annotated_types import Gt

from flsv.filters.base import UpdateFilter
from flsv.filters.cohort import Cohort
from flsv.functional.clipping import capped_samples


class SampleCap(UpdateFilter):
    """Filter that caps the numbers of samples that clients report, see :mod:`flsv.functional.clipping`.

    Args:
        cap: the greatest number of samples, as a multiple of the cohort's median number; the product is rounded up to
            an integer.

    Raises:
        ConfigurationError: the cap is not positive.

    Example:
        >>> SampleCap(1.25)
        SampleCap(cap=1.25)
    """

    excludes = False

    def __init__(self, cap: Annotated[float, Gt(0), "It is a number of medians, such as 1.5."]) -> None:
        self.cap = cap

    def apply(self, cohort: Cohort) -> Cohort:
        return replace(cohort, num_samples=capped_samples(cohort.num_samples, self.cap))
