"""The results of a round and of a run, and Sink, the base of what writes them down."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Event:
    """An incident at a client, or a fault of its updates, in one round or in several.

    Args:
        client: its number.
        what: a filter's fault (``"not_finite"``, ``"large"``, ``"copy"``, ``"echo"``), or an incident in words.
        first: the first round, from 0.
        last: the last round.
        times: in how many rounds.
        of: of how many in which the client has sent an update; None where that says nothing.
        others: of a copy, the other clients of its group.
    """

    client: int
    what: str
    first: int
    last: int
    times: int = 1
    of: int | None = None
    others: Sequence[int] = ()


def copies_in(events: Iterable[Event]) -> list[list[int]]:
    """Group the clients who were found to send one another's updates; a client that sent the server's last step back is
    a group of its own.

    Example:
        >>> copies_in([Event(3, "copy", 0, 2, others=[1]), Event(1, "copy", 0, 2, others=[3]), Event(2, "echo", 1, 1)])
        [[1, 3], [2]]
    """
    events = list(events)
    groups = {tuple(sorted({each.client, *each.others})) for each in events if each.what == "copy"}
    copied = {client for group in groups for client in group}
    alone = {(each.client,) for each in events if each.what == "echo" and each.client not in copied}
    return [list(group) for group in sorted(groups | alone)]


def faults_in(events: Iterable[Event]) -> dict[int, tuple[int, int]]:
    """Count in how many rounds a client's update was not finite or far too large, of how many that it sent; clients in
    order are left out. No metric has measured such a round of a client.

    Example:
        >>> faults_in([Event(1, "large", 0, 3, times=2, of=4), Event(1, "not_finite", 2, 2, of=4), Event(0, "x", 1, 1)])
        {1: (3, 4)}
    """
    found: dict[int, tuple[int, int]] = {}
    for each in events:
        if each.what in ("not_finite", "large"):
            times, of = found.get(each.client, (0, 0))
            found[each.client] = times + each.times, max(of, each.of or 0)
    return dict(sorted(found.items()))


class Row(NamedTuple):
    """A row of a run's table, see :data:`flsv.results.run_table.SCHEMA`, whose ``class`` is ``column`` here."""

    round: int
    metric: str
    client: int
    column: str
    value: float
    client_name: str
    class_name: str
    low: float
    high: float


@dataclass(frozen=True)
class RoundResult:
    """The rows of the run's table after a round, and the numbers that belong to no single client.

    Args:
        round_index: from 0.
        table: all rows that are known. The clients' ``train_loss`` stands here alone, as no round's change.
        changes: the rows that differ from the round before.
        shared: the numbers of no single client that are known, by name.
        shared_changes: those of them that were measured in this round.
        events: the run's events so far.
        pictures: name of a metric to what draws its values.
        drawn: whether pictures are wanted of this round.
    """

    round_index: int
    table: Sequence[Row]
    changes: Sequence[Row]
    shared: Mapping[str, float] = field(default_factory=dict)
    shared_changes: Mapping[str, float] = field(default_factory=dict)
    events: Sequence[Event] = ()
    pictures: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    drawn: bool = False


@dataclass(frozen=True)
class RunResult:
    """The result of a run that has come to its end.

    Args:
        round_index: the last round's number, from 0.
        rounds: how many there have been.
        table: of the last round: the metrics' rows, and ``samples``, ``rounds``, ``weight`` and the scores of clients'
            own models.
        columns: name of a metric to what its columns are called (``"class"``).
        to_pay_by: those of them whose values one may share something out by, the nearest to retraining first.
        learned: what the model has learned that the metrics share out, as ``run.json`` has it.
        logged: what the module has logged last.
        pictures: name of a metric to what draws its values.
    """

    round_index: int
    rounds: int
    table: pandas.DataFrame
    columns: Mapping[str, str]
    to_pay_by: Sequence[str]
    learned: Mapping[str, Any]
    logged: Mapping[str, float]
    pictures: Mapping[str, Callable[[], Any]]


class Sink:
    """Base class of what takes results; none knows another. A sink overrides what it needs.

    Example:
        >>> class Lines(Sink):
        ...     def write(self, result):
        ...         print(result.round_index, len(result.changes))
    """

    def write(self, result: RoundResult) -> None:
        """Take the result of a round that is over."""

    def write_late(self, result: RoundResult) -> None:
        """Take values of an earlier round that are known now; nothing else of it is."""

    def finish(self, result: RunResult) -> None:
        """Take the result of the whole run, at its end."""

    def flush(self) -> None:
        """Write everything to the disk, as before a checkpoint."""

    def close(self, failed: bool = False) -> None:
        """Leave everything as it was found: the fit is over, or has failed."""
