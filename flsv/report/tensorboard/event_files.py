"""TensorBoard's event files of one run: its own, and one per client and per class.

TensorBoard colours and names lines by run. A run per client, ``<run>/clients/Boston``, in which every client has the
same tags, puts all clients into one chart, in colours, with names, in every tab. A run per class,
``<run>/classes/3_Dress``, puts all classes of one client into one. The run's own file keeps what is nobody's alone.
"""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger
from matplotlib.figure import Figure
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from flsv.report.tensorboard.scalars import RoundScalars

_VERSION = "brain.Event:2"
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

    A client's file is opened when there is something to write, and stays open until :meth:`close`.
    """

    def __init__(
        self, logger: TensorBoardLogger, first_round: int, clients: Sequence[str] = (), classes: Sequence[str] = ()
    ) -> None:
        self.writer: SummaryWriter = logger.experiment
        self._folder, self._first_round = Path(logger.log_dir), first_round
        self._clients, self._classes = clients, classes
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
                    self._file(self._folder / kind / names[index]).write(round_index, values)

    def figure(self, tag: str, draw: Callable[[], Figure], step: int) -> None:
        """Add a picture."""
        self.writer.add_figure(tag, draw(), global_step=step)

    def text(self, tag: str, markdown: str, step: int) -> None:
        """Add a text."""
        self.writer.add_text(tag, markdown, global_step=step)

    def histogram(self, tag: str, values: Tensor, step: int) -> None:
        """Add how the finite ones of ``values`` are distributed; nothing where there are none."""
        finite = values[values.isfinite()]
        if len(finite):
            self.writer.add_histogram(tag, finite, global_step=step)

    def summaries(self, *summaries: Summary) -> None:
        """Add what belongs to no round."""
        for summary in summaries:
            self.writer._get_file_writer().add_summary(summary)

    def flush(self) -> None:
        """Everything to the disk, as before a checkpoint: what a resumed run does not write again is there."""
        self.writer.flush()

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
