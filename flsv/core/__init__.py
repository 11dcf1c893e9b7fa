"""Types that all parts of flsv share, without any published method.

Tier: provisional.
"""

from flsv.core.client import Channel, Client, NoResponse, Traffic, map_clients
from flsv.core.local_data import LocalData, Split, State, opened
from flsv.core.matrix import ClientMatrix
from flsv.core.parameter_space import ParameterSpace
from flsv.core.ranks import ALONE, ClientPlacement, Ranks, ranks_of
from flsv.core.responses import Numbers, RespondingClient, declare_response
from flsv.core.round import Round, Start, request_initial_models
from flsv.core.state import ClientUpdate, FederationState, Instruction
from flsv.core.strategy import Contributions, FederationInfo, Strategy
from flsv.core.values import IntervalKind, Values
from flsv.core.vocabulary import VOCABULARY, Stage, stage_of

__all__ = [
    "ALONE",
    "VOCABULARY",
    "Channel",
    "Client",
    "ClientMatrix",
    "ClientPlacement",
    "ClientUpdate",
    "Contributions",
    "FederationInfo",
    "FederationState",
    "Instruction",
    "IntervalKind",
    "LocalData",
    "NoResponse",
    "Numbers",
    "ParameterSpace",
    "Ranks",
    "RespondingClient",
    "Round",
    "Split",
    "Stage",
    "Start",
    "State",
    "Strategy",
    "Traffic",
    "Values",
    "declare_response",
    "map_clients",
    "opened",
    "ranks_of",
    "request_initial_models",
    "stage_of",
]
