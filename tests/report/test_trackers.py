"""Tables and pictures in W&B, MLflow and Comet: in their offline modes where they are installed, and by Lightning's
loggers with a stand-in for the service everywhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CometLogger, MLFlowLogger, WandbLogger

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import SizePartitioner
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley


@pytest.fixture
def fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)

    def fitted(logger: Any) -> None:
        metrics = {"cssv": ClassSpecificShapley(), "cgsv": CosineGradientShapley()}
        loop = FederatedLoop(metrics=metrics, seed=0, reporting=Reporting(table=False, figures=0))
        trainer = L.Trainer(
            max_epochs=1, limit_train_batches=1, logger=logger, callbacks=[loop], enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(ClassifierClient("softmax"), FederatedDataModule("digits", SizePartitioner([3, 2, 1])))

    return fitted


class Recorded:
    """What a service is shown."""

    save_dir, name, version = ".", "run", "0"

    def __init__(self) -> None:
        self.pictures: dict[str, Any] = {}

    def log_metrics(self, metrics, step=None): ...
    def log_hyperparams(self, params): ...
    def finalize(self, status): ...


class OfWandb(Recorded, WandbLogger):
    experiment = None

    def log_image(self, key, images, step=None, **_):
        (self.pictures[key],) = images


class OfMLflow(Recorded, MLFlowLogger):
    run_id = "7"

    @property
    def experiment(self):
        return SimpleNamespace(log_figure=lambda run_id, figure, file: self.pictures.update({file: figure}))


class OfComet(Recorded, CometLogger):
    _experiment = None

    @property
    def experiment(self):
        return SimpleNamespace(log_figure=lambda figure_name, figure, step: self.pictures.update({figure_name: figure}))


@pytest.mark.parametrize(("kind", "picture"), [(OfWandb, "charts/{}"), (OfMLflow, "charts/{}.png"), (OfComet, "{}")])
def test_a_service_is_shown_who_contributed_what(fit: Any, kind: Any, picture: str) -> None:
    logger = kind()
    fit(logger)
    assert set(logger.pictures) == {picture.format(name) for name in ("cssv", "cgsv")}
    assert all(hasattr(figure, "savefig") for figure in logger.pictures.values())


def test_what_a_service_refuses_is_a_warning(fit: Any) -> None:
    class Full(OfWandb):
        def log_image(self, key: str, images: Any, step: Any = None, **_: Any) -> None:
            self.pictures[key] = None
            raise OSError("no room")

    logger = Full()
    with pytest.warns(UserWarning, match="no room"):
        fit(logger)
    assert set(logger.pictures) == {"charts/cssv", "charts/cgsv"}
