from . import performance as performance
from .performance import (
    FromOutputs as FromOutputs,
    Measure as Measure,
    performance_of as performance_of,
)

OWN_SCORES: tuple[str, ...]
