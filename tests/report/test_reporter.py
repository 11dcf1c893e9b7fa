"""What a run leaves behind: one event file, curves over rounds, figures, the CSV, other loggers, the table."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import Plain, fit, toy_data

from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, DomainRelevance
from flsv.personalization import PFedSV
from flsv.sampling import UniformSampler


def loop(**kwargs: Any) -> FederatedLoop:
    return FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, seed=1, **kwargs)


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_per_class_curves_and_figures_can_be_left_out(tmp_path: Path) -> None:
    fit(
        loop(reporting=Reporting(per_class=False, figures=0)),
        tmp_path,
        logger=TensorBoardLogger(tmp_path, name="", version="run"),
    )
    tags = events(tmp_path / "run").Tags()
    scalars = {tag for folder in (tmp_path / "run").glob("client *") for tag in events(folder).Tags()["scalars"]}
    ends = {"cssv/value", "cssv/low", "cssv/high"}
    assert scalars == {"Contributions/cssv", *ends, "weight", "train_loss", "update_norm"}
    assert tags["images"] == ["data/partition"]


def test_csv_is_tidy_and_complete(tmp_path: Path) -> None:
    federation = loop(sampler=UniformSampler(2), evaluation=ClientEvaluation(every=2))
    fit(federation, tmp_path, rounds=4)  # without any logger, it lies in default_root_dir
    with (tmp_path / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))
    final = federation.contributions["cssv"].by_class
    last = {
        (row["client"], row["class"]): float(row["value"])
        for row in rows  # the last one written is the value
        if row["metric"] == "cssv"
    }
    for i in range(3):
        for j in range(3):
            if final[i, j].isfinite():
                assert last[str(i), str(j)] == pytest.approx(final[i, j].item(), rel=1e-6)
    assert {row["round"] for row in rows} == {"0", "1", "2", "3"}
    weights = [row for row in rows if row["metric"] == "weight"]
    assert len(weights) == 4 * 2  # nobody outside the cohort has one
    for r in range(4):
        assert sum(float(row["value"]) for row in weights if row["round"] == str(r)) == pytest.approx(1)
    assert {row["round"] for row in rows if row["metric"] == "accuracy"} == {"1", "3"}
    keys = [(row["round"], row["metric"], row["client"], row["class"]) for row in rows]
    assert len(keys) == len(set(keys))


def test_the_progress_bar_shows_round_client_and_validation(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import TQDMProgressBar

    shown = []

    class Shows(Plain):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_acc", torch.tensor(0.5), prog_bar=True)

    class Look(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            shown.append(trainer.progress_bar_callback.get_metrics(trainer, module))

    bar = TQDMProgressBar()
    fit(loop(), tmp_path, Shows(), rounds=2, enable_progress_bar=True, callbacks=[bar, Look()])
    clients = [row["client"] for row in shown]
    assert list(dict.fromkeys(clients)) == ["1/3", "2/3", "3/3"]
    assert [row["round"] for row in shown] == ["1/2"] * (len(shown) // 2) + ["2/2"] * (len(shown) // 2)
    assert shown[-1]["val_acc"] == 0.5
    assert "get_metrics" not in bar.__dict__


def test_columns_that_are_no_classes(tmp_path: Path) -> None:
    """Pairs of clients: named in the CSV and the table, in TensorBoard a figure and a number per client."""
    metrics = {"relevance": DomainRelevance(truth=torch.eye(3).roll(1, 0)), "cost": CommunicationCost()}
    federation = FederatedLoop(metrics=metrics, personalizer=PFedSV(), seed=1, reporting=Reporting(figures=1))
    data = toy_data(client_val=0.2, drop_last=True)
    fit(federation, tmp_path, data=data, rounds=2, logger=TensorBoardLogger(tmp_path, name="", version="run"))
    with (tmp_path / "run" / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))
    scores = {(r["client"], r["class"]): float(r["value"]) for r in rows if r["metric"] == "relevance" and r["class"]}
    final = federation.contributions["relevance"].by_class
    known = [(i, j) for i in range(3) for j in range(3) if not final[i, j].isnan()]
    assert len(known) > 3
    assert scores == {(str(i), str(j)): pytest.approx(final[i, j].item()) for i, j in known}
    cost = {(r["client"], r["class"]): r["value"] for r in rows if r["metric"] == "cost"}
    size = federation.space.size
    # Whole numbers: two models up, and what every model is worth to it; the first model down, and the others'.
    downloads = [int(float(cost[str(i), "down"])) // size - 1 for i in range(3)]
    assert [float(cost[str(i), "up"]) for i in range(3)] == [2 * size + 2 + downloads[i] for i in range(3)]
    assert [float(cost[str(i), "down"]) for i in range(3)] == [(1 + downloads[i]) * size for i in range(3)]
    seen = events(tmp_path / "run")
    tags = seen.Tags()
    assert not [tag for tag in tags["scalars"] if "class_" in tag]
    assert {"relevance/auroc", "relevance/found", "cost/bytes_down"} <= set(tags["scalars"])
    for client in range(3):
        scalars = events(tmp_path / "run" / f"client {client}").Tags()["scalars"]
        assert {"Contributions/relevance", "Contributions/cost"} <= set(scalars)
    assert {"Contributions/relevance", "Contributions/cost"} <= set(tags["images"])
