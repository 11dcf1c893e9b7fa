from .base import Aggregator as Aggregator
from .bucketing import Bucketing as Bucketing
from .cgsv import CGSV as CGSV
from .divergence_weighted import DivergenceWeighted as DivergenceWeighted
from .fedavg import FedAvg as FedAvg
from .fedce import FedCE as FedCE
from .fednova import FedNova as FedNova
from .fedopt import (
    FedAdam as FedAdam,
    FedAvgM as FedAvgM,
    FedYogi as FedYogi,
    ServerOptimizer as ServerOptimizer,
)
from .geometric_median import GeometricMedian as GeometricMedian
from .shapfed import ShapFedWA as ShapFedWA
from .shapley_weighted import ShapleySoftmax as ShapleySoftmax, ShapleyWeighted as ShapleyWeighted
from .trimmed_mean import TrimmedMean as TrimmedMean
