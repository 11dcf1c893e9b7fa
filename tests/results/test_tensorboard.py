"""What TensorBoard is given: runs of clients, its tabs, and that a killed run goes on in the same files."""

from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
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
#: The names of the clients' runs in TensorBoard.
RUNS = ("Boston", "St. Mary's_East", "client 2")
CLASSES = ["T-shirt/top", "Dress", "2"]


class DataWithClientNames(FederatedDataModule):
    @property
    def client_names(self) -> tuple[str, ...]:
        return NAMES


def make_named_data() -> FederatedDataModule:
    data = toy_data(server_val=0.3)
    data.source[0].classes = CLASSES
    data.__class__ = DataWithClientNames
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


@pytest.fixture(scope="module")
def curves_by_run(fitted_run):
    _, folder = fitted_run
    return read_scalars(folder)


def steps_of(points: Points) -> list[int]:
    return [step for step, _ in points]


def last_value_of(points: Points) -> float:
    _, value = points[-1]
    return value


TAGS_OF_CLIENT = {
    "cssv/class_0_T-shirt_top",
    "cssv/class_1_Dress",
    "cssv/class_2",
    "weight",
    "train_loss",
    "update_norm",
    "client_accuracy",
    "client_balanced_accuracy",
    "client_auroc",
    "Contributions/cssv",
    "Contributions/sv",
    "Contributions/cost",
}


@pytest.mark.slow
def test_every_client_has_a_tensorboard_run_with_its_tags(curves_by_run):
    assert set(curves_by_run) == {".", "result", *RUNS}
    for run in RUNS:
        tags = {tag for tag in curves_by_run[run] if not tag.endswith("/stderr")}
        assert tags == TAGS_OF_CLIENT


@pytest.mark.slow
def test_tensorboard_shows_contributions_first(curves_by_run):
    all_tags = set().union(*curves_by_run.values())
    assert min(all_tags).startswith("Contributions/")


def test_clients_curves_have_the_steps_and_last_values_of_the_run(fitted_run, curves_by_run):
    loop, _ = fitted_run
    dress_values = loop.values["cssv"].by_class[:, 1]
    for client, run in enumerate(RUNS):
        curves = curves_by_run[run]
        assert steps_of(curves["Contributions/cssv"]) == [0, 1, 2, 3]
        assert steps_of(curves["client_accuracy"]) == [1, 3]
        dress_value = last_value_of(curves["cssv/class_1_Dress"])
        assert dress_value == pytest.approx(dress_values[client].item())
        assert last_value_of(curves["weight"]) == pytest.approx(loop.weights[client].item())


def test_run_beside_the_clients_has_curves_of_no_client_or_class(curves_by_run):
    tags = set(curves_by_run["."])
    last_parts = {tag.split("/")[-1] for tag in tags}
    assert not any("client_" in part or "class_" in part for part in last_parts)
    assert {"val_acc", "sv/evaluations", "cost/bytes_up", "client_accuracy/mean"} <= tags


@pytest.mark.slow
def test_more_than_30_clients_are_tags_of_one_tensorboard_run(tmp_path):
    num_clients = 31
    data = toy_data((1,) * num_clients, client_test=0)
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()}, seed=1, reporting=Reporting(figures=0)
    )
    fit(loop, tmp_path, data=data, rounds=1, logger=make_logger(tmp_path))
    runs = read_scalars(tmp_path / "run")

    assert set(runs) == {".", "result"}
    assert set(runs["result"]) == {"val_acc"}
    for tag in ("cssv/class_1", "cssv"):
        assert {f"{tag}/client_{client}" for client in range(num_clients)} <= set(runs["."])
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


def test_hparams_tab_has_the_runs_settings(fitted_run):
    _, folder = fitted_run
    ((settings, _numbers),) = read_hparams_tab(folder).values()

    assert settings["aggregator"].string_value == repr(ShapFedWA("cssv"))
    assert settings["federation_seed"].number_value == 1
    assert settings["width"].number_value == 8
    assert "_class_path" not in settings


def test_hparams_tab_has_final_scores_and_values(fitted_run, curves_by_run):
    loop, folder = fitted_run
    ((_settings, numbers),) = read_hparams_tab(folder).values()

    last_accuracy = last_value_of(curves_by_run["."]["val_acc"])
    expected = {"val_acc": last_accuracy, "performance/accuracy": last_accuracy}
    parts_of_tags = ("client_0_Boston", "client_1_St._Mary_s_East", "client_2")
    for metric in ("cssv", "sv", "cost"):
        for part, value in zip(parts_of_tags, loop.contributions[metric].tolist()):
            expected[f"{metric}/{part}"] = value

    gain = numbers.pop("gain/accuracy")
    assert 0 < gain < last_accuracy
    assert numbers == pytest.approx(expected)


LAST_ROUND = 4


def write_last_round(folder: Path, names: list[str], accuracy: float):
    """Write the end of a run in the folder ``North-South``, if North and South are the clients.

    Clients' values are 0, 1, ...
    """
    logger = TensorBoardLogger(folder, name="", version="-".join(names))
    curves = Curves({"gain": MeanMetric()}, names, class_names=None)
    sink = TensorBoard(logger, curves)
    sink.write_settings(0, {"clients": len(names)}, partition=plt.figure)

    values = {client: float(client) for client in range(len(names))}
    rows = client_rows(LAST_ROUND, "gain", values, names)
    gain = {"by": "accuracy", "start": None, "end": accuracy}
    record = {"paid_in": {"gain": gain}, "logged": {"val_loss": float("nan")}}
    sink.finish(RunResult(round_index=LAST_ROUND, table=frame(rows), record=record, pictures={}))
    sink.close()
    logger.experiment.close()


