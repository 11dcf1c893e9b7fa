"""Runs whose values are computed after training, when they go on: every value is there once, wherever it is written."""

import csv
import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pandas
import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import flsv
from flsv import metrics
from flsv.cli import main
from helpers.runs import FEDERATION, QUIET

#: Options of ShadowShapley, whose coalitions are trained after the run where they cannot be rows of one batched model.
WAYS: dict[str, dict[str, object]] = {
    "plain": {},
    "by_class": {"per_class": True},
    "sparse": {"every": 3, "performance": "negative_loss"},
    "judged": {"judges": "clients"},
}


#: The columns of the run's tables that say what a row is of.
KEYS = {
    "contributions.csv": ("round", "metric", "client", "class"),
    "coalitions.csv": ("seed", "coalition", "round"),
}


def write_late_config(path: Path) -> str:
    """A federation with all metrics that value after the run; no coalition can be a row with this optimizer."""
    sections = yaml.safe_load(FEDERATION)
    sections["model"]["init_args"]["optimizer"] = {
        "class_path": "torch.optim.LBFGS",
        "init_args": {"max_iter": 2},
    }
    sections["data"]["splits"]["client_val"] = 0.2
    metrics: dict[str, Any] = {"cssv": "ClassSpecificShapley"}
    for name, options in WAYS.items():
        arguments = {"coalitions": "singles", **options}
        metrics[name] = {"class_path": "ShadowShapley", "init_args": arguments}

    sections["federation"]["metrics"] = metrics
    path.write_text(yaml.safe_dump(sections))
    return str(path)


def fit_rounds(folder: Path, rounds: int, *options: str) -> Path:
    command = [
        "fit",
        "--config",
        write_late_config(folder.parent / "federation.yaml"),
        f"--trainer.max_epochs={rounds}",
        *QUIET,
    ]

    assert main([*command, f"--trainer.default_root_dir={folder}", *options]) == 0

    return folder / "lightning_logs" / "version_0"


def duplicates_in(run: Path) -> list[object]:
    """Return what is in one of the run's files more than once: rows of tables, and scalars of TensorBoard."""
    entries: Counter[object] = Counter()
    for name, key in KEYS.items():
        lines = (run / name).read_text().splitlines()
        table = csv.DictReader(line for line in lines if not line.startswith("#"))
        for row in table:
            cells = tuple(row[column] for column in key)
            entries[name, cells] += 1

    event_folders = {path.parent for path in run.rglob("events.out.tfevents.*")}
    for folder in event_folders:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                entries[folder.name, tag, event.step] += 1

    return [entry for entry, count in entries.items() if count > 1]


def test_every_metric_that_is_valued_after_training_is_among_the_tested_ones():
    kinds = {
        name
        for name, kind in inspect.getmembers(metrics, inspect.isclass)
        if hasattr(kind, "trains")
    }
    assert kinds == {"ShadowShapley"}


@pytest.mark.slow
def test_resumed_run_with_metrics_valued_after_training_equals_an_uninterrupted_run(
    tmp_path,
):
    straight = fit_rounds(tmp_path / "straight", 3)
    run = fit_rounds(tmp_path / "resumed", 2)
    same_logger = [
        "--trainer.logger=TensorBoardLogger",
        f"--trainer.logger.save_dir={tmp_path / 'resumed'}",
        "--trainer.logger.version=0",
    ]

    # With no round left, as after a kill once the values stand; with another round.
    for rounds in (2, 3):
        resumed = fit_rounds(tmp_path / "resumed", rounds, "--ckpt_path=last", *same_logger)
        assert resumed == run
        assert duplicates_in(run) == []
        assert main(["report", str(run)]) == 0

    versions = tmp_path / "resumed" / "lightning_logs"
    assert [folder.name for folder in versions.iterdir()] == ["version_0"]

    key = ["round", "metric", "client", "class"]
    table = flsv.read_run(run).sort_values(key)
    expected = flsv.read_run(straight).sort_values(key)

    assert WAYS.keys() <= set(table["metric"])

    # Where values are computed every third round and after the last, the last round of the first part has some, too.
    table = table[(table["metric"] != "sparse") | (table["round"] == 2)]
    pandas.testing.assert_frame_equal(
        table.reset_index(drop=True),
        expected.reset_index(drop=True),
        check_exact=True,
    )
