"""The sink of all other loggers: curves, and in W&B, MLflow and Comet a picture of each metric, by Lightning's loggers
for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, WandbLogger

from flsv.charts import drawing
from flsv.report.measured import in_one_place, points_of
from flsv.round.result import RoundResult, RunResult, Sink

OF_SERVICES = (WandbLogger, MLFlowLogger, CometLogger)


class Trackers(Sink):
    """Writes to these loggers.

    Args:
        loggers: of the trainer, without TensorBoard's.
        per_class: metrics whose values per class are curves.
        client_names: of the clients.
        class_names: of the classes, or None.
    """

    def __init__(
        self,
        loggers: Sequence[Logger],
        per_class: Sequence[str],
        client_names: Sequence[str],
        class_names: Sequence[str] | None,
    ) -> None:
        self._loggers, self._per_class = loggers, per_class
        self._client_names, self._class_names = client_names, class_names

    def write(self, result: RoundResult) -> None:
        """A round's curves."""
        points = points_of(result, self._per_class, len(self._client_names), self._class_names)
        scalars = {**result.shared, **in_one_place(points, self._client_names)}
        for logger in self._loggers:
            logger.log_metrics(scalars, step=result.round_index)

    def finish(self, result: RunResult) -> None:
        """Hand pictures to the loggers that have a place for them. What a service refuses is a warning: the run is
        over, and everything is in its folder."""
        for logger in self._loggers:
            for name, draw in result.pictures.items() if isinstance(logger, OF_SERVICES) else ():
                with drawing(f"{name} of {type(logger).__name__}"):
                    _log_picture(logger, name, draw(), result.round_index)


def _log_picture(logger: Any, name: str, figure: Any, step: int) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_image(f"charts/{name}", images=[figure], step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_figure(logger.run_id, figure, f"charts/{name}.png")
    else:
        logger.experiment.log_figure(figure_name=name, figure=figure, step=step)