def test_hparams_tab_compares_runs_with_other_clients(tmp_path):
    write_last_round(tmp_path, ["result"], accuracy=1.0)
    write_last_round(tmp_path, ["North", "South"], accuracy=2.0)

    rows = read_hparams_tab(tmp_path)

    # Rows are named RUN/result. In the first run this is the name of a client.
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
    client_values = torch.tensor([0.3, 0.31, 0.1], dtype=torch.float64)
    metric.update(torch.arange(3), masks, lambda members: members.double() @ client_values)
    values = metric.result()

    figure = draw_metric(metric, "value", values, round_index=4)

    (axis,) = figure.axes
    assert axis.get_title() == "value, round 5, 90 % intervals over seeds"
    (whiskers,) = axis.collections
    drawn_intervals = np.array([segment[:, 1] for segment in whiskers.get_segments()])
    intervals = torch.stack([values.low, values.high], dim=1)
    assert drawn_intervals == pytest.approx(intervals.numpy())


def test_settings_count_validation_samples_that_are_not_of_the_clients_data():
    data = make_tables()
    data.prepare_data()
    data.setup("fit")

    settings = hyperparameters(FederatedLoop().config, {}, data=data, seed=0)

    assert settings["data/server_val_samples"] == ROWS["val"]


class ModuleThatLogsEachStep(Plain):
    def training_step(self, batch, batch_idx):
        result = super().training_step(batch, batch_idx)
        loss = result["loss"] if isinstance(result, dict) else result
        self.log("step_loss", loss, on_step=True)
        return result


class CallbackThatFailsWithinRound2(InRound):
    """Fails after five batches, whose curves are written."""

    def on_train_batch_end(self, trainer, pl_module, *hook):
        if trainer.current_epoch == 2 and self.batch_of_round(trainer) == 4:
            trainer.loggers[0].save()
            raise KeyError("killed")


def fit_with_curves(folder, rounds, after_epoch=None, callbacks=()):
    """Fit, from the checkpoint after an epoch on if there is one."""
    saving = ModelCheckpoint(folder / "saved", "{epoch}", save_top_k=-1)
    checkpoint = None if after_epoch is None else folder / "saved" / f"epoch={after_epoch}.ckpt"
    fit(
        FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1),
        folder,
        ModuleThatLogsEachStep(),
        rounds=rounds,
        ckpt_path=checkpoint,
        enable_checkpointing=True,
        callbacks=[saving, *callbacks],
        logger=make_logger(folder),
    )


def read_sorted_curves(folder: Path) -> dict[str, PointsByTag]:
    """Read the curves of a run, whose points may have been written more than once."""
    sorted_curves = {}
    for path, curves in read_scalars(folder / "run").items():
        sorted_curves[path] = {tag: sorted(set(points)) for tag, points in curves.items()}
    return sorted_curves


@pytest.mark.slow
def test_tensorboard_curves_of_a_resumed_run_equal_those_of_an_uninterrupted_run(tmp_path):
    whole_folder = tmp_path / "whole"
    fit_with_curves(whole_folder, rounds=4)

    folder = tmp_path / "resumed"
    with pytest.raises(KeyError, match="killed"):
        fit_with_curves(folder, rounds=4, callbacks=[CallbackThatFailsWithinRound2()])
    fit_with_curves(folder, rounds=3, after_epoch=1)
    # Rounds that have been trained already are trained again.
    fit_with_curves(folder, rounds=4, after_epoch=0)

    expected = read_sorted_curves(whole_folder)
    assert len(expected["."]["step_loss"]) > 4 * 5
    assert read_sorted_curves(folder) == expected


def rounds_with_pictures(folder, metric, figures):
    """Return the rounds after which a run of three rounds has drawn its metric's values."""
    reporting = Reporting(figures=figures)
    loop = FederatedLoop(metrics={"value": metric}, seed=1, reporting=reporting)
    module = Plain(network(batch_norm=False))
    fit(loop, folder, module, toy_data(server_val=0.3), rounds=3, logger=make_logger(folder))

    pictures = read_events(folder / "run").Images("Contributions/value")
    return [picture.step for picture in pictures]


@pytest.fixture
def set_time_for_pictures(monkeypatch):
    """``set_time_for_pictures(share)``: the share of a run's time in which pictures are drawn before its end."""
    return partial(monkeypatch.setattr, "flsv.results.tensorboard.MAX_PART_FOR_PICTURES")


def test_pictures_are_drawn_at_the_end_if_there_is_no_time_before(tmp_path, set_time_for_pictures):
    set_time_for_pictures(0.0)
    assert rounds_with_pictures(tmp_path, ClassSpecificShapley(), figures=None) == [2]


@pytest.mark.slow
def test_pictures_are_drawn_after_each_round_if_there_is_time(tmp_path, set_time_for_pictures):
    set_time_for_pictures(1.0)
    assert rounds_with_pictures(tmp_path, ClassSpecificShapley(), figures=None) == [0, 1, 2]


@pytest.mark.slow
def test_pictures_are_drawn_after_each_round_if_they_are_asked_for(tmp_path, set_time_for_pictures):
    set_time_for_pictures(0.0)
    assert rounds_with_pictures(tmp_path, ShadowShapley(), figures=1) == [0, 1, 2]
