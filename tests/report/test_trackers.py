"""Tables and pictures in W&B, MLflow and Comet: in their offline modes where they are installed, and by Lightning's
loggers with a stand-in for the service everywhere."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, WandbLogger
from pandas import DataFrame

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import SizePartitioner
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def fitted(logger: Any) -> FederatedLoop:
        metrics = {"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()}
        loop = FederatedLoop(metrics=metrics, seed=0, reporting=Reporting(table=False, figures=0))
        trainer = L.Trainer(
            max_epochs=1, limit_train_batches=1, logger=logger, callbacks=[loop], enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(ClassifierClient("softmax"), FederatedDataModule("digits", SizePartitioner([3, 2, 1])))
        return loop

    return fitted


def rows_of(table: DataFrame) -> tuple[list[str], list[list[Any]]]:
    return table.columns.tolist(), table.to_numpy().tolist()


class Recorded:
    """What a service is told."""

    def __init__(self) -> None:
        self.tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
        self.pictures: dict[str, Any] = {}


class OfWandb(Recorded, WandbLogger):
    save_dir, name, version, experiment = ".", "run", "0", None

    def log_table(self, key, columns=None, data=None, dataframe=None, step=None):
        self.tables[key] = rows_of(dataframe)

    def log_image(self, key, images, step=None, **_):
        (self.pictures[key],) = images

    def log_metrics(self, metrics, step=None): ...
    def log_hyperparams(self, params): ...
    def finalize(self, status): ...


class OfMLflow(Recorded, MLFlowLogger):
    save_dir, name, version, run_id = ".", "run", "0", "7"

    @property
    def experiment(self):
        def log_table(run_id, data, artifact_file):
            assert run_id == "7"
            self.tables[artifact_file] = rows_of(data)

        def log_figure(run_id, figure, artifact_file):
            self.pictures[artifact_file] = figure

        return SimpleNamespace(log_table=log_table, log_figure=log_figure)

    def log_metrics(self, metrics, step=None): ...
    def log_hyperparams(self, params): ...
    def finalize(self, status): ...


class OfComet(Recorded, CometLogger):
    save_dir, name, version, _experiment = ".", "run", "0", None

    @property
    def experiment(self):
        def log_table(filename, tabular_data):
            self.tables[filename] = rows_of(tabular_data)

        def log_figure(figure_name, figure, step):
            self.pictures[figure_name] = figure

        return SimpleNamespace(log_table=log_table, log_figure=log_figure)

    def log_metrics(self, metrics, step=None): ...
    def log_hyperparams(self, params): ...
    def finalize(self, status): ...


@pytest.mark.parametrize(
    ("kind", "table", "picture"),
    [
        (OfWandb, "tables/{}", "charts/{}"),
        (OfMLflow, "tables/{}.json", "charts/{}.png"),
        (OfComet, "{}.csv", "{}"),
    ],
)
def test_a_service_is_told_who_contributed_what(fit: Any, kind: Any, table: str, picture: str) -> None:
    logger = kind()
    loop = fit(logger)
    assert set(logger.tables) == {table.format(name) for name in ("contributions", "cssv_by_class")}
    header, rows = logger.tables[table.format("contributions")]
    assert header == ["client", "samples", "rounds", "cssv", "cgsv", "weight"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    values = loop.contributions
    assert [row[3] for row in rows] == pytest.approx(values["cssv"].tolist(), abs=1e-6)
    assert [row[4] for row in rows] == pytest.approx(values["cgsv"].tolist(), abs=1e-6)
    header, rows = logger.tables[table.format("cssv_by_class")]
    assert header == ["client", *map(str, range(10))]
    torch.testing.assert_close(torch.tensor([row[1:] for row in rows]), values["cssv"].by_class, atol=1e-6, rtol=0)
    assert set(logger.pictures) == {picture.format(name) for name in ("cssv", "cgsv")}
    assert all(hasattr(figure, "savefig") for figure in logger.pictures.values())


def test_what_a_service_refuses_is_a_warning(fit: Any) -> None:
    class Full(OfWandb):
        def log_table(self, *_: Any, **__: Any) -> None:
            raise OSError("no room")

    logger = Full()
    with pytest.warns(UserWarning, match="no room"):
        fit(logger)
    assert logger.pictures


def test_wandb_offline(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(project="flsv", save_dir=tmp_path, offline=True)
    loop = fit(logger)
    tables = {path.name.partition("_")[0]: json.loads(path.read_text()) for path in tmp_path.rglob("*.table.json")}
    logger.experiment.finish()
    assert tables["contributions"]["columns"][:2] == ["client", "samples"]
    found = next(path for path in tmp_path.rglob("cssv_by_class*.table.json"))
    data = torch.tensor([row[1:] for row in json.loads(found.read_text())["data"]])
    torch.testing.assert_close(data, loop.contributions["cssv"].by_class, atol=1e-6, rtol=0)
    assert len(list(tmp_path.rglob("charts/*.png"))) == 2


def test_mlflow_in_a_folder(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a data base needs more packages
    logger = MLFlowLogger(tracking_uri=f"file:{tmp_path / 'mlruns'}")
    loop = fit(logger)
    (found,) = tmp_path.rglob("artifacts/tables/cssv_by_class.json")
    data = torch.tensor([row[1:] for row in json.loads(found.read_text())["data"]])
    torch.testing.assert_close(data, loop.contributions["cssv"].by_class, atol=1e-6, rtol=0)
    assert {path.name for path in tmp_path.rglob("artifacts/charts/*.png")} == {"cssv.png", "cgsv.png"}


def test_comet_offline(fit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    comet_ml = pytest.importorskip("comet_ml", reason="comet_ml is not installed")
    monkeypatch.setenv("COMET_API_KEY", "0" * 25)
    logger = CometLogger(online=False, project="flsv", offline_directory=str(tmp_path / "comet"))
    # Lightning disables an experiment that is not online.
    logger._experiment = comet_ml.OfflineExperiment(offline_directory=str(tmp_path / "comet"))
    fit(logger)
    logger.experiment.end()
    (archive,) = (tmp_path / "comet").glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        told = "".join(opened.read(name).decode(errors="ignore") for name in opened.namelist())
    assert all(name in told for name in ("contributions.csv", "cssv_by_class.csv", "cssv", "cgsv"))
