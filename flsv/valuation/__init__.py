"""Valuation of clients and samples before any training, by optimal transport."""

from flsv.valuation.fedbary import FedBary, Valuation, clients_of, participants_of, server_of
from flsv.valuation.questions import (
    SampleValues,
    Verdict,
    flag_samples,
    sample_values,
    write_flagged,
)

__all__ = [
    "FedBary",
    "SampleValues",
    "Valuation",
    "Verdict",
    "clients_of",
    "flag_samples",
    "participants_of",
    "sample_values",
    "server_of",
    "write_flagged",
]
