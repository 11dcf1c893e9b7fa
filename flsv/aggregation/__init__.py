"""Aggregators: how the clients' models become the next global model."""

from flsv.aggregation.base import Aggregator, FedAvg
from flsv.aggregation.by_contribution import CGSV, FedCE, ShapFedWA, ShapleySoftmax, ShapleyWeighted
from flsv.aggregation.by_training import DivergenceWeighted, FedBuff, FedNova, StaleStarts
from flsv.aggregation.robust import Bucketing, GeometricMedian, TrimmedMean
from flsv.aggregation.server_optimizer import FedAdam, FedAvgM, FedYogi, ServerOptimizer

__all__ = [
    "CGSV",
    "Aggregator",
    "Bucketing",
    "DivergenceWeighted",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "FedBuff",
    "FedCE",
    "FedNova",
    "FedYogi",
    "GeometricMedian",
    "ServerOptimizer",
    "ShapFedWA",
    "ShapleySoftmax",
    "ShapleyWeighted",
    "StaleStarts",
    "TrimmedMean",
]
