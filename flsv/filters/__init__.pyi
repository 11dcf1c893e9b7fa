from .base import Cohort as Cohort, UpdateFilter as UpdateFilter
from .caps import NormCap as NormCap, SampleCap as SampleCap
from .krum import MultiKrum as MultiKrum
from .outliers import OutlierFilter as OutlierFilter, with_finite_check as with_finite_check
