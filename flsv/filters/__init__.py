"""What the server does to a cohort's updates before it measures and averages them."""

from flsv.filters.base import Cohort, UpdateFilter
from flsv.filters.copies import CopyFilter
from flsv.filters.outliers import OutlierFilter, with_guard
from flsv.filters.robust import MultiKrum, NormCap, SampleCap

__all__ = ["Cohort", "CopyFilter", "MultiKrum", "NormCap", "OutlierFilter", "SampleCap", "UpdateFilter", "with_guard"]
