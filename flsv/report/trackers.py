"""What W&B, MLflow and Comet show of a run besides its curves: tables of what clients were worth, and pictures of them.

By Lightning's loggers for them; a logger of another kind has the curves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import CometLogger, Logger, MLFlowLogger, WandbLogger

from flsv.charts import drawing
from flsv.models.imbalance import OWN_SCORES
from flsv.report.run_table import RunTable

#: A table: its header and its rows.
Rows = tuple[list[str], list[list[Any]]]


def tables_of(table: RunTable, metrics: Mapping[str, str], client_names: Sequence[str]) -> dict[str, Rows]:
    """``contributions``, a row per client, and of each metric with values per class ``<name>_by_class``.

    Args:
        table: of the last round, with ``samples``, ``rounds`` and ``weight``.
        metrics: name to what its columns are called ("class").
        client_names: n names.

    Example:
        >>> from flsv.report.measured import Numbers
        >>> names = ["Boston", "Lyon"]
        >>> table = RunTable.of_round(3, [Numbers("samples", [30, 10]), Numbers("sv", [0.5, float("nan")])], names)
        >>> tables_of(table, {"sv": "class"}, names)
        {'contributions': (['client', 'samples', 'sv'], [['Boston', 30.0, 0.5], ['Lyon', 10.0, None]])}
    """
    count = len(client_names)
    known = [name for name in ("samples", "rounds", *metrics, "weight", *OWN_SCORES) if name in table.metrics]
    found = {"contributions": _rows(known, [table.last(name, count) for name in known], client_names)}
    for name, kind in metrics.items():
        keys = table.columns(name)
        if keys:
            titles = [str(table.part(name, key).cells["class_name"][0]) for key in keys]
            columns = [table.last(name, count, key) for key in keys]
            found[f"{name}_by_{kind}"] = _rows(titles, columns, client_names)
    return found


def _rows(titles: Sequence[str], columns: Sequence[Iterable[float]], client_names: Sequence[str]) -> Rows:
    cells = [[None if value != value else float(value) for value in column] for column in columns]
    return ["client", *titles], [[name, *row] for name, row in zip(client_names, zip(*cells))]


def log_tables(
    loggers: Iterable[Logger], tables: Mapping[str, Rows], pictures: Mapping[str, Callable[[], Any]], step: int
) -> None:
    """Hand tables and pictures to the loggers that have a place for them. What a service refuses is a warning: the run
    is over, and everything is in its folder.

    Args:
        loggers: of the trainer.
        tables: by name.
        pictures: by name, each draws a figure.
        step: the last round.
    """
    for logger in loggers:
        if not isinstance(logger, WandbLogger | MLFlowLogger | CometLogger):
            continue
        for name, (header, rows) in tables.items():
            with drawing(f"the table {name} of {type(logger).__name__}"):
                _log_table(logger, name, header, rows, step)
        for name, draw in pictures.items():
            with drawing(f"{name} of {type(logger).__name__}"):
                _log_picture(logger, name, draw(), step)


def _log_table(logger: Any, name: str, header: list[str], rows: list[list[Any]], step: int) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_table(f"tables/{name}", columns=header, data=rows, step=step)
    elif isinstance(logger, MLFlowLogger):
        columns = {title: [row[place] for row in rows] for place, title in enumerate(header)}
        logger.experiment.log_table(logger.run_id, data=columns, artifact_file=f"tables/{name}.json")
    else:
        logger.experiment.log_table(f"{name}.csv", tabular_data=rows, headers=header)


def _log_picture(logger: Any, name: str, figure: Any, step: int) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_image(f"charts/{name}", images=[figure], step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_figure(logger.run_id, figure, f"charts/{name}.png")
    else:
        logger.experiment.log_figure(figure_name=name, figure=figure, step=step)
