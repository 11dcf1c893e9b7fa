"""RoundResult: all that is known after a round, for whoever writes it down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Event:
    """What has happened at a client, or to its updates, once or several times.

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


@dataclass(frozen=True)
class RoundResult:
    """What is known after a round. What is not known is NaN.

    Args:
        round_index: from 0.
        last: whether it is the run's last round.
        values: the metrics' values by name, ``[n]`` or ``[n, M]``.
        weights: ``[n]`` of the aggregation, NaN outside the cohort.
        losses: client id to its training loss.
        norms: client id to the norm of its update.
        scores: the scores ``[n]`` of the clients' own models by name, where they were evaluated in this round.
        events: of the run so far.
        shared: the numbers of no single client, by name.
        table: the rows that are known, as :data:`flsv.report.run_table.SCHEMA` has them.
        changes: those that are other than in the round before.
    """

    round_index: int
    last: bool
    values: Mapping[str, Tensor]
    weights: Tensor
    losses: Mapping[int, float]
    norms: Mapping[int, float]
    scores: Mapping[str, Tensor]
    table: pandas.DataFrame
    changes: pandas.DataFrame
    events: Sequence[Event] = ()
    shared: Mapping[str, float] = field(default_factory=dict)
