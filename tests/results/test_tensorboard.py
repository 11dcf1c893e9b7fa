"""What TensorBoard is given: runs of clients, its tabs, and that a killed run goes on in the same files."""

import shutil
from pathlib import Path
from typing import Any

import lightning as L
import matplotlib.pyplot as plt
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams.api_pb2 import STATUS_SUCCESS, ListSessionGroupsRequest
from tensorboard.plugins.hparams.backend_context import Context
from tensorboard.plugins.hparams.list_session_groups import Handler
from torchmetrics import MeanMetric

from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.configuration.identity import hyperparameters
from flsv.core.artifacts import client_folders
from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop
from flsv.functional import few_coalitions
from flsv.metrics import (
    ClassSpecificShapley,
    CommunicationCost,
    ContributionMetric,
    CumulativeShapley,
    ShadowShapley,
)
from flsv.results.curves import Curves
from flsv.results.round_result import RunResult
from flsv.results.rows import client_rows, draw_metric
from flsv.results.run_table import frame
from flsv.results.tensorboard import TensorBoard
from helpers.data import toy_data
from helpers.fits import InRound, fit
from helpers.hospitals import ROWS, make_tables
from helpers.models import Plain, network

NAMES = ("Boston", "St. Mary's/East", "2")
#: Of the clients: names that begin with what differs.
RUNS = ("Boston", "St. Mary's_East", "client 2")
CLASSES = ["T-shirt/top", "Dress", "2"]


class Named(FederatedDataModule):
    @property
    def client_names(self) -> tuple[str, ...]:
        return NAMES


def make_named_data() -> FederatedDataModule:
    data = toy_data(server_val=0.3)
    data.source[0].classes = CLASSES
    data.__class__ = Named
    return data


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0}
    ).Reload()


def test_clients_named_like_files_of_a_run_get_other_folders(tmp_path):
    names = ["config.yaml", "Checkpoints", "contributions.csv", "St. Anna", "Clinic no. 2"]
    assert client_folders(names) == [
        "config.yaml_0",
        "Checkpoints_1",
        "contributions.csv_2",
        *names[3:],
    ]


def make_logger(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name="", version="run")


#: Steps and values of a curve.
Points = list[tuple[int, float]]
#: Of a run, by tag.
PointsByTag = dict[str, Points]


def read_scalars(folder: Path) -> dict[str, PointsByTag]:
    """Read the scalars of every run in a folder, by its path."""
    runs = {}
    folders = {file.parent for file in folder.rglob("events*")}
    for run in sorted(folders):
        name = run.relative_to(folder).as_posix()
        runs[name] = read_curves(run)
    return runs


def read_curves(run: Path) -> PointsByTag:
    run_events = read_events(run)
    curves = {}
    for tag in run_events.Tags()["scalars"]:
        points = run_events.Scalars(tag)
        curves[tag] = [(point.step, point.value) for point in points]
    return curves


@pytest.fixture(scope="module")
def fitted_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("named")
    metrics = {
        "cssv": ClassSpecificShapley(),
        "sv": CumulativeShapley(),
        "cost": CommunicationCost(),
    }
    evaluation = ClientEvaluation(every=2)
    loop = FederatedLoop(ShapFedWA("cssv"), metrics, seed=1, evaluation=evaluation)
    module = Plain(network(batch_norm=False))
    module.save_hyperparameters({"_class_path": "project.Plain", "width": 8})
    data = make_named_data()
    logger = make_logger(folder)
    fit(loop, folder, module, data, rounds=4, logger=logger)

    return loop, folder / "run"


def steps_of(points: Points) -> list[int]:
    return [step for step, _ in points]


def test_every_client_has_a_tensorboard_run(fitted_run):
    loop, folder = fitted_run
    runs = read_scalars(folder)

    assert set(runs) == {".", "result", *RUNS}

    tags = {
        "cssv/class_0_T-shirt_top",
        "cssv/class_1_Dress",
        "cssv/class_2",
        "weight",
        "train_loss",
        "update_norm",
    }
    tags |= {f"client_{score}" for score in ("accuracy", "balanced_accuracy", "auroc")}
    tags |= {f"Contributions/{name}" for name in ("cssv", "sv", "cost")}
    all_tags = set().union(*runs.values())
    first_tag = min(all_tags)

    assert first_tag.startswith("Contributions/")  # TensorBoard shows it first

    dress_values = loop.contributions["cssv"].by_class[:, 1].tolist()
    for client, name in enumerate(RUNS):
        curves = runs[name]
        assert {tag for tag in curves if not tag.endswith("/stderr")} == tags
        assert steps_of(curves["Contributions/cssv"]) == [0, 1, 2, 3]
        assert steps_of(curves["client_accuracy"]) == [1, 3]

        _, dress_value = curves["cssv/class_1_Dress"][-1]
        _, weight = curves["weight"][-1]
        assert dress_value == pytest.approx(dress_values[client])
        assert weight == pytest.approx(loop.weights[client].item())

    # What is nobody's alone, and nothing else.
    shared = set(runs["."])
    last_parts = {tag.split("/")[-1] for tag in shared}

    assert not any("client_" in part or "class_" in part for part in last_parts)
    assert {"val_acc", "sv/evaluations", "cost/bytes_up", "client_accuracy/mean"} <= shared


