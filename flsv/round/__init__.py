"""One communication round: what crosses between clients and server, and what the server knows of it."""

from flsv.round.matrix import ClientMatrix
from flsv.round.messages import ClientUpdate, Instruction
from flsv.round.round import HEAD_FIELDS, VOCABULARY, Round, Start, asked_starts, started_from
from flsv.round.state import FederationState
from flsv.round.vocabulary import STAGES, Stage, after, stage_of

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
    "after",
    "asked_starts",
    "stage_of",
    "started_from",
]
