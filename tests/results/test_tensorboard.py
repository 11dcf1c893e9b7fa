"""What TensorBoard is given: runs of clients, its tabs, and that a killed run goes on in the same files."""

import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from flsv import ClientEvaluation, Reporting
from flsv.aggregation import ShapFedWA
from flsv.core.artifacts import client_folders
from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop
from flsv.metrics import ClassSpecificShapley, CommunicationCost, CumulativeShapley
from helpers.data import toy_data
from helpers.fits import InRound, fit
from helpers.models import Plain, network

NAMES = ("Boston", "St. Mary's/East", "2")
#: Of the clients: names that begin with what differs.
RUNS = ("Boston", "St. Mary's_East", "client 2")
CLASSES = ["T-shirt/top", "Dress", "2"]


class Named(FederatedDataModule):
    @property
    def client_names(self) -> tuple[str, ...]:
        return NAMES


def named() -> FederatedDataModule:
    data = toy_data(server_val=0.3)
    data.source[0].classes = CLASSES  # type: ignore[index, union-attr]
    data.__class__ = Named
    return data


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(
        str(folder), size_guidance={"images": 0, "scalars": 0, "tensors": 0}
    ).Reload()


def test_clients_named_like_files_of_a_run_get_other_folders(tmp_path: Path) -> None:
    names = ["config.yaml", "Checkpoints", "contributions.csv", "St. Anna", "Clinic no. 2"]
    assert client_folders(names) == [
        "config.yaml_0",
        "Checkpoints_1",
        "contributions.csv_2",
        *names[3:],
    ]


def logger(folder: Path) -> TensorBoardLogger:
    return TensorBoardLogger(folder, name="", version="run")


def scalars(folder: Path) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Of every run below: its path to tag to steps and values."""
    found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(dict)
    for place in sorted({file.parent for file in folder.rglob("events*")}):
        seen = events(place)
        for tag in seen.Tags()["scalars"]:
            found[place.relative_to(folder).as_posix()][tag] = [
                (e.step, e.value) for e in seen.Scalars(tag)
            ]
    return found


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> tuple[FederatedLoop, Path]:
    folder = tmp_path_factory.mktemp("named")
    metrics = {
        "cssv": ClassSpecificShapley(),
        "sv": CumulativeShapley(),
        "cost": CommunicationCost(),
    }
    loop = FederatedLoop(ShapFedWA("cssv"), metrics, seed=1, evaluation=ClientEvaluation(every=2))
    fit(loop, folder, Plain(network(batch_norm=False)), named(), rounds=4, logger=logger(folder))
    return loop, folder / "run"


def test_every_client_has_a_tensorboard_run(fitted: tuple[FederatedLoop, Path]) -> None:
    loop, folder = fitted
    found = scalars(folder)
    assert set(found) == {".", *RUNS}
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
    groups = {tag.partition("/")[0] for numbers in found.values() for tag in numbers}
    assert min(groups) == "Contributions"  # which TensorBoard shows first
    for i, place in enumerate(RUNS):
        assert {tag for tag in found[place] if not tag.endswith("/stderr")} == tags
        assert [step for step, _ in found[place]["Contributions/cssv"]] == [0, 1, 2, 3]
        assert [step for step, _ in found[place]["client_accuracy"]] == [1, 3]
        assert found[place]["cssv/class_1_Dress"][-1][1] == pytest.approx(
            loop.contributions["cssv"].by_class[i, 1].item()
        )
        assert found[place]["weight"][-1][1] == pytest.approx(loop.weights[i].item())  # type: ignore[index]
    # What is nobody's alone, and nothing else.
    assert not [tag for tag in found["."] if "client_" in tag.split("/")[-1] or "class_" in tag]
    assert {"val_acc", "sv/evaluations", "cost/bytes_up", "client_accuracy/mean"} <= set(found["."])


def test_more_than_30_clients_are_tags_of_one_tensorboard_run(tmp_path: Path) -> None:
    data = toy_data((1,) * 31, client_test=0)
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()}, seed=1, reporting=Reporting(figures=0)
    )
    fit(loop, tmp_path, data=data, rounds=1, logger=logger(tmp_path))
    found = scalars(tmp_path / "run")
    assert set(found) == {"."}
    for tag in ("cssv/class_1", "cssv"):
        assert {f"{tag}/client_{i}" for i in range(31)} <= set(found["."])
    assert events(tmp_path / "run").Tags()["images"] == ["data/partition"]


def test_curves_per_class_can_be_left_out(tmp_path: Path) -> None:
    reporting = Reporting(per_class=False, figures=0, table=False)
    loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1, reporting=reporting)
    fit(loop, tmp_path, rounds=2, logger=logger(tmp_path))
    tags = {tag for client in range(3) for tag in scalars(tmp_path / "run")[f"client {client}"]}
    assert tags == {"Contributions/cssv", "weight", "train_loss", "update_norm"}


def test_hparams_tab_has_the_settings(fitted: tuple[FederatedLoop, Path]) -> None:
    plugins = {
        tag: each.plugin_data.content for tag, each in events(fitted[1]).summary_metadata.items()
    }
    start = HParamsPluginData.FromString(plugins["_hparams_/session_start_info"]).session_start_info
    assert start.hparams["aggregator"].string_value == repr(ShapFedWA("cssv"))
    assert start.hparams["federation_seed"].number_value == 1
    assert "hp_metric" not in scalars(fitted[1])["."]


class Noting(Plain):
    """A module that logs in every step, as callbacks of Lightning do."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("step_loss", loss["loss"] if isinstance(loss, dict) else loss, on_step=True)
        return loss


class Dies(InRound):
    """In the middle of a round, when the curves of its first batches are written."""

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *hook: Any
    ) -> None:
        if trainer.current_epoch == 3 and self.place(trainer) == 4:
            trainer.loggers[0].save()
            raise KeyError("killed")


def test_tensorboard_curves_of_a_resumed_run_equal_those_of_an_uninterrupted_run(
    tmp_path: Path,
) -> None:
    """TensorBoard drops steps, and takes those of batches for those of rounds. The run is killed, goes on with more
    rounds, and goes on from a checkpoint before that."""

    def run(folder: Path, rounds: int, ckpt_path: Path | None = None, *more: L.Callback) -> None:
        saving = ModelCheckpoint(tmp_path / "saved", "{epoch}", save_top_k=-1)
        loop = FederatedLoop(metrics={"cssv": ClassSpecificShapley()}, seed=1)
        options: dict[str, Any] = {
            "enable_checkpointing": True,
            "callbacks": [saving, *more],
            "logger": logger(folder),
        }
        fit(loop, folder, Noting(), rounds=rounds, ckpt_path=ckpt_path, **options)

    run(tmp_path / "straight", 5)
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(KeyError, match="killed"):
        run(tmp_path / "resumed", 5, None, Dies())
    for rounds, last in ((4, 2), (5, 3), (5, 1)):
        (checkpoint,) = (tmp_path / "saved").glob(f"epoch={last}.ckpt")
        run(tmp_path / "resumed", rounds, checkpoint)
    found, expected = (
        {p: {t: sorted(v) for t, v in tags.items()} for p, tags in scalars(tmp_path / each).items()}
        for each in ("resumed/run", "straight/run")
    )
    assert len(expected["."]["step_loss"]) > 5 * 5
    assert found == expected