def test_more_than_30_clients_are_tags_of_one_tensorboard_run(tmp_path):
    data = toy_data((1,) * 31, client_test=0)
    metrics = {"cssv": ClassSpecificShapley()}
    reporting = Reporting(figures=0)
    loop = FederatedLoop(metrics=metrics, seed=1, reporting=reporting)
    logger = make_logger(tmp_path)
    fit(loop, tmp_path, data=data, rounds=1, logger=logger)
    runs = read_scalars(tmp_path / "run")

    assert set(runs) == {".", "result"}
    assert set(runs["result"]) == {"val_acc"}
    for tag in ("cssv/class_1", "cssv"):
        assert {f"{tag}/client_{i}" for i in range(31)} <= set(runs["."])
    assert read_events(tmp_path / "run").Tags()["images"] == ["data/partition"]


def make_tab_context(folder: Path) -> TBContext:
    """Return what TensorBoard's tabs read a folder with."""
    multiplexer = EventMultiplexer(tensor_size_guidance={"scalars": 100})
    multiplexer.AddRunsFromDirectory(str(folder)).Reload()
    return TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(folder)))


#: A row of the tab HParams: its settings, and its numbers by column.
Session = tuple[dict[str, Any], dict[str, float]]


def read_hparams_tab(folder: Path) -> dict[str, Session]:
    """The rows of the tab HParams, by their runs."""
    context = Context(make_tab_context(folder))
    request = RequestContext()
    contents = context.hparams_metadata(request, "")
    experiment = context.experiment_from_metadata(
        request,
        "",
        include_metrics=True,
        hparams_run_to_tag_to_content=contents,
        data_provider_hparams=[],
    )
    columns = {column.name.tag for column in experiment.metric_infos}
    ended = ListSessionGroupsRequest(slice_size=10, allowed_statuses=[STATUS_SUCCESS])
    response = Handler(request, context, "", ended).run()
    rows = {}
    for group in response.session_groups:
        (session,) = group.sessions
        numbers = {metric.name.tag: metric.value for metric in session.metric_values}
        assert numbers.keys() <= columns
        rows[session.name] = (dict(group.hparams), numbers)

    return rows


def test_hparams_tab_has_the_settings_and_final_numbers(fitted_run):
    loop, folder = fitted_run
    (session,) = read_hparams_tab(folder).values()
    settings, numbers = session

    assert settings["aggregator"].string_value == repr(ShapFedWA("cssv"))
    assert settings["federation_seed"].number_value == 1
    assert settings["width"].number_value == 8
    assert "_class_path" not in settings

    curve = read_scalars(folder)["."]["val_acc"]
    _, last_accuracy = curve[-1]
    expected = {"val_acc": last_accuracy, "performance/accuracy": last_accuracy}
    parts = ("client_0_Boston", "client_1_St._Mary_s_East", "client_2")
    for metric in ("cssv", "sv", "cost"):
        values = loop.contributions[metric].tolist()
        for part, value in zip(parts, values):
            expected[f"{metric}/{part}"] = value

    gain = numbers.pop("gain/accuracy")
    assert 0 < gain < last_accuracy
    assert numbers == pytest.approx(expected)


def write_end(
    folder: Path,
    names: list[str],
    accuracy: float,
):
    """Write the end of a run of five rounds, in the folder North-South for clients of these names.

    Clients' values are 0, 1, ...
    """
    version = "-".join(names)
    writes = TensorBoardLogger(folder, name="", version=version)
    curves = Curves({"gain": MeanMetric()}, names, class_names=None)
    sink = TensorBoard(writes, curves)
    settings = {"clients": len(names)}
    sink.write_settings(0, settings, partition=plt.figure)

    values = {client: float(client) for client in range(len(names))}
    rows = client_rows(4, "gain", values, names)
    game = {"by": "accuracy", "start": None, "end": accuracy}
    record = {
        "paid_in": {"gain": game},
        "logged": {"val_loss": float("nan")},
    }
    result = RunResult(
        round_index=4,
        table=frame(rows),
        record=record,
        pictures={},
    )
    sink.finish(result)
    sink.close()
    writes.experiment.close()


def test_hparams_tab_compares_runs_with_other_clients(tmp_path):
    write_end(tmp_path, ["result"], accuracy=1.0)
    write_end(tmp_path, ["North", "South"], accuracy=2.0)

    rows = read_hparams_tab(tmp_path)

    # A session is RUN/result. Of the run whose client has that name it is another.
    assert rows.keys() == {"result/result_1", "North-South/result"}

    settings, numbers = rows["result/result_1"]
    assert settings["clients"].number_value == 1
    assert numbers == {"performance/accuracy": 1.0, "gain/client_0_result": 0.0}

    settings, numbers = rows["North-South/result"]
    assert settings["clients"].number_value == 2
    assert numbers == {
        "performance/accuracy": 2.0,
        "gain/client_0_North": 0.0,
        "gain/client_1_South": 1.0,
    }


