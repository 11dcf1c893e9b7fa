"""The server's side of a round: contribution metrics, aggregation and personalization."""

from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.round_server import RoundServer

__all__ = ["ContributionMetrics", "RoundServer"]
