"""Aggregators: how the clients' models become the next global model. One file each."""

from flsv.aggregation.base import Aggregator
from flsv.aggregation.fedavg import FedAvg
from flsv.aggregation.shapfed import ShapFedWA

__all__ = ["Aggregator", "FedAvg", "ShapFedWA"]
