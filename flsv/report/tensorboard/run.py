"""TensorBoard's tabs of a run: curves, Custom Scalars, pictures, texts, HParams."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import Metric

from flsv.drawing import client_labels, drawing
from flsv.metrics import ContributionMetric
from flsv.participants.artifacts import client_folders
from flsv.report.measured import columns_of, judged
from flsv.report.reporting import Reporting
from flsv.report.run_table import RunTable
from flsv.report.tensorboard import figures
from flsv.report.tensorboard.event_files import EventFiles
from flsv.report.tensorboard.scalars import MOST_PER_CLASS, RoundScalars, class_part
from flsv.report.tensorboard.tabs import (
    accuracies,
    guide_text,
    hyperparameters,
    layout,
    layout_summary,
    results_text,
    settings_text,
)

#: A figure and its axis.
Picture = tuple[Figure, Any]

#: Clients up to which each has a run, and classes likewise.
MOST_RUNS = 30


class TensorBoardRun:
    """What is written for TensorBoard, with every such logger of the trainer; without one, nothing.

    Args:
        trainer: with its loggers.
        metrics: by name.
        client_names: of the clients.
        class_names: of the classes, or None.
        reporting: which curves and figures, and whether every client has a run of its own.
        evaluated: whether the clients' own models are evaluated.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        metrics: Mapping[str, Metric],
        client_names: Sequence[str],
        class_names: Sequence[str] | None,
        reporting: Reporting,
        evaluated: bool,
    ) -> None:
        self._trainer, self._metrics = trainer, metrics
        self._client_names, self._class_names = client_names, class_names
        self._reporting, self._evaluated = reporting, evaluated
        self._files: list[EventFiles] = []
        self._chosen: Mapping[str, str | int | float] = {}
        self._in_table = False
        bounds = {
            name: (getattr(metric, "plot_lower_bound", None), getattr(metric, "plot_upper_bound", None))
            for name, metric in metrics.items()
        }
        self._scales = {name: figures.FixedScale(*pair) for name, pair in bounds.items()}

    def begin(
        self,
        first_round: int,
        settings: Mapping[str, Any],
        chosen: Mapping[str, str | int | float],
        partition: Callable[[], Picture],
    ) -> None:
        """Open the files; write what is known before the first round.

        Args:
            first_round: the next round.
            settings: all that the run is made of.
            chosen: those that tell runs apart.
            partition: draws who has which data.
        """
        self._chosen = chosen
        names = self._client_names
        by_client = len(names) <= MOST_RUNS if self._reporting.client_runs == "auto" else self._reporting.client_runs
        clients = client_folders(names) if by_client else ()
        classes = [] if self._class_names is None or not self._reporting.per_class else list(self._class_names)
        folders = [class_part(j, classes).removeprefix("class_") for j in range(len(classes))]
        folders = folders if by_client and 1 < len(folders) <= MOST_RUNS else []
        # In a fast_dev_run a logger's experiment is no writer.
        self._files = [EventFiles(x, first_round, clients, folders) for x in self._loggers]
        for files in self._files:
            files.text("settings", settings_text(settings), first_round)
            for name, metric in self._metrics.items():
                files.text(f"how to read/{name}", guide_text(name, metric), first_round)
            # A run that goes on may do so in another folder; in the same one the last layout counts.
            files.summaries(layout_summary(self._layout(files.by_client)))
        if first_round == 0:
            self._figure("data/partition", lambda: partition()[0], 0)

    def remember(self, table: RunTable) -> None:
        """Values of the rounds before: pictures go on with the same scale."""
        for name, values in table.frame.groupby("metric")["value"]:
            if name in self._scales:
                self._scales[name].include(values.to_numpy())

    def scalars(self, round_index: int, scalars: RoundScalars) -> None:
        """A round's curves."""
        for files in self._files:
            files.scalars(round_index, scalars)

    def round(self, round_index: int, contributions: Mapping[str, Tensor], known: RunTable) -> None:
        """A round's pictures.

        Args:
            round_index: from 0.
            contributions: what the metrics gave.
            known: the same, as rows.
        """
        self.remember(known)
        if not self._in_table and (logged := accuracies(self._logged())):
            self._write_table(logged)
        for name, value in contributions.items():
            if value.ndim == 2 and value.numel() > MOST_PER_CLASS:
                for files in self._files:
                    files.histogram(f"{name}/histogram", value.detach().cpu(), round_index)
        if self.figures_due(round_index):
            for name, value in contributions.items():
                self._figure(f"{name}/figure", partial(self._draw, name, value, round_index), round_index)

    def figures_due(self, round_index: int) -> bool:
        """Whether figures are drawn after this round."""
        return figures.due(round_index, self._trainer.max_epochs, self._reporting.figures)

    def finish(self, table: RunTable, metrics: Iterable[str], last_round: int) -> None:
        """After the last round: a table of the clients, and the run's line in the table of runs."""
        if not self._in_table:
            self._write_table(accuracies(self._logged()))
        text = results_text(table, metrics, client_labels(len(self._client_names), self._client_names))
        for files in self._files:
            files.text("contributions", text, last_round)
            files.flush()

    def flush(self) -> None:
        """Everything to the disk."""
        for files in self._files:
            files.flush()

    def close(self) -> None:
        """Close the clients' files."""
        for files in self._files:
            files.close()

    @property
    def _loggers(self) -> list[TensorBoardLogger]:
        loggers = [logger for logger in self._trainer.loggers if isinstance(logger, TensorBoardLogger)]
        return [logger for logger in loggers if isinstance(logger.experiment, SummaryWriter)]

    def _logged(self) -> list[str]:
        """What the module has logged so far, by name."""
        ours = (*self._metrics, "weight", "client_accuracy")
        return [name for name in self._trainer.callback_metrics if name.split("/")[0] not in ours]

    def _write_table(self, logged: Sequence[str]) -> None:
        results = [*logged]
        if self._evaluated:
            # TensorBoard ticks the first five.
            results += ["client_accuracy/mean", *(f"{name}/fairness" for name in judged(self._metrics))]
            results += ["client_accuracy/min", "client_accuracy/std"]
        for logger, files in zip(self._loggers, self._files):
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            # Runs of one name would be taken for repetitions of one, whose mean is shown.
            place = f"#{zlib.crc32(os.path.abspath(logger.log_dir).encode()) & 0xFFFF:04x}"
            name = " ".join(str(part) for part in (self._chosen.get("algorithm"), version, place) if part)
            files.summaries(*hyperparameters(self._chosen, results, name))
        self._in_table = True

    def _layout(self, by_client: bool) -> Any:
        curves = {name: self._curves(metric) for name, metric in self._metrics.items()}
        more = ["weight", "train_loss", "update_norm", *(["client_accuracy"] if self._evaluated else [])]
        names, classes = self._client_names, self._class_names or ()
        ends = [n for n, m in self._metrics.items() if isinstance(m, ContributionMetric) and m.over_rounds is not None]
        return layout(curves, len(names), len(classes), names, classes, by_client, more, ends)

    def _curves(self, metric: Metric) -> bool:
        """Whether a metric's values per class are curves."""
        mine = isinstance(metric, ContributionMetric) and metric.per_class and columns_of(metric) is None
        return self._reporting.per_class and mine and len(self._class_names or ()) > 1

    def _draw(self, name: str, value: Tensor, round_index: int) -> Figure:
        style = {"limits": self._scales[name].limits, "stderr": self._stderr(name)}
        return figures.draw(self._metrics[name], name, value, round_index, **style)[0]

    def _stderr(self, name: str) -> Tensor | None:
        metric = self._metrics.get(name)
        error = metric.diagnostics().get("stderr") if isinstance(metric, ContributionMetric) else None
        return None if error is None else error.detach().cpu()

    def _figure(self, tag: str, draw: Callable[[], Figure], step: int) -> None:
        with drawing(tag):
            for files in self._files:
                files.figure(tag, draw, step)
