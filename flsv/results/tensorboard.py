"""Sinks that write to TensorBoard and to other loggers.

TensorBoard sorts groups of charts by name, capitals first: the clients' values of all metrics, and their pictures, are
in a group that comes before the values that the module logs.

TensorBoard colors and names lines by run. With one run per client, ``<run>/Boston``, in which every client has the same
tags, all clients' lines are in one chart, with colors and names, in every tab. The federation's own file holds the
numbers that belong to no client. With more than :data:`MOST_RUNS` clients all curves are in that file, each with a tag
of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
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
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from flsv.core.artifacts import client_folders
from flsv.results.curves import Point, in_one_place, points_of
from flsv.results.round_result import RoundResult, RunResult, Sink
from flsv.utilities.charts import client_labels, drawing

#: Prefix of the tags of charts that are to come first.
FIRST = "Contributions/"
#: Largest number of clients that each get a TensorBoard run of their own.
MOST_RUNS = 30
#: Seconds after which a client's curves are written to the disk.
FLUSH = 10
#: Loggers of services that accept pictures.
OF_SERVICES = (WandbLogger, MLFlowLogger, CometLogger)


class TensorBoard(Sink):
    """Sink that writes curves and pictures into a TensorBoard logger's folder."""

    def __init__(
        self,
        logger: TensorBoardLogger,
        metrics: Collection[str],
        client_names: Sequence[str],
        class_names: Sequence[str] | None,
        per_class: Sequence[str],
    ) -> None:
        self._writer: SummaryWriter = logger.experiment
        self._folder, self._metrics, self._per_class = Path(logger.log_dir), metrics, per_class
        self._client_names, self._class_names = client_names, class_names
        self._by_client = len(client_names) <= MOST_RUNS
        self._folders = client_folders(client_labels(len(client_names), client_names))
        self._writers: dict[int, SummaryWriter] = {}
        self._first_round = 0

    def begin(
        self, first_round: int, settings: Mapping[str, Any], partition: Callable[[], Figure]
    ) -> None:
        """Write the settings and the picture of the partition before the first round.

        In a resumed run, invalidate what an earlier process wrote from ``first_round`` on.
        """
        self._first_round = first_round
        if first_round:
            self._writer.close()  # it then opens another file, which is read after the files of the earlier process
            kept = _over_batches(self._folder, first_round)
            # Until a new event file's name sorts after those that are there.
            taken = [
                int(path.name.split(".")[3]) for path in self._folder.rglob("events.out.tfevents.*")
            ]
            time.sleep(max(0, max(taken, default=0) + 1 - time.time()))
            start = SessionLog(status=SessionLog.START)
            for event in (Event(file_version="brain.Event:2"), Event(session_log=start)):
                self._writer._get_file_writer().add_event(event, first_round)
            for index, events in groupby(kept, itemgetter(0)):
                self.begin_round(index)
                for _, event in events:
                    self._writer._get_file_writer().add_event(event, event.step, event.wall_time)
            self.begin_round(first_round)
        plain = {
            name: of if isinstance(of, str | int | float) else str(of)
            for name, of in settings.items()
        }
        for summary in hparams(plain, {}):
            self._writer._get_file_writer().add_summary(summary)
        if first_round == 0:
            self._draw("data/partition", partition, 0)

    def begin_round(self, index: int) -> None:
        """Mark in the file where round ``index`` begins. A process that resumes here discards what follows the mark."""
        mark = SessionLog(status=SessionLog.CHECKPOINT)
        self._writer._get_file_writer().add_event(Event(session_log=mark), index)

    def write(self, result: RoundResult) -> None:
        """Write a round's curves, and its pictures if ``result.drawn``."""
        index, names = result.round_index, self._client_names
        points = list(points_of(result, self._per_class, len(names), self._class_names))
        scalars = dict(result.shared_changes)
        if self._by_client:
            self._write_clients(points, index)
        else:
            scalars |= in_one_place(points, names)
        # One event per round: an event per scalar takes 30 us, and there are n x M scalars.
        _add(self._writer, scalars, index)
        if result.drawn:
            self.draw(result)

    def draw(self, result: RoundResult | RunResult) -> None:
        """Draw the pictures of the metrics' values."""
        for name, draw in result.pictures.items():
            self._draw(f"{FIRST}{name}", draw, result.round_index)

    def write_late(self, results: Sequence[RoundResult]) -> None:
        for result in results:
            self.write(result)

    def finish(self, result: RunResult) -> None:
        self.flush()

    def flush(self) -> None:
        """Write everything to the disk. A run resumed from the next checkpoint does not write these rounds again."""
        for writer in (self._writer, *self._writers.values()):
            writer.flush()

    def close(self, failed: bool = False) -> None:
        """Close the clients' files. The logger closes the run's own file."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _write_clients(self, points: Iterable[Point], step: int) -> None:
        scalars: dict[int, dict[str, float]] = {}
        for point in points:
            tag = f"{FIRST}{point.tag}" if point.tag in self._metrics else point.tag
            scalars.setdefault(point.client, {})[tag] = point.value
        for client, own in scalars.items():
            if client not in self._writers:
                folder, since = self._folder / self._folders[client], self._first_round or None
                self._writers[client] = SummaryWriter(folder, purge_step=since, flush_secs=FLUSH)
            _add(self._writers[client], own, step)

    def _draw(self, tag: str, draw: Callable[[], Figure], step: int) -> None:
        with drawing(tag):
            self._writer.add_figure(tag, draw(), step)


class Trackers(Sink):
    """Sink that writes curves, and pictures where possible, to all loggers except TensorBoard."""

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
        """Log a round's curves."""
        points = points_of(result, self._per_class, len(self._client_names), self._class_names)
        scalars = {**result.shared_changes, **in_one_place(points, self._client_names)}
        for logger in self._loggers:
            logger.log_metrics(scalars, step=result.round_index)

    def write_late(self, results: Sequence[RoundResult]) -> None:
        for result in results:
            self.write(result)

    def finish(self, result: RunResult) -> None:
        """Send pictures to the loggers that accept them. A rejection is a warning."""
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


def _over_batches(folder: Path, first_round: int) -> list[tuple[int, Event]]:
    """Return ``(round, event)`` of points that a run resumed at ``first_round`` has to write again.

    A resumed run makes TensorBoard discard all steps from ``first_round`` on. The steps of most curves count rounds.
    A module that logs in every training step also writes curves whose steps count batches. Their points of earlier
    rounds can have a step of ``first_round`` or more, and would be lost.
    """
    found: list[tuple[int, Event]] = []
    for path in sorted(folder.glob("events.out.tfevents.*")):
        index = first_round  # files of earlier versions have no marks: which round is not known
        for event in LegacyEventFileLoader(str(path)).Load():
            status = event.session_log.status if event.HasField("session_log") else None
            if status == SessionLog.START:
                found = [(of, each) for of, each in found if each.step < event.step]
            elif status == SessionLog.CHECKPOINT:
                index = event.step
            elif event.HasField("summary") and index < first_round:
                found.append((index, event))
    return sorted(((of, each) for of, each in found if each.step >= first_round), key=itemgetter(0))


def _add(writer: SummaryWriter, scalars: Mapping[str, float], step: int) -> None:
    if scalars:
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
        writer._get_file_writer().add_summary(Summary(value=values), step)
