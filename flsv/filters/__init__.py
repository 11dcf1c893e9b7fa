"""What the server does to a cohort's updates before it measures and averages them."""

from flsv.filters.base import Cohort, UpdateFilter
from flsv.filters.caps import NormCap, SampleCap
from flsv.filters.copies import CopyFilter
from flsv.filters.multi_krum import MultiKrum
from flsv.filters.outliers import OutlierFilter, with_guard

__all__ = ["Cohort", "CopyFilter", "MultiKrum", "NormCap", "OutlierFilter", "SampleCap", "UpdateFilter", "with_guard"]
