"""The server side of a round: metrics, aggregation, personalisation."""

from flsv.server.board import ContributionBoard
from flsv.server.round_server import RoundServer

__all__ = ["ContributionBoard", "RoundServer"]
