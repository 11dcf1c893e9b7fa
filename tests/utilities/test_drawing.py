"""Names and pictures that matplotlib cannot bear do not stop a run."""

import warnings

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.data import plot_partition
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.metrics.plot import plot_contributions
from helpers import warns
from helpers.fits import fit

#: What matplotlib takes for a formula or leaves out, and what has no room.
NAMES = [
    "[/b]",
    "$x^{$",
    "$a$",
    ":smile:",
    "_hidden",
    "two\nlines",
    "x" * 300,
    "\\[red]",
    "",
    "%s {0}",
]


def picture_files(folder):
    return EventAccumulator(str(folder), size_guidance={"images": 0}).Reload().Tags()["images"]


@pytest.mark.slow
def test_figures_with_any_client_or_class_name_are_drawn(tmp_path):
    count = len(NAMES)
    partition, _ = plot_partition(torch.ones(3, count, dtype=torch.long), NAMES)
    by_class, _ = plot_contributions(torch.rand(3, count), column_names=NAMES)
    figures = [partition, by_class]
    for name in NAMES:
        figure, _ = plot_contributions(
            torch.rand(3, 2), name=name, column_names=["a", "b"], kind_of_columns=name
        )
        figures.append(figure)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for figure in figures:
            figure.savefig(tmp_path / "figure.png", dpi=20)

    (legend,) = partition.legends
    assert len(legend.get_texts()) == count - 1  # all that are not empty


class Undrawable(ClassSpecificShapley):
    def plot(self, val=None, ax=None):
        raise MemoryError("no room")


@pytest.mark.slow
def test_a_picture_that_fails_is_named_and_the_others_are_drawn(tmp_path, monkeypatch):
    def fail(*_):
        raise ValueError("Number of bins")

    monkeypatch.setattr("flsv.federation.reports.plot_partition", fail)
    metrics = {"bad": Undrawable(), "good": ClassSpecificShapley()}
    reporting = Reporting(figures=1)
    loop = FederatedLoop(FedAvg(), metrics, seed=1, reporting=reporting)
    logger = TensorBoardLogger(tmp_path, name="", version="run")

    with warns("could not be drawn") as caught:
        fit(loop, tmp_path, rounds=2, logger=logger)

    warned = "\n".join(str(warning.message) for warning in caught)
    for failure in (
        "picture data/partition could not be drawn (ValueError: Number of bins)",
        "picture Contributions/bad could not be drawn (MemoryError: no room)",
    ):
        assert failure in warned
    assert loop.round_index == 2
    assert picture_files(tmp_path / "run") == ["Contributions/good"]
