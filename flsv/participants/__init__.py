"""Participants: their data, their state, and how the server asks them questions."""

from flsv.participants.channel import Channel, Message, Traffic
from flsv.participants.client import Client, NoAnswer, run_protocol
from flsv.participants.local_data import LocalData, Split, at, no_model
from flsv.participants.ranks import ALONE, Owners, Ranks
from flsv.participants.state import ClientStates, State

__all__ = [
    "ALONE",
    "Channel",
    "Client",
    "ClientStates",
    "LocalData",
    "Message",
    "NoAnswer",
    "Owners",
    "Ranks",
    "Split",
    "State",
    "Traffic",
    "at",
    "no_model",
    "run_protocol",
]
