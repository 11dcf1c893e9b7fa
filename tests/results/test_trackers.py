"""Pictures in W&B, MLflow and Comet: by Lightning's loggers with a stand-in for the service."""

from types import SimpleNamespace
from typing import Any

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


class FullWandb(WandbInMemory):
    """Refuses pictures, which it has noted all the same."""

    def log_image(self, key, images, step=None, **_):
        super().log_image(key, images, step)
        raise OSError("no room")


class MLflowInMemory(RecordsInMemory, MLFlowLogger):
    @property
    def experiment(self):
        return SimpleNamespace(
            log_figure=lambda run_id, figure, file: self.pictures.update({file: figure})
        )


class CometInMemory(RecordsInMemory, CometLogger):
    @property
    def experiment(self):
        return SimpleNamespace(
            log_figure=lambda figure_name, figure, step: self.pictures.update({figure_name: figure})
        )


def test_wandb_mlflow_and_comet_get_pictures_of_contributions(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    picture_names_by_kind = {
        WandbInMemory: {"charts/cssv", "charts/cgsv"},
        MLflowInMemory: {"charts/cssv.png", "charts/cgsv.png"},
        CometInMemory: {"cssv", "cgsv"},
        FullWandb: {"charts/cssv", "charts/cgsv"},
    }
    loggers = [kind() for kind in picture_names_by_kind]
    metrics = {"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()}
    loop = FederatedLoop(metrics=metrics, reporting=Reporting(table=False, figures=0))

    with warns("no room"):  # what a service refuses is no error
        fit(loop, tmp_path, rounds=1, logger=loggers)

    for logger in loggers:
        assert set(logger.pictures) == picture_names_by_kind[type(logger)]
        assert all(hasattr(figure, "savefig") for figure in logger.pictures.values())
        assert {"cssv/client_0", "cssv/class_2/client_1", "weight/client_2"} <= logger.scalars
