"""Runs whose values are computed after training, when they go on: every value is there once, wherever it is written."""

import csv
import inspect
from collections import Counter
from pathlib import Path

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


def config(path: Path) -> str:
    """A federation with all metrics that value after the run; no coalition can be a row with this optimizer."""
    made = yaml.safe_load(FEDERATION)
    made["model"]["init_args"]["optimizer"] = {
        "class_path": "torch.optim.LBFGS",
        "init_args": {"max_iter": 2},
    }
    made["data"]["splits"]["client_val"] = 0.2
    made["federation"]["metrics"] = {"cssv": "ClassSpecificShapley"} | {
        way: {"class_path": "ShadowShapley", "init_args": {"coalitions": "all", **options}}
        for way, options in WAYS.items()
    }
    path.write_text(yaml.safe_dump(made))
    return str(path)


def fitted(folder: Path, rounds: int, *more: str) -> Path:
    command = [
        "fit",
        "--config",
        config(folder.parent / "federation.yaml"),
        f"--trainer.max_epochs={rounds}",
        *QUIET,
    ]
    assert main([*command, f"--trainer.default_root_dir={folder}", *more]) == 0
    return folder / "lightning_logs" / "version_0"


def doubles(run: Path) -> list[object]:
    """What is in one of the run's files more than once: rows of tables, and scalars of TensorBoard."""
    found: list[object] = []
    for name, key in KEYS.items():
        lines = (run / name).read_text().splitlines()
        cells = csv.DictReader(line for line in lines if not line.startswith("#"))
        found += [
            each
            for each, times in Counter(tuple(map(row.get, key)) for row in cells).items()
            if times > 1
        ]
    for folder in {path.parent for path in run.rglob("events.out.tfevents.*")}:
        events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            steps = Counter(event.step for event in events.Scalars(tag))
            found += [(folder.name, tag, step) for step, times in steps.items() if times > 1]
    return found


def test_every_metric_that_is_valued_after_training_is_among_the_tested_ones() -> None:
    kinds = {
        name
        for name, kind in inspect.getmembers(metrics, inspect.isclass)
        if hasattr(kind, "trains")
    }
    assert kinds == {"ShadowShapley"}


@pytest.mark.slow
def test_resumed_run_with_metrics_valued_after_training_equals_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    straight = fitted(tmp_path / "straight", 3)
    run = fitted(tmp_path / "resumed", 2)
    again = tmp_path / "resumed" / "lightning_logs"
    for rounds in (
        2,
        3,
    ):  # with no round left, as after a kill once the values stand; with another round
        board = ["TensorBoardLogger", f"save_dir={tmp_path / 'resumed'}", "version=0"]
        same = [
            f"--trainer.logger{'.' * ('=' in each)}{'=' * ('=' not in each)}{each}"
            for each in board
        ]
        assert fitted(tmp_path / "resumed", rounds, "--ckpt_path=last", *same) == run
        assert doubles(run) == []
        assert main(["report", str(run)]) == 0
    assert [each.name for each in again.iterdir()] == ["version_0"]
    found, expected = (
        flsv.read_run(folder).sort_values(["round", "metric", "client", "class"])
        for folder in (run, straight)
    )
    assert WAYS.keys() <= set(found["metric"])
    # Where values are computed every third round and after the last, the last round of the first part has some, too.
    found = found[(found["metric"] != "sparse") | (found["round"] == 2)]
    pandas.testing.assert_frame_equal(
        found.reset_index(drop=True), expected.reset_index(drop=True), check_exact=True
    )
