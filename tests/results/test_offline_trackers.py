"""Values of trained coalitions beside each tracker of the page on trackers, offline: no logger takes them away."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import (
    CometLogger,
    CSVLogger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)

from flsv import FederatedLoop, Reporting
from flsv.metrics import ShadowShapley
from helpers.data import toy_data
from helpers.fits import fit

pytestmark = [pytest.mark.slow, pytest.mark.long]


def make_csv(folder: Path) -> Any:
    return CSVLogger(folder)


def make_tensorboard(folder: Path) -> Any:
    return TensorBoardLogger(folder)


def make_wandb(folder: Path) -> Any:
    return WandbLogger(save_dir=folder, offline=True, project="flsv")


def make_mlflow(folder: Path) -> Any:
    return MLFlowLogger(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")


def make_comet(folder: Path) -> Any:
    return CometLogger(online=False, offline_directory=str(folder), api_key="none")


@pytest.mark.parametrize(
    ("package", "make_logger"),
    [
        ("csv", make_csv),
        ("tensorboard", make_tensorboard),
        ("wandb", make_wandb),
        ("mlflow", make_mlflow),
        ("comet_ml", make_comet),
    ],
)
def test_values_of_coalitions_come_beside_an_offline_tracker(
    tmp_path: Path, package: str, make_logger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    loop = FederatedLoop(
        metrics={"value": ShadowShapley()},
        reporting=Reporting(table=False, figures=0),
        seed=1,
    )

    logger = make_logger(tmp_path)
    fit(loop, tmp_path, rounds=2, data=toy_data(server_val=0.3), logger=logger)

    assert loop.contributions["value"].isfinite().all()
