"""Sinks that write to TensorBoard and to other loggers.

TensorBoard sorts groups of charts by name, capitals first: the clients' values of all metrics, and their pictures, are
in a group that comes before the values that the module logs.

TensorBoard colors and names lines by run. With one run per client, ``<run>/Boston``, in which every client has the same
tags, all clients' lines are in one chart, with colors and names, in every tab. The federation's own file holds the
numbers that belong to no client. With more than :data:`MAX_CLIENT_RUNS` clients all curves are in that file, each with
a tag of its own.

The tab HParams takes its columns from the scalars of the run that holds the settings. The settings are therefore in a
run of their own, ``<run>/result``, whose only scalars are the final numbers. It has no ``hparams`` experiment:
TensorBoard would take the columns of the first run's for all runs.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import (
    CometLogger,
    Logger,
    MLFlowLogger,
    TensorBoardLogger,
    WandbLogger,
)
from matplotlib.figure import Figure
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from flsv._lightning.patches import ROUND_NAME, close_in_time
from flsv.core.artifacts import client_folders
from flsv.results.curves import Curves
from flsv.results.round_result import RoundResult, RunResult, Sink
from flsv.results.run_table import select_rows
from flsv.utilities.display import client_labels, drawing

#: Prefix of the tags of charts that are to come first.
SORTS_FIRST = "Contributions/"
#: Largest number of clients that each get a TensorBoard run of their own.
MAX_CLIENT_RUNS = 30
#: Name of the run with the settings and the final numbers.
RESULT_RUN = "result"
#: Seconds after which a client's curves are written to the disk.
FLUSH_SECONDS = 10
#: Pictures before the end of a run take at most this part of its time, unless the user wants them.
MAX_PART_FOR_PICTURES = 0.05
#: Loggers of services that accept pictures.
LOGGERS_OF_SERVICES = (WandbLogger, MLFlowLogger, CometLogger)


class LoggerSink(Sink):
    """Sink that writes to loggers, which cannot replace values that were logged."""

    is_logger = True

    def write_late_rounds(self, results: Sequence[RoundResult]) -> None:
        for result in results:
            self.write_round(result)


class TensorBoard(LoggerSink):
    """Sink that writes curves and pictures into a TensorBoard logger's folder."""

    #: The writer of the final numbers. None for rounds of another framework, which have no settings and no end.
    _result_writer: SummaryWriter | None = None

    def __init__(
        self,
        logger: TensorBoardLogger,
        curves: Curves,
        # Whether pictures before the end take at most a part of the run's time.
        limits_drawing: bool = True,
    ) -> None:
        self._writer: SummaryWriter = logger.experiment
        self._folder = Path(logger.log_dir)
        self._curves = curves
        num_clients = len(curves.client_names)
        self._has_client_runs = num_clients <= MAX_CLIENT_RUNS
        labels = client_labels(num_clients, curves.client_names)
        folders = client_folders([*labels, RESULT_RUN])
        self._client_folders = folders[:-1]
        self._result_folder = folders[-1]
        self._writers: dict[int, SummaryWriter] = {}
        self._first_round = 0
        self._limits_drawing = limits_drawing
        self._start_time = time.monotonic()
        self._seconds_of_drawing = 0.0
        self._drawn_rounds: dict[str, int] = {}  # the last one of each metric

    def write_settings(
        self,
        first_round: int,
        settings: Mapping[str, Any],
        partition: Callable[[], Figure],
    ) -> None:
        """Write the settings and a picture of the partition, before the first round."""
        self._first_round = first_round
        # purge_step=0 discards the result of an earlier process, whatever the round.
        result_writer = SummaryWriter(self._folder / self._result_folder, purge_step=0)
        self._result_writer = result_writer
        plain_settings = {}
        for name, setting in settings.items():
            if name.startswith("_"):  # entries that the command line adds
                continue
            is_plain = isinstance(setting, str | int | float)
            plain_settings[name] = setting if is_plain else str(setting)
        # add_hparams would write them into a folder of its own.
        _experiment, session_start, _session_end = hparams(plain_settings, metric_dict={})
        result_writer._get_file_writer().add_summary(session_start)
        result_writer.flush()
        if first_round == 0:
            self._draw("data/partition", partition, 0)

    def write_round(self, result: RoundResult) -> None:
        """Write a round's curves, and its pictures if they are due and there is time for them."""
        scalars_by_client: dict[int | None, dict[str, float]] = defaultdict(dict)
        for client, tag, value in self._curves.points(result):
            if not self._has_client_runs or client is None:
                scalars_by_client[None][self._curves.full_tag(tag, client)] = value
            elif tag in self._curves.metrics:  # TensorBoard sorts charts by tag
                scalars_by_client[client][f"{SORTS_FIRST}{tag}"] = value
            else:
                scalars_by_client[client][tag] = value
        # One event per round: an event per scalar takes 30 us, and there are n x M scalars.
        for owner, scalars in scalars_by_client.items():
            _write_scalars(self._writer_of(owner), scalars, result.round_index)
        if result.draws_pictures and self._has_time_for_pictures():
            self._draw_values(result)

    def _has_time_for_pictures(self) -> bool:
        seconds_of_run = time.monotonic() - self._start_time
        max_seconds = MAX_PART_FOR_PICTURES * seconds_of_run
        return not self._limits_drawing or self._seconds_of_drawing <= max_seconds

    def _draw_values(self, result: RoundResult | RunResult) -> None:
        """Draw the metrics' values that were not yet drawn for this round."""
        for name, draw in result.pictures.items():
            if self._drawn_rounds.get(name) != result.round_index:
                self._drawn_rounds[name] = result.round_index
                self._draw(f"{SORTS_FIRST}{name}", draw, result.round_index)

    def finish(self, result: RunResult) -> None:
        """Draw the last round's pictures, and write the final numbers for the tab HParams."""
        if result.draws_pictures:
            self._draw_values(result)
        assert self._result_writer is not None
        _experiment, _session_start, session_end = hparams({}, {})
        _write_scalars(self._result_writer, self._final_numbers(result), result.round_index)
        self._result_writer._get_file_writer().add_summary(session_end)
        self.flush()

    def _final_numbers(self, result: RunResult) -> dict[str, float]:
        """Return logged values, performances, their gains and few clients' values, by tag."""
        numbers = dict(result.record["logged"])
        # What the metrics' values distribute, with its value before the run and after it.
        performance_by_metric = result.record.get("paid_in", {})
        for performance in performance_by_metric.values():
            name = performance["by"]
            initial_value = performance["start"]
            final_value = performance["end"]
            if final_value is not None:
                numbers[f"performance/{name}"] = final_value
                if initial_value is not None:
                    numbers[f"gain/{name}"] = final_value - initial_value

        if self._has_client_runs:
            for metric in self._curves.metrics:
                for row in select_rows(result.table, metric).itertuples():
                    numbers[self._curves.full_tag(metric, row.client)] = row.value
        return {tag: number for tag, number in numbers.items() if not math.isnan(number)}

    def flush(self) -> None:
        """Write everything to the disk. A run resumed from the next checkpoint does not write these rounds again."""
        self._writer.flush()
        for writer in self._own_writers():
            writer.flush()

    def close(self, failed: bool = False) -> None:
        """Close the clients' files and the result's. The logger closes the run's own file."""
        if failed:
            close_in_time(self._close_own_writers, "A writer of TensorBoard")
        else:
            self._close_own_writers()
        self._writers = {}

    def _close_own_writers(self) -> None:
        for writer in self._own_writers():
            writer.close()

    def _own_writers(self) -> list[SummaryWriter]:
        writers = [*self._writers.values()]
        if self._result_writer is not None:
            writers.append(self._result_writer)
        return writers

    def _writer_of(self, client: int | None) -> SummaryWriter:
        if client is None:
            return self._writer
        if client not in self._writers:
            folder = self._folder / self._client_folders[client]
            purge_step = self._first_round or None  # None: a new run discards nothing
            writer = SummaryWriter(folder, purge_step=purge_step, flush_secs=FLUSH_SECONDS)
            self._writers[client] = writer
        return self._writers[client]

    def _draw(self, tag: str, draw: Callable[[], Figure], step: int) -> None:
        start_time = time.monotonic()
        with drawing(tag):
            self._writer.add_figure(tag, draw(), step)
        self._seconds_of_drawing += time.monotonic() - start_time


