"""RoundResult and RunResult, and Sink, the base class of objects that store or show them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from flsv.results.text import MESSAGES
from flsv.utilities.csv_files import NAN

if TYPE_CHECKING:
    import pandas

#: The name of the mean loss of a client's training, which only loggers get.
TRAIN_LOSS = "train_loss"
#: Descriptions of invalid updates and of what became of them, by :attr:`Event.what`.
INVALID_UPDATES: Mapping[str, str] = MESSAGES["invalid_updates"]
#: :attr:`Event.what` of a data-quality warning about a client's table.
DATA_WARNING = "data_warning"
#: :attr:`Event.kind` of a data-quality warning about validation samples that are also training samples.
OF_VALIDATION = "validation"
#: :attr:`Event.what` of an event that says how the training of coalitions differs from the run.
UNLIKE_RUN = "coalitions unlike the run"
#: :attr:`Event.what` of rounds in which no client has sent an update.
NO_UPDATE = "no client of the cohort has sent an update that counts"
#: :attr:`Event.what` of a client of a cohort whose updates are all not finite.
ALL_DIVERGED = "sent a model that is not finite, as all of its cohort"


@dataclass(frozen=True)
class Event:
    """An incident at a client, an invalid update in some rounds, or a data-quality warning about its table."""

    #: The client's id. None for an event that concerns all clients.
    client: int | None
    #: The kind of invalid update that a filter found (`"not_finite"`, `"large_excluded"`, `"large_averaged"`), a
    #: description of the incident, `"data_warning"`, :data:`UNLIKE_RUN`, or :data:`NO_UPDATE`.
    what: str
    #: The first round in which it occurred, from 0.
    first: int
    #: The last round in which it occurred.
    last: int
    #: The number of rounds in which it occurred.
    times: int = 1
    #: The number of rounds in which the client has sent an update. None if that does not apply.
    of: int | None = None
    #: For a data-quality warning, the other clients with the same samples.
    others: Sequence[int] = ()
    #: The kind of an event at a site may be :data:`flsv.core.state.OF_VALUES`, that of a data-quality warning
    #: :data:`OF_VALIDATION`.
    kind: str | None = None
    #: For a data-quality warning, the column and a description.
    column: str = ""
    text: str = ""


def invalid_updates_in(events: Iterable[Event]) -> dict[int, tuple[int, int]]:
    """Return ``{client: (rounds with an invalid update, rounds with an update)}`` of the clients with invalid updates.

    Example:
        >>> large = Event(1, "large_averaged", 0, 3, times=2, of=4)
        >>> events = [large, Event(1, "not_finite", 2, 2, of=4), Event(0, "x", 1, 1)]
        >>> invalid_updates_in(events)
        {1: (3, 4)}
    """
    counts: dict[int, tuple[int, int]] = {}
    for event in events:
        if event.client is not None and event.what in INVALID_UPDATES:
            num_invalid_rounds, num_rounds = counts.get(event.client, (0, 0))
            num_rounds_of_event = event.of or 0  # those in which the client has sent an update
            counts[event.client] = (
                num_invalid_rounds + event.times,
                max(num_rounds, num_rounds_of_event),
            )
    return dict(sorted(counts.items()))


def data_warnings_in(events: Iterable[Event]) -> list[Event]:
    """Return the data-quality warnings about the clients' tables.

    Example:
        >>> events = [Event(3, "not_finite", 0, 2), Event(1, "data_warning", 0, 0, text="9 of 80 occur more than once")]
        >>> [event.text for event in data_warnings_in(events)]
        ['9 of 80 occur more than once']
    """
    return [event for event in events if event.what == DATA_WARNING]


class Row(NamedTuple):
    """A number after a round. The file's column ``class`` is called ``column`` here."""

    round: int
    metric: str
    #: The client's id. None for a number of the whole federation, which is not in the file.
    client: int | None
    column: str
    value: float
    client_name: str = ""
    class_name: str = ""
    low: float = NAN
    high: float = NAN


@dataclass(frozen=True)
class RoundResult:
    """A run's numbers after a round."""

    #: The round's number, from 0.
    round_index: int
    #: All rows without a column after the round: present values of the metrics, the clients' weights in the aggregate,
    #: `update_norm` and `train_loss`, and the last known scores of their own models.
    table: Sequence[Row]
    #: The rows that are new, also those of columns: values that differ from the previous round's, the federation's
    #: numbers, weights, norms, losses, and the scores if they were computed in this round.
    changes: Sequence[Row]
    #: The run's events so far.
    events: Sequence[Event] = ()
    #: `{metric: kind}`, how intervals that are not normal were computed, see :class:`flsv.core.IntervalKind`.
    interval_kinds: Mapping[str, Any] = field(default_factory=dict)
    #: `{metric: function}`, functions that draw the metrics' values.
    pictures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    #: Whether pictures of this round are due.
    draws_pictures: bool = False

    @property
    def rows_of_file(self) -> list[Row]:
        """Return the new rows that ``contributions.csv`` gets."""
        return [row for row in self.changes if row.client is not None and row.metric != TRAIN_LOSS]


@dataclass(frozen=True)
class RunResult:
    """The result of a run that has ended, or that was stopped."""

    #: The last round's number, from 0.
    round_index: int
    #: The rows of the last round: each client's values of the metrics, `samples`, `rounds`, `weight` and the scores of
    #: its own model.
    table: pandas.DataFrame
    #: The content of `run.json`, with the events as :class:`Event`. A run that was stopped has no entry `ended`.
    record: Mapping[str, Any]
    #: `{metric: function}`, functions that draw the metrics' values.
    pictures: Mapping[str, Callable[[], Any]]
    #: Whether the last round's pictures are drawn.
    draws_pictures: bool = False


class Sink:
    """Base class of objects to which a run passes its results, to store or to show them.

    Example:
        >>> class Lines(Sink):
        ...     def write_round(self, result):
        ...         print(result.round_index, len(result.changes))
    """

    #: Whether the sink writes to a logger, which cannot replace values that were logged.
    is_logger = False

    def write_round(self, result: RoundResult) -> None:
        """Process the result of a round that has ended."""

    def write_late_rounds(self, results: Sequence[RoundResult]) -> None:
        """Process values of earlier rounds that became known now. A resumed run passes them again."""

    def finish(self, result: RunResult) -> None:
        """Process the result of the whole run, at its end."""

    def flush(self) -> None:
        """Write everything to the disk. It is called before a checkpoint is saved."""

    def close(self, failed: bool = False) -> None:
        """Release files and restore changed attributes after the fit, which ended by an error if ``failed``."""
