"""Reports a fit: makes each round's result once, and hands it to the sinks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from flsv.data import plot_partition
from flsv.functional.shapley.undecided import times_to_tell_apart, told_apart
from flsv.loop.federation import FederationRun
from flsv.loop.findings import events_of, note_faults
from flsv.loop.learned import paid_in, starts
from flsv.loop.saver import Saver
from flsv.metrics import ContributionMetric
from flsv.report.folder import CONTRIBUTIONS, leaves_files, run_folder, where_results_are
from flsv.report.measured import Results, columns_of, curves_of, monitored
from flsv.report.progress import ProgressText
from flsv.report.record import Record, record_of
from flsv.report.run_table import CSV, rows_of
from flsv.report.tensorboard import TensorBoard, draw_metric, figures_due
from flsv.report.terminal import client_columns, print_contributions
from flsv.report.trackers import Trackers, tables_of
from flsv.round import Round
from flsv.server.description import chosen, settings


class RunReports:
    """Reports a fit, from its start on.

    Args:
        trainer: of the fit.
        federation: whose rounds are reported.
        saver: knows the file that the run goes on writing, and what the run is.
        files: whether files are written.

    Attributes:
        folder: of the run.
        boards: the sinks of TensorBoard's loggers.
        sinks: whatever writes a round's result: ``contributions.csv``, ``run.json``, TensorBoard, other loggers.
    """

    def __init__(self, trainer: L.Trainer, federation: FederationRun, saver: Saver, files: bool) -> None:
        self._trainer, self._federation = trainer, federation
        self._saver, self._files = saver, files
        self._state, self._config, self._data = federation.state, federation.config, federation.engine.data
        data, metrics, reporting = self._data, federation.board.metrics, federation.config.reporting
        self._monitored: set[str] = set()
        self.folder: Path = federation.engine.ranks.from_rank(0, run_folder(trainer), "the run's folder")
        self.results = Results(metrics, data.client_names, data.class_names)
        self.csv = CSV(self.folder / CONTRIBUTIONS, data.client_names) if files and trainer.is_global_zero else None
        described = settings(federation.config, metrics, data, federation.state.seed)
        self.record = None if self.csv is None else Record(self.folder, self._record(described))
        others = [logger for logger in trainer.loggers if not _writes_events(logger)]
        named = data.client_names, data.class_names
        evaluated = federation.config.evaluation.every > 0
        self.boards = [
            TensorBoard(logger, trainer, metrics, *named, reporting, evaluated)
            for logger in trainer.loggers
            if isinstance(logger, TensorBoardLogger) and _writes_events(logger)
        ]
        self.trackers = Trackers(others, curves_of(metrics, reporting.per_class), *named)
        self._begin(described)
        self.sinks = [sink for sink in (*self.boards, self.trackers, self.csv, self.record) if sink is not None]
        self.progress = ProgressText(trainer)

    def _record(self, described: Mapping[str, Any]) -> dict[str, Any]:
        state, config = self._state, self._config
        roles = {**config.strategies, "privacy": config.privacy}
        known = self._saver.identity.plain(), state.round_index, version("flsv"), events_of(config.filters, state)
        metrics = self._federation.board.metrics
        content = record_of(self._trainer, self._data, metrics, roles, described, *known)
        return content | ({"run": state.run} if state.run else {})

    def _begin(self, described: Mapping[str, Any]) -> None:
        """Go on with the CSV; tell loggers the settings."""
        trainer, data, saver = self._trainer, self._data, self._saver
        first = self._state.round_index
        known, written = self.results.known(first, self._federation.board.contributions), rows_of(0, (), ())
        if self.csv is not None:
            path = self.csv.path.resolve()
            earlier = Path(saver.csv or path)
            if first > 0 and earlier.is_file():
                self.results.resume(known)
            written = self.csv.begin(first, earlier if earlier != path else None)
        saver.csv = None if self.csv is None else str(self.csv.path.resolve())
        hparams = trainer.lightning_module.hparams_initial, getattr(data, "hparams_initial", {})
        merged = {**hparams[0], **hparams[1], **described}
        for logger in trainer.loggers:
            # Of a run that goes on, other loggers have the settings already, and may not take others.
            if first == 0 or isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(merged)
        columns = chosen(self._config.strategies, data, self._state.seed, trainer.max_epochs)
        draw = lambda: plot_partition(data.class_counts, data.class_names, data.client_names)[0]  # noqa: E731
        for board in self.boards:
            for earlier_rows in (written, known):
                board.include(earlier_rows)
            board.begin(first, merged, columns, draw)

    def record_found(self) -> None:
        """What has happened in a round that does not come to its end."""
        note_faults(self._config.filters, self._state)
        if self.record is not None:
            self.record.note(events_of(self._config.filters, self._state))

    def round(self, round: Round) -> None:
        """A round is over."""
        trainer, state, federation = self._trainer, self._state, self._federation
        index, filters = state.round_index, self._config.filters
        assert state.weights is not None
        note_faults(filters, state)
        result = self.results.after(
            index,
            trainer.should_stop or index + 1 == trainer.max_epochs,
            federation.board.contributions,
            state.weights,
            losses={} if round.losses is None else dict(zip(round.client_ids.tolist(), round.losses.tolist())),
            norms=federation.server.norms,
            scores=state.client_scores,
            evaluated=federation.evaluated,
            events=events_of(filters, state),
        )
        for sink in self.sinks:
            sink.write(result)
        known = monitored(result, federation.board.metrics)
        for name in self._monitored - known.keys():
            trainer.callback_metrics.pop(name, None)
        trainer.callback_metrics.update(known)
        self._monitored = set(known)
        if figures_due(index, trainer.max_epochs, self._config.reporting.figures) and self._files:
            federation.engine.write_artifacts(round, self.folder / "clients")

    @property
    def _looks(self) -> bool:
        """Whether anybody is told what becomes of the model."""
        reporting, metrics = self._config.reporting, self._federation.board.metrics
        told = reporting.files or reporting.table
        return told and bool(metrics) and not self._trainer.fast_dev_run  # type: ignore[attr-defined]

    def look_at_start(self) -> None:
        """What the metrics' games share out, of the model before the first round."""
        state = self._state
        if state.round_index == 0 and self._looks:
            state.start = starts(self._trainer, self._data, self._federation, state.model())

    def _undecided(self) -> dict[str, Any]:
        """For the run's record: metrics whose sampled values tell no pair of clients apart, the evaluations that they
        have had, and those that would, see :mod:`flsv.functional.shapley.undecided`."""
        found = {}
        for name, value in self._federation.board.contributions.items():
            metric = self._federation.board.metrics[name]
            known = metric.diagnostics() if isinstance(metric, ContributionMetric) else {}
            if (
                value.ndim != 1
                or not {"stderr", "evaluations"} <= known.keys()
                or not bool((known["stderr"] > 0).any())
            ):
                continue
            assert isinstance(metric, ContributionMetric)
            values, errors = value.cpu(), known["stderr"].cpu()
            freedom = float(torch.as_tensor(metric.error_freedom()).nan_to_num(nan=math.inf).min())
            some = int((values.isfinite() & errors.isfinite()).sum()) > 1
            if some and not told_apart(values, errors, freedom):
                spent, times = int(known["evaluations"]), times_to_tell_apart(values, errors, freedom)
                found[name] = {"evaluations": spent, "needed": math.ceil(spent * times)}
        return {"undecided": found} if found else {}

    def finish(self) -> None:
        """The fit is over: what everybody was worth, in every sink."""
        trainer, data, state = self._trainer, self._data, self._state
        board = self._federation.board
        values, index = board.contributions, max(state.round_index - 1, 0)
        learned = {}
        if self._looks:
            learned = paid_in(trainer, data, self._federation, state.model(), values, state.start) | self._undecided()
        logged = {name: value.item() for name, value in trainer.callback_metrics.items() if value.numel() == 1}
        logged = {name: value for name, value in logged.items() if "/" not in name}
        if self.record is not None:
            self.record.finish(logged, state.round_index, **learned)
        counts = {"samples": data.num_samples, "rounds": state.participations, "weight": state.weights}
        table = self.results.known(index, values, **counts, **state.client_scores)
        kinds = {
            name: "column" if columns_of(each) else "class" for name, each in board.metrics.items() if name in values
        }
        for sink in self.boards:
            sink.finish(client_columns(table, kinds, data.num_clients), index)
        if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        pictures = {name: partial(self._picture, name, value, index) for name, value in values.items()}
        self.trackers.finish(tables_of(table, kinds, data.client_names), pictures, index)
        if self._config.reporting.table:
            where = where_results_are(trainer) if leaves_files(trainer) and self._config.reporting.files else []
            show = partial(print_contributions, table, kinds, data.client_names, learned, logged, where)
            self.progress.afterwards(show)

    def _picture(self, name: str, value: Tensor, index: int) -> Any:
        return draw_metric(self._federation.board.metrics[name], name, value, index)[0]

    def flush(self) -> None:
        """Everything to the disk, as before a checkpoint."""
        for board in self.boards:
            board.flush()

    def cancel(self) -> None:
        """The fit has failed: there is no table."""
        self.progress.cancel()

    def close(self) -> None:
        self.progress.remove()
        for board in self.boards:
            board.close()


def _writes_events(logger: Any) -> bool:
    """In a fast_dev_run a logger's experiment is no writer."""
    return isinstance(logger, TensorBoardLogger) and isinstance(logger.experiment, SummaryWriter)