class Trackers(LoggerSink):
    """Sink that writes curves, and pictures where possible, to all loggers except TensorBoard."""

    def __init__(self, loggers: Sequence[Logger], curves: Curves) -> None:
        self._loggers = loggers
        self._curves = curves

    def write_round(self, result: RoundResult) -> None:
        """Log a round's curves."""
        scalars = {
            self._curves.full_tag(tag, client): value
            for client, tag, value in self._curves.points(result)
        }
        if not scalars:
            return
        scalars[ROUND_NAME] = result.round_index
        for logger in self._loggers:
            logger.log_metrics(scalars, step=result.round_index)

    def finish(self, result: RunResult) -> None:
        """Send pictures to the loggers that accept them. If a logger rejects a picture, warn."""
        for logger in self._loggers:
            if not isinstance(logger, LOGGERS_OF_SERVICES):
                continue
            for name, draw in result.pictures.items():
                with drawing(f"{name} of {type(logger).__name__}"):
                    _log_picture(logger, name, draw(), result.round_index)


def _log_picture(logger: Any, name: str, figure: Any, step: int) -> None:
    if isinstance(logger, WandbLogger):
        logger.log_image(f"charts/{name}", images=[figure], step=step)
    elif isinstance(logger, MLFlowLogger):
        logger.experiment.log_figure(logger.run_id, figure, f"charts/{name}.png")
    else:
        logger.experiment.log_figure(figure_name=name, figure=figure, step=step)


def _write_scalars(
    writer: SummaryWriter,
    scalars: Mapping[str, float],
    step: int,
) -> None:
    if not scalars:
        return
    summary = Summary()
    for tag, value in scalars.items():
        summary.value.add(tag=tag, simple_value=value)
    writer._get_file_writer().add_summary(summary, step)
