"""One communication round: what crosses between clients and server, and what the server knows of it."""

from flsv.round.fields import STAGES, Stage, TrainedCoalitions, after, stage_of
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
    "Stage",
    "Start",
    "TrainedCoalitions",
    "after",
    "asked_starts",
    "stage_of",
    "started_from",
]
