"""One event file of TensorBoard, written without a thread."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

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
