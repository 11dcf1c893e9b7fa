"""The server's side of a round: filters, contribution metrics, aggregation and personalization, in this order.

No module here reads clients' data.
"""

from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.round_server import RoundServer

__all__ = ["ContributionMetrics", "RoundServer"]
