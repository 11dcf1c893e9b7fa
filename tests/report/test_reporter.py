"""What a run leaves behind: one event file, curves over rounds, figures, the CSV, other loggers, the table."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toys import Plain, fit, network, toy_data

from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.data import FederatedDataModule
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley, DomainRelevance
from flsv.personalization import PFedSV
from flsv.sampling import UniformSampler


def loop(**kwargs: Any) -> FederatedLoop:
    return FederatedLoop(ShapFedWA("cssv"), {"cssv": ClassSpecificShapley()}, seed=1, **kwargs)


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard(tmp_path: Path) -> None:
    federation = loop(reporting=Reporting(figures=2), evaluation=ClientEvaluation(every=1))
    fit(federation, tmp_path, rounds=5, logger=TensorBoardLogger(tmp_path, name="", version="run"))
    seen = events(tmp_path / "run")
    final = federation.metrics["cssv"].compute()
    gamma = federation.metrics["cssv"].per_client(final)
    for i in range(3):
        own = events(tmp_path / "run" / f"client {i}")
        last = {tag: own.Scalars(tag)[-1].value for tag in own.Tags()["scalars"]}
        assert last["Contributions/cssv"] == pytest.approx(gamma[i].item())
        assert last["cssv/class_2"] == pytest.approx(final[i, 2].item())
        for tag in ("Contributions/cssv", "cssv/class_1", "weight", "train_loss", "client_accuracy"):
            assert [event.step for event in own.Scalars(tag)] == list(range(5)), tag  # the round is the x-axis
    for tag in ("client_accuracy/mean", "val_acc"):
        assert [event.step for event in seen.Scalars(tag)] == list(range(5)), tag
    assert [image.step for image in seen.Images("Contributions/cssv")] == [1, 3, 4]
    assert [image.step for image in seen.Images("data/partition")] == [0]
    hparams = (tmp_path / "run" / "hparams.yaml").read_text()
    assert "aggregator: ShapFedWA()" in hparams
    assert "data/partitioner: SizePartitioner" in hparams


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


@pytest.mark.slow
def test_a_value_is_written_when_it_changes(tmp_path: Path) -> None:
    """What is in the file, carried over from round to round, is what the metrics said after every round."""
    said, cohorts = [], []

    class Remember(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            values = {("cssv", j): federation.contributions["cssv"].by_class[:, j].tolist() for j in range(3)}
            values["sv", ""] = federation.contributions["sv"].tolist()
            values["sv/stderr", ""] = federation.metrics["sv"].diagnostics()["stderr"].tolist()
            said.append({(m, i, c): v for (m, c), row in values.items() for i, v in enumerate(row) if v == v})
            cohorts.append({i for i, weight in enumerate(federation.weights.tolist()) if weight == weight})

    metrics = {"cssv": ClassSpecificShapley(), "sv": CumulativeShapley()}
    federation = FederatedLoop(metrics=metrics, sampler=UniformSampler(3), seed=1)
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    data = toy_data((1,) * 9, server_val=0.3, batch_size=4, client_test=0)
    module = Plain(network(batch_norm=False))
    fit(federation, tmp_path, module, data, rounds=6, logger=logger, callbacks=[Remember()])
    with (tmp_path / "run" / "contributions.csv").open() as file:
        rows = list(csv.DictReader(file))
    carried: dict[Any, float] = {}
    for index in range(6):
        new = [row for row in rows if row["round"] == str(index)]
        assert {int(row["client"]) for row in new} == cohorts[index]
        for row in new:
            column = int(row["class"]) if row["class"] else ""
            carried[row["metric"], int(row["client"]), column] = float(row["value"])
        assert {key: carried[key] for key in said[index]} == said[index]
    for i in range(9):
        rounds = [event.step for event in events(tmp_path / "run" / f"client {i}").Scalars("Contributions/cssv")]
        assert rounds == [index for index in range(6) if i in cohorts[index]]


def test_a_resumed_run_whose_file_is_gone_writes_everything_once(tmp_path: Path) -> None:
    make = partial(loop, sampler=UniformSampler(2), reporting=Reporting(figures=0))
    checkpoint = ModelCheckpoint(tmp_path, filename="last", enable_version_counter=False)
    fit(make(), tmp_path / "first", rounds=3, callbacks=[checkpoint], enable_checkpointing=True)
    (tmp_path / "first" / "contributions.csv").unlink()
    resumed = make()
    with pytest.warns(UserWarning, match="is gone"):
        fit(resumed, tmp_path / "second", rounds=4, ckpt_path=tmp_path / "last.ckpt")
    with (tmp_path / "second" / "contributions.csv").open() as file:
        clients = {int(row["client"]) for row in csv.DictReader(file) if row["metric"] == "cssv"}
    assert clients == set((~resumed.contributions["cssv"].by_class.isnan().any(1)).nonzero().flatten().tolist())
    assert len(clients) == 3


def test_other_loggers_are_told_who_is_who(tmp_path: Path) -> None:
    class Hospitals(FederatedDataModule):
        client_names = ("Boston", "Lyon", "2")

    data = toy_data()
    data.__class__ = Hospitals
    fit(loop(), tmp_path, data=data, logger=CSVLogger(tmp_path, name="", version="run", flush_logs_every_n_steps=1))
    with (tmp_path / "run" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {"cssv/client_0_Boston", "cssv/class_1/client_1_Lyon", "weight/client_2"} <= rows[0].keys()
    assert "cssv/client_0" not in rows[0]
    assert {row["step"] for row in rows if row["cssv/client_0_Boston"]} == {"0", "1", "2"}


def test_the_table_names_every_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    federation = loop(evaluation=ClientEvaluation(every=1))
    data = toy_data()
    fit(federation, tmp_path, data=data)
    text = capsys.readouterr().out
    assert "cssv by class" in text
    weights = federation.weights
    for i in range(3):
        assert f"{int(data.num_samples[i])}" in text
        assert f"{weights[i]:.3f}" in text
    fit(loop(reporting=Reporting(table=False)), tmp_path)
    assert "cssv" not in capsys.readouterr().out


def test_the_progress_bar_shows_round_client_and_validation(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import Callback, TQDMProgressBar

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
