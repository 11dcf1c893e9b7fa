"""``flsv bench``: contribution metrics compared with Shapley values from retraining."""

from flsv.benchmark.built_in import Duplicates
from flsv.benchmark.federation import Federation, federation, names
from flsv.benchmark.scores import share_error
from flsv.benchmark.truth import Truth, make_truth, train_coalitions, truth_table

__all__ = [
    "Duplicates",
    "Federation",
    "Truth",
    "federation",
    "make_truth",
    "names",
    "share_error",
    "train_coalitions",
    "truth_table",
]
