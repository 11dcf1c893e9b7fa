"""What every room speaks of: rounds and their messages, clients and their data, strategies, the parameter space."""

from flsv.core.client import Channel, Client, Message, NoAnswer, Traffic, run_protocol
from flsv.core.fields import STAGES, Stage, TrainedCoalitions, after, stage_of
from flsv.core.local_data import LocalData, Split, State, at, no_model
from flsv.core.matrix import ClientMatrix
from flsv.core.parameter_space import ParameterSpace
from flsv.core.ranks import ALONE, Owners, Ranks
from flsv.core.round import HEAD_FIELDS, VOCABULARY, Round, Start, asked_starts, started_from
from flsv.core.state import ClientUpdate, FederationState, Instruction
from flsv.core.strategy import Strategy

__all__ = [
    "ALONE",
    "HEAD_FIELDS",
    "STAGES",
    "VOCABULARY",
    "Channel",
    "Client",
    "ClientMatrix",
    "ClientUpdate",
    "FederationState",
    "Instruction",
    "LocalData",
    "Message",
    "NoAnswer",
    "Owners",
    "ParameterSpace",
    "Ranks",
    "Round",
    "Split",
    "Stage",
    "Start",
    "State",
    "Strategy",
    "Traffic",
    "TrainedCoalitions",
    "after",
    "asked_starts",
    "at",
    "no_model",
    "run_protocol",
    "stage_of",
    "started_from",
]
