"""Types that all parts of flsv share, without any published method.

Tier: provisional.
"""

from flsv.core.answers import AnsweringClient, Numbers, declare_answer
from flsv.core.client import Channel, Client, NoAnswer, Traffic, map_clients
from flsv.core.local_data import LocalData, Split, State, opened
from flsv.core.matrix import ClientMatrix
from flsv.core.parameter_space import ParameterSpace
from flsv.core.ranks import ALONE, ClientPlacement, Ranks, ranks_of
from flsv.core.round import Round, Start, ask_for_initial_models
from flsv.core.state import ClientUpdate, FederationState, Instruction
from flsv.core.strategy import Contributions, FederationInfo, Strategy
from flsv.core.vocabulary import VOCABULARY, Stage, stage_of

__all__ = [
    "ALONE",
    "VOCABULARY",
    "AnsweringClient",
    "Channel",
    "Client",
    "ClientMatrix",
    "ClientPlacement",
    "ClientUpdate",
    "Contributions",
    "FederationInfo",
    "FederationState",
    "Instruction",
    "LocalData",
    "NoAnswer",
    "Numbers",
    "ParameterSpace",
    "Ranks",
    "Round",
    "Split",
    "Stage",
    "Start",
    "State",
    "Strategy",
    "Traffic",
    "ask_for_initial_models",
    "declare_answer",
    "map_clients",
    "opened",
    "ranks_of",
    "stage_of",
]
