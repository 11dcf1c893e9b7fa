"""Curves in loggers of services: Lightning's W&B logger with a stand-in for the service."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import WandbLogger

from flsv import FederatedLoop, Reporting
from flsv.metrics import ClassSpecificShapley
from helpers.fits import fit


class WandbInMemory(WandbLogger):
    save_dir = "."
    name = "run"
    version = "0"
    experiment = None
    _experiment = None

    def __init__(self) -> None:
        self.scalars: set[str] = set()

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.scalars |= metrics.keys()

    def log_hyperparams(self, params: Any) -> None: ...
    def finalize(self, status: str) -> None: ...


def test_logger_of_a_service_gets_curves_of_clients_and_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    logger = WandbInMemory()
    loop = FederatedLoop(
        metrics={"cssv": ClassSpecificShapley()},
        reporting=Reporting(table=False, figures=0),
    )

    fit(loop, tmp_path, rounds=1, logger=[logger])

    assert {"cssv/client_0", "cssv/class_2/client_1", "weight/client_2"} <= logger.scalars
