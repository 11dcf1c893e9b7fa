"""Participants: their data, their state, and how the server asks them questions."""

from flsv.participants.client import Channel, Client, Message, NoAnswer, Traffic, run_protocol
from flsv.participants.local_data import LocalData, Split, State, at, no_model
from flsv.participants.ranks import ALONE, Owners, Ranks

__all__ = [
    "ALONE",
    "Channel",
    "Client",
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