def test_picture_of_final_values_has_each_clients_interval():
    metric = ShadowShapley(num_clients=3)
    masks = few_coalitions(3, "all")
    member_values = torch.tensor([0.3, 0.31, 0.1], dtype=torch.float64)
    clients = torch.arange(3)
    metric.update(clients, masks, lambda members: members.double() @ member_values)
    values = metric.compute()
    intervals = metric.intervals(value=values)
    assert intervals is not None

    figure = draw_metric(metric, "value", values, round_index=4)

    (axis,) = figure.axes
    assert axis.get_title() == "value, round 5, 90 % intervals over seeds"
    (whiskers,) = axis.collections
    segments = whiskers.get_segments()
    expected_intervals = torch.stack(intervals, 1).tolist()
    for segment, expected_interval in zip(segments, expected_intervals):
        drawn_interval = segment[:, 1].tolist()
        assert drawn_interval == pytest.approx(expected_interval)
    assert len(segments) == len(values)


def test_settings_count_validation_samples_that_are_not_of_the_clients_data():
    data = make_tables()
    data.prepare_data()
    data.setup("fit")

    settings = hyperparameters(FederatedLoop().config, {}, data=data, seed=0)

    assert settings["data/server_val_samples"] == ROWS["val"]


class Noting(Plain):
    """A module that logs in every step, as callbacks of Lightning do."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", loss["loss"] if isinstance(loss, dict) else loss, on_step=True)
        return loss


class Dies(InRound):
    """In the middle of a round, when the curves of its first batches are written."""

    def on_train_batch_end(self, trainer, pl_module, *hook):
        if trainer.current_epoch == 3 and self.batch_of_round(trainer) == 4:
            trainer.loggers[0].save()
            raise KeyError("killed")


@pytest.mark.slow
def test_tensorboard_curves_of_a_resumed_run_equal_those_of_an_uninterrupted_run(tmp_path):
    """The run is killed, goes on with more rounds, and goes on from a checkpoint before that. What it trains again, it
    draws again at the same points."""

    def run(
        folder: Path,
        rounds: int,
        ckpt_path: Path | None = None,
        *more_callbacks: L.Callback,
    ) -> None:
        saving = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1)
        loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
        options = {
            "enable_checkpointing": True,
            "callbacks": [saving, *more_callbacks],
            "logger": make_logger(folder),
        }
        fit(loop, folder, Noting(), rounds=rounds, ckpt_path=ckpt_path, **options)

    run(tmp_path / "straight", 5)
    shutil.rmtree(tmp_path / "saved")

    with pytest.raises(KeyError, match="killed"):
        run(tmp_path / "resumed", 5, None, Dies())

    rounds_and_last_epochs = ((4, 2), (5, 3), (5, 1))
    for rounds, last_epoch in rounds_and_last_epochs:
        (checkpoint,) = (tmp_path / "saved").glob(f"epoch={last_epoch}.ckpt")
        run(tmp_path / "resumed", rounds, checkpoint)

    def curves(run_folder: Path) -> dict[str, Any]:
        sorted_curves = {}
        for path, tags in read_scalars(run_folder).items():
            sorted_curves[path] = {}
            for tag, points in tags.items():
                sorted_curves[path][tag] = sorted(set(points))
        return sorted_curves

    expected = curves(tmp_path / "straight/run")
    assert len(expected["."]["step_loss"]) > 5 * 5
    assert curves(tmp_path / "resumed/run") == expected


def picture_rounds(
    folder: Path,
    metric: ContributionMetric,
    figures: int | None,
    rounds: int = 3,
) -> list[int]:
    """Return the rounds after which a run has drawn its metric's values."""
    reporting = Reporting(figures=figures)
    metrics = {"value": metric}
    loop = FederatedLoop(metrics=metrics, seed=1, reporting=reporting)
    module = Plain(network(batch_norm=False))
    data = toy_data(server_val=0.3)
    logger = make_logger(folder)
    fit(loop, folder, module, data, rounds, logger=logger)

    run_events = read_events(folder / "run")
    pictures = run_events.Images("Contributions/value")
    return [picture.step for picture in pictures]


ALL_ROUNDS = [0, 1, 2]


@pytest.mark.parametrize(
    ("metric", "figures", "max_part", "rounds"),
    [
        (ClassSpecificShapley, None, 0.0, [2]),
        pytest.param(ClassSpecificShapley, None, 1.0, ALL_ROUNDS, marks=pytest.mark.slow),
        pytest.param(ShadowShapley, 1, 0.0, ALL_ROUNDS, marks=pytest.mark.slow),
    ],
    ids=["no time", "all the time", "asked for"],
)
def test_pictures_are_drawn_when_asked_for_and_before_the_end_in_a_part_of_the_time(
    tmp_path, monkeypatch, metric, figures, max_part, rounds
):
    monkeypatch.setattr("flsv.results.tensorboard.MAX_PART_FOR_PICTURES", max_part)

    assert picture_rounds(tmp_path, metric(), figures) == rounds
