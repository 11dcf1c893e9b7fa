"""A run in TensorBoard: its event file, and one per client and per class.

TensorBoard shows groups of charts by the alphabet, capitals first: the clients' values of all metrics, and their
pictures, are in a group that comes before what the module logs.

TensorBoard colours and names lines by run. A run per client, ``<run>/clients/Boston``, in which every client has the
same tags, puts all clients into one chart, in colours, with names, in every tab. A run per class,
``<run>/classes/3_Dress``, puts all classes of one client into one. The run's own file keeps what is nobody's alone.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from torchmetrics import Metric

from flsv.charts import client_labels, drawing
from flsv.metrics import ContributionMetric
from flsv.models.imbalance import OWN_SCORES
from flsv.participants.artifacts import client_folders
from flsv.report.folder import Reporting
from flsv.report.measured import RoundScalars, class_part, client_score, columns_of
from flsv.report.run_table import RunTable
from flsv.report.tabs import (
    FixedScale,
    accuracies,
    draw_metric,
    due,
    guide_text,
    hyperparameters,
    layout,
    layout_summary,
    text_table,
)
from flsv.report.terminal import client_columns

_VERSION = "brain.Event:2"
#: Begins the tags of what is to be seen first.
FIRST = "Contributions/"
_count = itertools.count()


class EventFile:
    """Writes scalars to an event file, flushed after each event.

    ``torch.utils.tensorboard`` has a thread and a queue per file. With tens of files and one small event in each, that
    takes longer than the writing.

    Args:
        folder: TensorBoard's run; made if it is not there.
        first_round: the next round, see :func:`void_from`.
        suffix: of the file's name.

    Example:
        >>> import tempfile
        >>> from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = EventFile(Path(folder))
        ...     file.write(0, {"cssv": 0.5})
        ...     [event.value for event in EventAccumulator(folder).Reload().Scalars("cssv")]
        [0.5]
        >>> file.close()
    """

    def __init__(self, folder: Path, first_round: int = 0, suffix: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads a folder's files by name, so by time; a run may go on within a second of its end.
        unique = f"{time.time():.6f}.{socket.gethostname()}.{os.getpid()}.c{next(_count):06d}"
        self._file = (folder / f"events.out.tfevents.{unique}{suffix}").open("ab")
        self._records = RecordWriter(self._file)
        self._add(Event(file_version=_VERSION))
        for event in void_from(first_round):
            self._add(event)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one event; none for no scalars."""
        if scalars:
            self._add(Event(step=step, summary=summary_of(scalars)))

    def close(self) -> None:
        """No more is written; a second call does nothing."""
        self._file.close()

    def _add(self, event: Event) -> None:
        event.wall_time = time.time()
        self._records.write(event.SerializeToString())
        self._file.flush()


def summary_of(scalars: Mapping[str, float]) -> Summary:
    """As one event holds them."""
    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()])


def void_from(first_round: int) -> list[Event]:
    """What tells TensorBoard that whatever an earlier process wrote of this and later rounds is void, as the
    ``purge_step`` of ``SummaryWriter`` does: no round is there twice. Nothing for round 0."""
    if first_round == 0:
        return []
    start = SessionLog(status=SessionLog.START)
    return [Event(step=first_round, file_version=_VERSION), Event(step=first_round, session_log=start)]


class EventFiles:
    """Writes the events of one fit into the folder of one logger.

    Args:
        logger: whose experiment is a ``SummaryWriter``: the run's own file.
        first_round: the next round. Where it is not 0, whatever an earlier process wrote of this and later rounds is
            declared void, as TensorBoard does it itself (``purge_step``): no round is there twice.
        clients: names of the folders below ``clients/``, by number; none: the clients' numbers go to the run's own
            file.
        classes: names of the folders below ``classes/``, likewise.
        first: tags of the clients' numbers that are to be seen first.

    A client's file is opened when there is something to write, and stays open until :meth:`close`.
    """

    def __init__(
        self,
        logger: TensorBoardLogger,
        first_round: int,
        clients: Sequence[str] = (),
        classes: Sequence[str] = (),
        first: Collection[str] = (),
    ) -> None:
        self.writer: SummaryWriter = logger.experiment
        self._folder, self._first_round = Path(logger.log_dir), first_round
        self._clients, self._classes, self._first = clients, classes, first
        self._open: dict[Path, EventFile] = {}
        if first_round:
            open_last(self.writer, self._folder)
        for event in void_from(first_round):
            self.writer._get_file_writer().add_event(event, first_round)

    @property
    def by_client(self) -> bool:
        """Whether every client has a run."""
        return bool(self._clients)

    def scalars(self, round_index: int, scalars: RoundScalars) -> None:
        """Write one round's numbers."""
        own = scalars.shared if self.by_client else scalars.flat()
        if own:
            # One event for the round: an event per scalar takes 30 us each, and there are n x M of them.
            self.writer._get_file_writer().add_summary(summary_of(own), round_index)
        if self.by_client:
            for kind, names, numbers in (
                ("clients", self._clients, scalars.clients),
                ("classes", self._classes, scalars.classes),
            ):
                for index, values in numbers.items() if names else ():
                    tagged = {f"{FIRST}{tag}" if tag in self._first else tag: x for tag, x in values.items()}
                    self._file(self._folder / kind / names[index]).write(round_index, tagged)

    def close(self) -> None:
        """Close the clients' and classes' files; the run's own is the logger's."""
        for file in self._open.values():
            file.close()
        self._open = {}

    def _file(self, folder: Path) -> EventFile:
        if folder not in self._open:
            self._open[folder] = EventFile(folder, self._first_round)
        return self._open[folder]


