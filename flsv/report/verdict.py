"""What each client is worth by all that is known of a run, side by side: the run's own values, their means over runs
with other seeds, and values by retraining. Whether they contradict each other, and whether the order is established."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import numpy as np
from scipy import stats

from flsv.errors import ConfigurationError
from flsv.report.blocks import joined, percent
from flsv.report.facts import client_label, values_of
from flsv.report.reading import NAN, Run
from flsv.report.repeated import apart, means

#: How values by retraining are asked for.
RETRAINED = "retrained"
#: Likewise those of the data alone, by ``flsv value``.
VALUED = "valued"
#: Clients up to which every two are compared seed by seed.
MOST_COMPARED = 30


@dataclass(frozen=True)
class Basis:
    """One value per client, by which clients could be paid.

    Args:
        key: a metric's name, ``"retrained"`` or ``"valued"``.
        source: the run itself, several runs with other seeds, retraining, or the data before any training.
        title: what it is called.
        values: ``[n]``, NaN where a client has none.
        low: lower ends ``[n]``; NaN where nothing is known.
        high: upper ends.
        known_of: what the interval is of, in words.
        runs: those that it is the mean of.
    """

    key: str
    source: Literal["run", "repeat", "retrained", "valued"]
    title: str
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    known_of: str = ""
    runs: Sequence[Run] = field(default=(), repr=False)

    @property
    def known(self) -> list[int]:
        """Clients that have a value."""
        return [client for client, value in enumerate(self.values) if value == value]

    @property
    def order(self) -> list[int]:
        """Those with a value, the highest first."""
        return sorted(self.known, key=lambda client: (-self.values[client], client))

    @property
    def bounded(self) -> bool:
        """Whether all who have a value have an interval."""
        return bool(self.known) and all(self.low[client] == self.low[client] for client in self.known)


def bases(run: Run, repeats: Sequence[Run] = ()) -> list[Basis]:
    """All that is known, by metric in the order of the configuration, then by retraining, then of the data alone."""
    found: list[Basis] = []
    for metric in run.metrics:
        about = run.about(metric)
        if about.get("higher_is_better") is False or about.get("columns"):
            continue  # a cost, or what clients are to each other
        values = values_of(run, metric)
        none = [NAN] * run.num_clients
        of = "the rounds of this run give" if values.kind else ""
        found.append(Basis(metric, "run", metric, values.values, values.low or none, values.high or none, of))
        if repeats:
            mean, low, high = means(repeats, metric)
            title = f"{metric}, mean of {len(repeats)} runs"
            found.append(
                Basis(metric, "repeat", title, mean, low, high, f"{len(repeats)} runs with other seeds give", repeats)
            )
    rows = run.retrained()
    if any(rows):
        value, low, high = ([row.get(name, NAN) for row in rows] for name in ("value", "low", "high"))
        of = "the trainings with some of the partners give"
        found.append(Basis(RETRAINED, "retrained", "retraining", value, low, high, of))
    shares = [row.get("share", NAN) for row in run.valued()]
    if any(share == share for share in shares):
        none = [NAN] * len(shares)
        found.append(Basis(VALUED, "valued", "the data before training", shares, none, none))
    return found


def chosen(found: Sequence[Basis], by: str | None = None) -> Basis | None:
    """The one to pay by: the one asked for, else retraining, else the first metric; of a metric the mean over runs,
    where there are several. None where nothing was measured.

    Raises:
        ConfigurationError: the one asked for is not there.
    """
    keys = list(dict.fromkeys(each.key for each in found))
    if by is not None and by not in keys:
        raise ConfigurationError(
            f"by={by!r}: expected one of {', '.join(keys) or 'none, for nothing was measured'}"
            + (
                ". Values by retraining are there after flsv retrain RUN."
                if by == RETRAINED
                else ", which say of each client alone that more is better."
            )
        )
    trained = [key for key in keys if key != VALUED]  # what data are worth before training is asked for by name
    if not (by or trained):
        return None
    key = by or (RETRAINED if RETRAINED in keys else trained[0])
    return [each for each in found if each.key == key][-1]


#: A share from which on somebody is paid something.
LEAST_SHARE = 0.01


def contradictions(run: Run, found: Sequence[Basis]) -> list[str]:
    """What contradicts each other, in words: orders that are rather the opposite of each other; and clients of whom one
    says with certainty that they take away, while by the other they have a share. Of a metric that there are several
    runs of, their mean speaks."""
    last = list({each.key: each for each in found}.values())
    name = partial(client_label, run)
    lines = [
        f"{one.title} and {other.title} put the partners into orders that are rather the opposite of each other."
        for one, other in itertools.combinations(last, 2)
        if _opposite(one, other)
    ]
    for basis in last:
        total = math.fsum(max(basis.values[client], 0.0) for client in basis.known)
        for client in basis.known:
            share = basis.values[client] / total if total else 0.0
            against = [each.title for each in last if _takes_away(each, client)]
            if share >= LEAST_SHARE and against:
                lines.append(
                    f"By {joined(against)} the model would be better without {name(client)}, which has "
                    f"{percent(share)} by {basis.title}."
                )
    return lines


def _opposite(one: Basis, other: Basis) -> bool:
    both = sorted({*one.known} & {*other.known})
    a, b = ([each.values[client] for client in both] for each in (one, other))
    if len(both) < 3 or not min(np.ptp(a), np.ptp(b)) > 0:
        return False
    return float(stats.spearmanr(a, b).statistic) < 0


def _takes_away(basis: Basis, client: int) -> bool:
    """Whether a value is below 0 for certain: its whole interval; without one, by a hundredth of the largest value."""
    value, high = basis.values[client], basis.high[client]
    if value != value:
        return False
    return high < 0 if high == high else value < -0.01 * max(abs(basis.values[each]) for each in basis.known)


def order_in_words(run: Run, basis: Basis) -> str:
    """Whether the order of the clients is established, in a sentence or two."""
    order = basis.order
    if len(order) < 2:
        return "There is no order: fewer than two partners have a value."
    if not basis.bounded:
        return (
            "Whether the order would be the same another time is not known: nothing tells how far these values swing. "
            "Repeat the run with other seeds (flsv repeat)."
        )
    groups = _groups(basis)
    names = [[client_label(run, client) for client in group] for group in groups]
    if len(groups) == len(order):
        order_said = f"{', '.join(name for group in names for name in group)}"
        said = f"The order is established: {order_said}."
        within = f"the order is clear: {order_said}"
    elif len(groups) == 1:
        said = "The order is not established: between any two neighbours the difference may be chance."
        within = "the order is open: differences between neighbours may be chance"
    else:
        parts = ", then ".join(_in_any_order(group) for group in names)
        said = f"The order is established in part: {parts}."
        within = f"the order is clear in part: {parts}"
    if basis.source == "run":
        other = "another seed may give another (flsv repeat)"
        return f"One run does not establish an order: {other}. Within this run {within}."
    return said


def _in_any_order(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{joined(names[:10])}{' and others' if len(names) > 10 else ''} in no certain order"


def _groups(basis: Basis) -> list[list[int]]:
    """The clients from the highest value down, in groups of which everybody in one is certainly above everybody in the
    next. Of several runs two are compared seed by seed; else their intervals must not meet."""
    order = basis.order
    groups = [[order[0]]]
    for place, client in enumerate(order[1:], 1):
        if _parted(basis, order[:place], order[place:]):
            groups.append([client])
        else:
            groups[-1].append(client)
    return groups


def _parted(basis: Basis, first: Sequence[int], others: Sequence[int]) -> bool:
    if len(basis.runs) > 1 and len(first) + len(others) <= MOST_COMPARED:
        return all(apart(basis.runs, basis.key, a, b) for a in first for b in others)
    return min(basis.low[a] for a in first) > max(basis.high[b] for b in others)
