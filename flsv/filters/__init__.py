"""Filters: changes that the server makes to a round's updates after it receives them, and before metrics and the
aggregator see them. Rules that combine updates are in ``aggregation``.
"""

from flsv.filters.base import Cohort, UpdateFilter
from flsv.filters.caps import NormCap, SampleCap
from flsv.filters.copies import CopyFilter
from flsv.filters.krum import MultiKrum
from flsv.filters.outliers import OutlierFilter, with_finite_check

__all__ = [
    "Cohort",
    "CopyFilter",
    "MultiKrum",
    "NormCap",
    "OutlierFilter",
    "SampleCap",
    "UpdateFilter",
    "with_finite_check",
]