def open_last(writer: SummaryWriter, folder: Path) -> None:
    """See to it that what ``writer`` writes from now on is read after what others wrote in the second it was opened.

    TensorBoard reads a folder's files by name. torch names them by the second, then by host and process: a run that
    is killed and resumed within a second may go on in a file that is read first.
    """
    writer._get_file_writer()
    seconds = [int(path.name.split(".")[3]) for path in folder.glob("events.out.tfevents.*")]
    last = max(seconds, default=0)
    if seconds.count(last) > 1:
        writer.close()
        time.sleep(min(max(last + 1 - time.time(), 0), 1))
        writer._get_file_writer()


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
        self._scales = {name: FixedScale(*pair) for name, pair in bounds.items()}

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
        self._files = [EventFiles(x, first_round, clients, folders, self._metrics) for x in self._loggers]
        described = text_table({"setting": list(settings), "value": list(settings.values())})
        for files in self._files:
            files.writer.add_text("settings", described, first_round)
            for name, metric in self._metrics.items():
                files.writer.add_text(f"how to read/{name}", guide_text(name, metric), first_round)
            # A run that goes on may do so in another folder; in the same one the last layout counts.
            files.writer._get_file_writer().add_summary(layout_summary(self._layout(files.by_client)))
        if first_round == 0:
            self._figure("data/partition", lambda: partition()[0], 0)

    def remember(self, table: RunTable) -> None:
        """Values of the rounds before: pictures go on with the same scale."""
        metrics, values = table.cells["metric"], table.cells["value"]
        for name, scale in self._scales.items():
            if (of_it := metrics == name).any():
                scale.include(values[of_it])

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
        if self.figures_due(round_index):
            for name, value in contributions.items():
                self._figure(f"{FIRST}{name}", partial(self.draw, name, value, round_index), round_index)

    def figures_due(self, round_index: int) -> bool:
        """Whether figures are drawn after this round."""
        return due(round_index, self._trainer.max_epochs, self._reporting.figures)

    def finish(self, table: RunTable, metrics: Iterable[str], last_round: int) -> None:
        """After the last round: a table of the clients, and the run's line in the table of runs."""
        if not self._in_table:
            self._write_table(accuracies(self._logged()))
        count = len(self._client_names)
        labels = client_labels(count, self._client_names)
        text = text_table({"client": labels, **client_columns(table, metrics, count)})
        for files in self._files:
            files.writer.add_text("contributions", text, last_round)
            files.writer.flush()

    def flush(self) -> None:
        """Everything to the disk, as before a checkpoint: what a resumed run does not write again is there."""
        for files in self._files:
            files.writer.flush()

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
        ours = (*self._metrics, "weight", *map(client_score, OWN_SCORES))
        return [name for name in self._trainer.callback_metrics if name.split("/")[0] not in ours]

    def _write_table(self, logged: Sequence[str]) -> None:
        results = [*logged]
        if self._evaluated:
            # TensorBoard ticks the first five.
            results += ["client_accuracy/mean", "client_accuracy/min", "client_accuracy/std"]
            results += [f"{client_score(name)}/mean" for name in OWN_SCORES[1:]]
        for logger, files in zip(self._loggers, self._files):
            version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
            # Runs of one name would be taken for repetitions of one, whose mean is shown.
            place = f"#{zlib.crc32(os.path.abspath(logger.log_dir).encode()) & 0xFFFF:04x}"
            name = " ".join(str(part) for part in (self._chosen.get("algorithm"), version, place) if part)
            for summary in hyperparameters(self._chosen, results, name):
                files.writer._get_file_writer().add_summary(summary)
        self._in_table = True

    def _layout(self, by_client: bool) -> Any:
        curves = {name: self._curves(metric) for name, metric in self._metrics.items()}
        more = ["weight", "train_loss", "update_norm", *(map(client_score, OWN_SCORES) if self._evaluated else [])]
        names, classes = self._client_names, self._class_names or ()
        ends = [n for n, m in self._metrics.items() if isinstance(m, ContributionMetric) and m.over_rounds is not None]
        return layout(curves, len(names), len(classes), names, classes, by_client, more, ends, FIRST)

    def _curves(self, metric: Metric) -> bool:
        """Whether a metric's values per class are curves."""
        mine = isinstance(metric, ContributionMetric) and metric.per_class and columns_of(metric) is None
        return self._reporting.per_class and mine and len(self._class_names or ()) > 1

    def draw(self, name: str, value: Tensor, round_index: int) -> Figure:
        """A metric's values, with the colours of all rounds so far."""
        style = {"limits": self._scales[name].limits, "stderr": self._stderr(name)}
        return draw_metric(self._metrics[name], name, value, round_index, **style)[0]

    def _stderr(self, name: str) -> Tensor | None:
        metric = self._metrics.get(name)
        error = metric.diagnostics().get("stderr") if isinstance(metric, ContributionMetric) else None
        return None if error is None else error.detach().cpu()

    def _figure(self, tag: str, draw: Callable[[], Figure], step: int) -> None:
        with drawing(tag):
            for files in self._files:
                files.writer.add_figure(tag, draw(), step)
