"""The results of a round and of a run, and Sink, the base class of objects that write results."""

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
        client: the client's number.
        what: the kind of fault that a filter found (``"not_finite"``, ``"large"``, ``"copy"``, ``"echo"``), or a
            description of the incident.
        first: the first round in which it occurred, from 0.
        last: the last round in which it occurred.
        times: the number of rounds in which it occurred.
        of: the number of rounds in which the client has sent an update; None if that does not apply.
        others: for a copy, the other clients with the same update.
    """

    client: int
    what: str
    first: int
    last: int
    times: int = 1
    of: int | None = None
    others: Sequence[int] = ()


def copies_in(events: Iterable[Event]) -> list[list[int]]:
    """Return groups of clients, as sorted numbers, that sent copies of one another's updates. A client that sent the
    server's last step back is a group of its own.

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
    """Return ``{client: (faulty, sent)}``: in how many rounds the client's update was not finite or far too large, and
    in how many it sent an update. Clients without a faulty round are left out. Metrics ignore an update in its faulty
    rounds.

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
    """A row of a run's table, see :data:`flsv.results.run_table.SCHEMA`; the column ``class`` is called ``column``
    here."""

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
    """The numbers of a run after a round: one row of the run's table per client and value, and the federation's
    numbers.

    Args:
        round_index: the round's number, from 0.
        table: all rows after the round: each client's present values of the metrics, its weight in the aggregate,
            ``update_norm`` and ``train_loss``, and the last known scores of its own model.
        changes: the rows of ``table`` that are new: values of metrics that differ from the previous round's, the
            weights and update norms, and the scores if they were computed in this round; never ``train_loss``.
        shared: the last known numbers of the whole federation, not of one client, ``{name: number}``.
        shared_changes: the numbers in ``shared`` that were computed in this round.
        events: the run's events so far.
        pictures: ``{metric: function}``; a call of the function draws the metric's values.
        drawn: whether pictures of this round are to be drawn.
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
    """The result of a run that has ended.

    Args:
        round_index: the last round's number, from 0.
        rounds: the number of rounds of the run.
        table: the rows of the last round: each client's values of the metrics, ``samples``, ``rounds``, ``weight`` and
            the scores of its own model.
        columns: ``{metric: title of its columns}`` (such as ``"class"``).
        to_pay_by: the names of the metrics suitable for payment, those closest to retraining first.
        trained: the names of the metrics that train coalitions.
        learning_record: the performances that the metrics divide among the clients, as ``run.json`` holds them.
        logged: the values that the module has logged last, ``{name: value}``.
        pictures: ``{metric: function}``; a call of the function draws the metric's values.
    """

    round_index: int
    rounds: int
    table: pandas.DataFrame
    columns: Mapping[str, str]
    to_pay_by: Sequence[str]
    learning_record: Mapping[str, Any]
    logged: Mapping[str, float]
    pictures: Mapping[str, Callable[[], Any]]
    trained: Sequence[str] = ()


class Sink:
    """Base class of objects to which a run passes its results, to store or to show them. Every method does nothing
    unless a subclass overrides it.

    Example:
        >>> class Lines(Sink):
        ...     def write(self, result):
        ...         print(result.round_index, len(result.changes))
    """

    def begin_round(self, index: int) -> None:
        """Prepare for round ``index``, counted from 0; called before any callback's ``on_train_epoch_start``."""

    def write(self, result: RoundResult) -> None:
        """Process the result of a round that has ended."""

    def write_late(self, results: Sequence[RoundResult]) -> None:
        """Process values of earlier rounds that became known only now; ``results`` are in the order of the rounds and
        hold nothing else of them. If an earlier process had passed such values on, a resumed run passes them on
        again."""

    def finish(self, result: RunResult) -> None:
        """Process the result of the whole run, at its end."""

    def flush(self) -> None:
        """Write everything to the disk; called before a checkpoint is saved."""

    def close(self, failed: bool = False) -> None:
        """Release files and restore changed attributes; called after the fit, with ``failed`` if it ended by an
        error."""
