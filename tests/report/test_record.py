"""``run.json``: there from the start, whole after a kill, and right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
from toys import fit, toy_data

from flsv import Reporting
from flsv.aggregation import ShapFedWA
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost
from flsv.report import open_run
from flsv.report.record import write_record


def loop(**options: Any) -> FederatedLoop:
    metrics = {"cssv": ClassSpecificShapley(), "cost": CommunicationCost()}
    return FederatedLoop(ShapFedWA("cssv"), metrics, seed=3, reporting=Reporting(table=False), **options)


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_it_says_what_the_run_was(tmp_path: Path) -> None:
    data = toy_data()
    fit(loop(), tmp_path, data=data, rounds=2)
    record = read(tmp_path)
    assert record["clients"] == list(data.client_names)
    assert record["metrics"]["cssv"]["guide"] == ClassSpecificShapley(3, 3).guide().lines()
    assert record["samples"] == data.num_samples.tolist()
    assert record["class_counts"] == data.class_counts.tolist()
    assert record["classes"] == [str(name) for name in data.class_names]
    assert record["algorithm"]["aggregator"] == "ShapFedWA"
    assert record["settings"]["federation_seed"] == 3
    assert set(record["hashes"]) == {"0", "1", "2", "server"}
    assert record["metrics"]["cssv"]["per_class"] is True
    assert record["metrics"]["cost"]["columns"] == ["up", "down"]
    assert record["metrics"]["cssv"]["about"].startswith("Class-specific Shapley values (CSSV)")
    assert (record["rounds"], record["rounds_done"]) == (2, 2)
    assert record["logged"]["val_acc"] > 0
    assert open_run(tmp_path).ended is True


def test_it_is_there_in_the_first_round_and_not_ended(tmp_path: Path) -> None:
    class Look(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            seen.append(open_run(tmp_path).ended)

    seen: list[bool | None] = []
    fit(loop(), tmp_path, rounds=2, callbacks=[Look()])
    assert seen == [False, False]
    assert open_run(tmp_path).ended is True


def test_what_is_no_number_and_no_text_can_be_written(tmp_path: Path) -> None:
    write_record(tmp_path, {"a": float("nan"), "b": (1, float("inf")), "c": {2: Path}, "d": None})
    assert read(tmp_path) == {"a": None, "b": [1, None], "c": {"2": repr(Path)}, "d": None}
