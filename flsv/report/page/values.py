"""What the reports for all and for one client have in common: values with their uncertainty, and facts of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flsv import drawing
from flsv.report.page.blocks import NONE, Block, Heat, Lines, Table, Text, number, numbers
from flsv.report.reading import NAN, Run
from flsv.report.run_table import MEANING

MOST = 30
#: Of more than that many clients the highest and the lowest ten are shown.
ENDS = 10


@dataclass(frozen=True)
class Values:
    """A metric's last values ``[n]`` and what is known of their errors.

    Args:
        name: of the metric.
        values: NaN where a client has none.
        low: lower ends ``[n]``; None where nothing is known.
        high: upper ends.
        kind: what the interval is, in words.
    """

    name: str
    values: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    kind: str = ""

    def shown(self, clients: Sequence[int]) -> list[str]:
        """The values of these clients and their intervals, with the same decimals."""
        ends = [self.values, *([] if self.low is None or self.high is None else [self.low, self.high])]
        texts = numbers([column[client] for column in ends for client in clients])
        columns = [texts[place * len(clients) : (place + 1) * len(clients)] for place in range(len(ends))]
        if len(columns) == 1:
            return columns[0]
        return [value if low == NONE else f"{value} [{low}, {high}]" for value, low, high in zip(*columns)]


def values_of(run: Run, metric: str) -> Values:
    """Its values, with their intervals; where a metric has none but standard errors, 1.96 of them on either side."""
    values, known_ends = run.final(metric), run.interval(metric)
    if known_ends is not None:
        return Values(metric, values, *known_ends, MEANING)
    if f"{metric}/stderr" in run.table.metrics:
        errors = run.final(f"{metric}/stderr")
        ends = [[v + sign * 1.96 * e for v, e in zip(values, errors)] for sign in (-1, 1)]
        kind = "95 % of the estimator's sampling error (1.96 standard errors on either side)"
        return Values(metric, values, ends[0], ends[1], kind)
    return Values(metric, values)


def order_of(run: Run) -> list[int]:
    """The clients, by the first metric's value, the highest first; without a metric, by number. Those without a value
    come last."""
    clients = range(run.num_clients)
    if not run.metrics:
        return list(clients)
    values = run.final(run.metrics[0])
    return sorted(clients, key=lambda i: (values[i] != values[i], -values[i] if values[i] == values[i] else 0.0, i))


def ends_of(order: Sequence[int]) -> list[int]:
    """All of few; of many the first and the last ten."""
    return list(order) if len(order) <= MOST else [*order[:ENDS], *order[-ENDS:]]


def client_label(run: Run, client: int) -> str:
    """``client 3`` for a client without a name, else its name."""
    return drawing.client_label(client, run.client_names)


def over_rounds(run: Run, clients: Sequence[int], names: Sequence[str], titles: Mapping[str, str]) -> list[Block]:
    """Of each metric the history of these clients, from where something is known of them.

    Args:
        run: of which.
        clients: their numbers.
        names: what they are called.
        titles: metric to what stands above its history.
    """
    blocks: list[Block] = []
    for metric, title in titles.items():
        history = [[row[client] for client in clients] for row in run.history(metric)]
        known = {r: row for r, row in zip(run.round_numbers, history) if any(value == value for value in row)}
        if known:
            blocks += [Text(f"{title}:"), Lines(names, [*known.values()], tuple(known))]
    return blocks


def by_column(
    run: Run, metric: str, clients: Sequence[int], names: Sequence[str], corner: str = "client"
) -> list[Block]:
    """A metric's last values for each class, or whatever its columns are; nothing of a single column."""
    columns, what = run.table.columns(metric), "class" if run.columns_are_classes(metric) else "column"
    if len(columns) < 2:
        return []
    titles = [run.column_name(metric, column) for column in columns]
    if columns == tuple(map(str, range(run.num_clients))) and what == "column":
        titles = [client_label(run, client) for client in range(run.num_clients)]
    values = [run.final(metric, column) for column in columns]
    rows = [[column[client] for column in values] for client in clients]
    return [Text(f"{metric} by {what}; blue is above 0, orange below:"), Heat(names, titles, rows, corner)]


def algorithm(run: Run) -> str:
    """The algorithm's parts, by their classes."""
    parts = {role: str(name) for role, name in run.record.get("algorithm", {}).items() if name != "FullParticipation"}
    first = parts.pop("aggregator", None)
    if first is None:
        return "an unknown algorithm"
    return f"{first} with {', '.join(parts.values())}" if parts else first


def state_of(run: Run) -> str:
    """The state of the run: its rounds, and whether it has ended."""
    planned = run.record.get("rounds")
    of = f" of {planned}" if run.ended is False and isinstance(planned, int) and planned > 0 else ""
    return f"{run.rounds}{of} rounds{' (not ended)' if run.ended is False else ''}"


def guides(run: Run) -> list[Block]:
    """How to read each metric: its unit, its sign, what it needs and what it costs."""
    told = {name: run.about(name).get("guide", {}) for name in run.metrics}
    heads = list(dict.fromkeys(head for lines in told.values() for head in lines))
    rows = [[name, *(str(lines.get(head, NONE)) for head in heads)] for name, lines in told.items() if lines]
    return [Table(["metric", *heads], rows, texts=True)] if rows else []


def logged(run: Run) -> list[tuple[str, str]]:
    """What the model has logged last, such as its validation accuracy."""
    return [(name, number(NAN if value is None else value)) for name, value in run.record.get("logged", {}).items()]


def share(part: float, whole: float) -> float:
    """NaN of nothing."""
    return part / whole if whole else NAN


def or_none(text: str | None) -> str:
    """What is missing is a dash."""
    return text if text not in (None, "") else NONE
