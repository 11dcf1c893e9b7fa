"""What TensorBoard is given: runs of clients, its tabs, and that a killed run goes on in the same files."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.metrics import run_tag_from_session_and_metric
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from toys import Plain, fit, network, toy_data

from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.data import FederatedDataModule
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley
from flsv.report.run_table import Numbers, rows_of
from flsv.report.tensorboard import TensorBoard
from flsv.round.result import RoundResult

NAMES = ("Boston", "St. Mary's/East", "2")
#: Of the clients: names that begin with what differs.
RUNS = ("Boston", "St. Mary's_East", "client 2")
CLASSES = ["T-shirt/top", "Dress", "2"]


class Named(FederatedDataModule):
    """Three hospitals."""

    @property
    def client_names(self) -> tuple[str, ...]:
        return NAMES


def named(**kwargs: Any) -> Named:
    data = toy_data(server_val=0.3, **kwargs)
    data.source[0].classes = CLASSES  # type: ignore[index, union-attr]
    data.__class__ = Named
    return data  # type: ignore[return-value]


def events(folder: Path, **sizes: int) -> EventAccumulator:
    guidance = {"images": 0, "scalars": 0, "tensors": 0, "histograms": 0}
    return EventAccumulator(str(folder), size_guidance={**guidance, **sizes}).Reload()


def scalars(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Of every run below: its path to tag to steps and values."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(dict)
    for place in sorted({file.parent for file in folder.rglob("events*")}):
        seen = events(place)
        for tag in seen.Tags()["scalars"]:
            found[place.relative_to(folder).as_posix()][tag] = [(e.step, e.value) for e in seen.Scalars(tag)]
    return found


def text(seen: EventAccumulator, tag: str) -> str:
    return seen.Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0].decode()


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederatedLoop, Path]:
    folder = tmp_path_factory.mktemp("named")
    metrics = {"cssv": ClassSpecificShapley(), "sv": CumulativeShapley(), "cost": CommunicationCost()}
    loop = FederatedLoop(ShapFedWA("cssv"), metrics, seed=1, evaluation=ClientEvaluation(every=2))
    logger = TensorBoardLogger(folder, name="", version="run")
    fit(loop, folder, Plain(network(batch_norm=False)), named(), rounds=4, logger=logger)
    return loop, folder / "run"


@pytest.mark.slow
def test_every_client_has_a_run(fitted: tuple[FederatedLoop, Path]) -> None:
    loop, folder = fitted
    found = scalars(folder)
    assert set(found) == {".", *RUNS}
    tags = {"cssv/class_0_T-shirt_top", "cssv/class_1_Dress", "cssv/class_2"}
    tags |= {f"Contributions/{name}" for name in ("cssv", "sv", "cost")}
    groups = {tag.partition("/")[0] for numbers in found.values() for tag in numbers}
    assert min(groups) == "Contributions"  # which TensorBoard shows first
    for i, place in enumerate(RUNS):
        own = {"client_accuracy", "client_balanced_accuracy", "client_auroc"}
        assert {*tags, "weight", "train_loss", "update_norm", *own} <= set(found[place])
        assert [step for step, _ in found[place]["Contributions/cssv"]] == [0, 1, 2, 3]
        assert [step for step, _ in found[place]["client_accuracy"]] == [1, 3]
        assert found[place]["cssv/class_1_Dress"][-1][1] == pytest.approx(
            loop.contributions["cssv"].by_class[i, 1].item()
        )
        assert found[place]["weight"][-1][1] == pytest.approx(loop.weights[i].item())  # type: ignore[index]
    # What is nobody's alone, and nothing else.
    assert not [tag for tag in found["."] if "client_" in tag.split("/")[-1] or "class_" in tag]
    assert {"val_acc", "sv/evaluations", "cost/bytes_up", "client_accuracy/mean"} <= set(found["."])


def test_custom_scalars_find_their_curves(fitted: tuple[FederatedLoop, Path]) -> None:
    _, folder = fitted
    found = scalars(folder)
    stored = events(folder).Tensors("custom_scalars__config__")
    assert len(stored) == 1
    charts = Layout.FromString(stored[0].tensor_proto.string_val[0])
    shown = {
        (category.title, chart.title): sorted(
            place
            for place, tags in found.items()
            for tag in tags
            for wanted in chart.multiline.tag
            if re.match(wanted, tag)
        )
        for category in charts.category
        for chart in category.chart
    }
    everybody = [("all clients", name) for name in ("cssv", "sv", "cost", "weight", "train_loss", "update_norm")]
    everybody += [("all clients", f"client_{name}") for name in ("accuracy", "balanced_accuracy", "auroc")]
    everybody += [("cssv by class", name) for name in ("T-shirt/top", "Dress", "class 2")]
    assert shown == {
        **dict.fromkeys(everybody, sorted(RUNS)),
        ("cssv by class", "all classes: choose a client on the left"): sorted(3 * RUNS),
        **{("all clients, intervals of this run only", name): [] for name in ("cssv", "sv")},  # no lines: margins
    }
    margins = [
        chart.margin.series[0] for category in charts.category for chart in category.chart if not chart.multiline.tag
    ]
    assert len(margins) == 2
    for place in RUNS:
        for series in margins:
            value, low, high = (found[place][tag] for tag in (series.value, series.lower, series.upper))
            # There is none after the first round; else TensorBoard shows an error in place of the chart.
            assert [step for step, _ in value] == [step for step, _ in low] == [step for step, _ in high] == [1, 2, 3]
            assert value == found[place][f"Contributions/{series.value.removesuffix('/value')}"][1:]


def test_many_clients_are_tags_of_one_run(tmp_path: Path) -> None:
    data = toy_data((1,) * 31, client_test=0)
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1, reporting=Reporting(figures=0))
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    fit(loop, tmp_path, data=data, rounds=1, logger=logger)
    found = scalars(tmp_path / "run")
    assert set(found) == {"."}
    clients = range(data.num_clients)
    assert {f"cssv/client_{i}" for i in clients} < set(found["."])
    assert {f"cssv/class_{j}/client_{i}" for i in clients for j in range(3)} < set(found["."])
    stored = events(tmp_path / "run").Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]
    charts = {(c.title, chart.title): chart for c in Layout.FromString(stored).category for chart in c.chart}
    (wanted,) = charts["cssv by class", "class 1"].multiline.tag
    assert {tag for tag in found["."] if re.match(wanted, tag)} == {f"cssv/class_1/client_{i}" for i in clients}
    (wanted,) = charts["all clients", "cssv"].multiline.tag
    assert {tag for tag in found["."] if re.match(wanted, tag)} == {f"cssv/client_{i}" for i in clients}
    assert ("cssv by client", "client 1") not in charts


def result(index: int, numbers: Sequence[Numbers], names: Sequence[str], **shared: float) -> RoundResult:
    rows = rows_of(index, numbers, names)
    return RoundResult(index, False, {}, torch.ones(len(names)), {}, {}, {}, table=rows, changes=rows, shared=shared)


def test_the_table_of_runs(fitted: tuple[FederatedLoop, Path]) -> None:
    loop, folder = fitted
    contents = {}
    for tag, metadata in (events(folder).summary_metadata).items():
        if metadata.plugin_data.plugin_name == "hparams":
            contents[tag] = HParamsPluginData.FromString(metadata.plugin_data.content)
    experiment = contents["_hparams_/experiment"].experiment
    start = contents["_hparams_/session_start_info"].session_start_info
    chosen = {name: value.string_value or value.number_value for name, value in start.hparams.items()}
    assert set(chosen) == {"algorithm", "aggregator", "partitioner", "clients", "learning rate", "seed", "rounds"}
    assert (chosen["aggregator"], chosen["partitioner"]) == ("ShapFedWA", "Size")
    assert (chosen["algorithm"], chosen["clients"], chosen["rounds"], chosen["seed"]) == ("ShapFedWA", 3, 4, 1)
    assert not start.group_name  # so that it is the run's own, and no two runs are taken for one
    assert [info.display_name or info.name.tag for info in experiment.metric_infos] == [
        *("val_acc", "cssv Boston", "cssv St. Mary's/East", "cssv client 2"),
        *(f"{name} {client}" for name in ("sv", "cost") for client in ("Boston", "St. Mary's/East", "client 2")),
        *("client_accuracy/mean", "client_accuracy/min", "client_accuracy/std"),
        *("client_balanced_accuracy/mean", "client_auroc/mean"),
    ]
    found = scalars(folder.parent)
    for info in experiment.metric_infos:  # where TensorBoard looks for each
        place, tag = run_tag_from_session_and_metric("run", info.name)
        assert found[place][tag][-1][0] == 3
    seen = found["run"]
    assert "hp_metric" not in seen
    accuracy = loop.client_accuracy
    assert accuracy is not None
    numbers = accuracy.numpy().astype(float)
    assert seen["client_accuracy/min"][-1] == (3, pytest.approx(numbers.min()))
    assert seen["client_accuracy/std"][-1] == (3, pytest.approx(np.std(numbers)))


def test_texts(fitted: tuple[FederatedLoop, Path]) -> None:
    loop, folder = fitted
    seen = events(folder)
    settings = text(seen, "settings")
    assert "| aggregator | ShapFedWA() |" in settings
    table = text(seen, "contributions").splitlines()
    own = "own accuracy | own balanced accuracy | own AUROC"
    assert table[0] == f"| client | samples | rounds | cssv | sv | share | cost | weight | {own} |"
    assert [line.split(" | ")[0] for line in table[2:]] == ["| Boston", "| St. Mary's/East", "| client 2"]
    assert "\\[" in table[3]
    assert seen.Tensors("contributions/text_summary")[-1].step == 3


def test_a_round_that_was_written_and_lost_is_there_once(tmp_path: Path) -> None:
    def write(first: int, rounds: range, value: float) -> None:
        logger = TensorBoardLogger(tmp_path, name="", version="run")
        trainer = SimpleNamespace(callback_metrics={}, max_epochs=9)
        metrics = {"cssv": ClassSpecificShapley()}
        board = TensorBoard(logger, trainer, metrics, ["Boston"], ["0"], Reporting(figures=0))  # type: ignore[arg-type]
        board.begin(first, {}, {}, Figure)
        for index in rounds:
            numbers = [Numbers("cssv", [[value + index]], {"0": "0"})]
            board.write(result(index, numbers, ["Boston"], all=value + index))
        board.flush()
        board.close()
        logger.finalize("success")

    write(0, range(4), 0.0)
    write(2, range(2, 5), 10.0)
    rows = [(0, 0.0), (1, 1.0), (2, 12.0), (3, 13.0), (4, 14.0)]
    assert scalars(tmp_path / "run") == {".": {"all": rows}, "Boston": {"cssv/class_0": rows}}
