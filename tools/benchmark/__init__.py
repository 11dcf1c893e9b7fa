"""Contribution metrics compared with Shapley values from retraining: what ``tools/bench.py`` runs."""

from benchmark.built_in import Duplicates as Duplicates
from benchmark.federation import Federation as Federation, federation as federation, names as names
from benchmark.scores import share_error as share_error
from benchmark.truth import (
    Truth as Truth,
    make_truth as make_truth,
    train_coalitions as train_coalitions,
    truth_table as truth_table,
)
