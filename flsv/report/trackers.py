"""The sink of all other loggers: curves, and in W&B, MLflow and Comet tables of what clients were worth and pictures
of them, by Lightning's loggers for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, WandbLogger
from pandas import DataFrame

from flsv.charts import drawing
from flsv.models.imbalance import OWN_SCORES
from flsv.report.measured import in_one_place, points_of
from flsv.report.run_table import columns_in, last, part
from flsv.round.result import RoundResult, RunResult, Sink


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
        """Hand tables and pictures to the loggers that have a place for them. What a service refuses is a warning: the
        run is over, and everything is in its folder."""
        tables, step = tables_of(result.table, result.columns, self._client_names), result.round_index
        for logger in self._loggers:
            if isinstance(logger, WandbLogger | MLFlowLogger | CometLogger):
                for name, table in tables.items():
                    with drawing(f"the table {name} of {type(logger).__name__}"):
                        _log_table(logger, name, table, step)
                for name, draw in result.pictures.items():
                    with drawing(f"{name} of {type(logger).__name__}"):
                        _log_picture(logger, name, draw(), step)


def tables_of(table: DataFrame, metrics: Mapping[str, str], client_names: Sequence[str]) -> dict[str, DataFrame]:
    """``contributions``, a row per client, and of each metric with values per class ``<name>_by_class``.

    Args:
        table: of the last round, with ``samples``, ``rounds`` and ``weight``.
        metrics: name to what its columns are called ("class").
        client_names: n names.

    Example:
        >>> from flsv.report.run_table import Numbers, frame, rows_of
        >>> names = ["Boston", "Lyon"]
        >>> rows = rows_of(3, [Numbers("samples", [30, 10]), Numbers("sv", [0.5, float("nan")])], names)
        >>> print(tables_of(frame(rows), {"sv": "class"}, names)["contributions"])
           client  samples   sv
        0  Boston     30.0  0.5
        1    Lyon     10.0  NaN
    """
    count, there = len(client_names), set(table["metric"])
    known = [name for name in ("samples", "rounds", *metrics, "weight", *OWN_SCORES) if name in there]
    tables = {
        "contributions": DataFrame({"client": client_names, **{name: last(table, name, count) for name in known}})
    }
    for name, kind in metrics.items():
        if keys := columns_in(table, name):
            found = DataFrame([client_names, *(last(table, name, count, key) for key in keys)]).T
            titles = [part(table, name, key)["class_name"].iloc[0] for key in keys]
            tables[f"{name}_by_{kind}"] = found.set_axis(["client", *titles], axis=1)
    return tables


def _log_table(logger: Any, name: str, table: DataFrame, step: int) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_table(f"tables/{name}", dataframe=table, step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_table(logger.run_id, data=table, artifact_file=f"tables/{name}.json")
    else:
        logger.experiment.log_table(f"{name}.csv", tabular_data=table)


def _log_picture(logger: Any, name: str, figure: Any, step: int) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_image(f"charts/{name}", images=[figure], step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_figure(logger.run_id, figure, f"charts/{name}.png")
    else:
        logger.experiment.log_figure(figure_name=name, figure=figure, step=step)
