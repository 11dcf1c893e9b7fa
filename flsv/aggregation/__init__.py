"""Aggregators: rules that combine the clients' models into the next global model.

Rules that change a single client's update are in ``filters``, rules that give clients models of their own in
``personalization``.
"""

from flsv.aggregation.base import Aggregator
from flsv.aggregation.bucketing import Bucketing
from flsv.aggregation.cgsv import CGSV
from flsv.aggregation.divergence_weighted import DivergenceWeighted
from flsv.aggregation.fedavg import FedAvg
from flsv.aggregation.fedce import FedCE
from flsv.aggregation.fednova import FedNova
from flsv.aggregation.fedopt import FedAdam, FedAvgM, FedYogi, ServerOptimizer
from flsv.aggregation.geometric_median import GeometricMedian
from flsv.aggregation.shapfed import ShapFedWA
from flsv.aggregation.shapley_weighted import ShapleySoftmax, ShapleyWeighted
from flsv.aggregation.trimmed_mean import TrimmedMean

__all__ = [
    "CGSV",
    "Aggregator",
    "Bucketing",
    "DivergenceWeighted",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedCE",
    "FedNova",
    "FedYogi",
    "GeometricMedian",
    "ServerOptimizer",
    "ShapFedWA",
    "ShapleySoftmax",
    "ShapleyWeighted",
    "TrimmedMean",
]
