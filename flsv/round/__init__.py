"""One communication round: what crosses between clients and server, and what the server knows of it."""

from flsv.round.fields import STAGES, Stage, after, needs_sums_only, of_sums, stage_of
from flsv.round.games import RowAverages, TrainedCoalitions
from flsv.round.matrix import ClientMatrix
from flsv.round.round import HEAD_FIELDS, VOCABULARY, Round, Start, asked_starts, started_from
from flsv.round.state import ClientUpdate, FederationState, Instruction

__all__ = [
    "HEAD_FIELDS",
    "STAGES",
    "VOCABULARY",
    "ClientMatrix",
    "ClientUpdate",
    "FederationState",
    "Instruction",
    "Round",
    "RowAverages",
    "Stage",
    "Start",
    "TrainedCoalitions",
    "after",
    "asked_starts",
    "needs_sums_only",
    "of_sums",
    "stage_of",
    "started_from",
]
