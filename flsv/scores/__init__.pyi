from . import performance as performance
from .performance import (
    FromOutputs as FromOutputs,
    ModelScore as ModelScore,
    performance_of as performance_of,
)

OWN_SCORES: tuple[str, ...]
