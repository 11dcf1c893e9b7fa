"""Pictures in W&B, MLflow and Comet: by Lightning's loggers with a stand-in for the service."""

from contextlib import chdir
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, WandbLogger

from flsv import FederatedLoop, Reporting
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley
from helpers import warns
from helpers.fits import fit


class RecordsInMemory:
    """In place of a logger's service."""

    save_dir = "."
    name = "run"
    version = "0"
    run_id = "7"
    _experiment = None

    def __init__(self):
        self.pictures: dict[str, Any] = {}
        self.scalars: set[str] = set()

    def log_metrics(self, metrics, step=None):
        self.scalars |= metrics.keys()

    def log_hyperparams(self, params): ...
    def finalize(self, status): ...


class WandbInMemory(RecordsInMemory, WandbLogger):
    experiment = None

    def log_image(self, key, images, step=None, **_):
        (self.pictures[key],) = images


class WandbThatFailsAtPictures(WandbInMemory):
    def log_image(self, key, images, step=None, **_):
        super().log_image(key, images, step)
        raise OSError("no room")


class MLflowInMemory(RecordsInMemory, MLFlowLogger):
    @property
    def experiment(self):
        def log_figure(run_id, figure, file):
            self.pictures[file] = figure

        return SimpleNamespace(log_figure=log_figure)


class CometInMemory(RecordsInMemory, CometLogger):
    @property
    def experiment(self):
        def log_figure(figure_name, figure, step):
            self.pictures[figure_name] = figure

        return SimpleNamespace(log_figure=log_figure)


PICTURES_BY_LOGGER = {
    WandbInMemory: {"charts/cssv", "charts/cgsv"},
    MLflowInMemory: {"charts/cssv.png", "charts/cgsv.png"},
    CometInMemory: {"cssv", "cgsv"},
    WandbThatFailsAtPictures: {"charts/cssv", "charts/cgsv"},
}


@pytest.fixture(scope="module")
def loggers(tmp_path_factory):
    """Loggers by class, after a run that has logged by all of them. One that fails is warned about."""
    folder = tmp_path_factory.mktemp("trackers")
    logger_by_class = {logger_class: logger_class() for logger_class in PICTURES_BY_LOGGER}
    metrics = {"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()}
    reporting = Reporting(table=False, figures=0)
    loop = FederatedLoop(metrics=metrics, reporting=reporting)
    with chdir(folder), warns("no room"):
        fit(loop, folder, rounds=1, logger=[*logger_by_class.values()])
    return logger_by_class


@pytest.mark.parametrize(("logger_class", "expected_names"), PICTURES_BY_LOGGER.items())
def test_logger_gets_pictures_and_values_of_contributions(loggers, logger_class, expected_names):
    logger = loggers[logger_class]
    assert set(logger.pictures) == expected_names
    assert all(hasattr(figure, "savefig") for figure in logger.pictures.values())
    assert {"cssv/client_0", "cssv/class_2/client_1", "weight/client_2"} <= logger.scalars
