"""What the pages for all and for one client say of a run alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flsv.csv_files import NAN
from flsv.report.blocks import NONE, Block, Heat, Lines, Table, number, numbers, percent
from flsv.report.reading import Run
from flsv.report.run_table import MEANING
from flsv.report.terminal import undecided


def mean(values: Sequence[float]) -> float:
    """Of the known ones; NaN without any."""
    known = [value for value in values if value == value]
    return math.fsum(known) / len(known) if known else math.nan


#: By the metric's class.
CAVEATS: Mapping[str, Sequence[str]] = yaml.safe_load(
    (Path(__file__).parent / "templates" / "caveats.yaml").read_text(encoding="utf-8")
)
NO_ERROR = (
    "The values come without standard errors: differences between clients that are small beside those between rounds, "
    "or between two seeds, mean little."
)
AT_CHANCE = (
    "By {} on the validation set the model is not told apart from one that always gives the same answer: it cannot be "
    "said to have learned, and who contributed what to it is chance. Nothing should be paid by these values."
)
NOT_KNOWN = "Whether the model has learned anything is not known"
#: Of the validation set in one class, from which on accuracy says little of who taught the model what.
_MOSTLY = 0.7
_ONE_CLASS = (
    "{} of the validation set is of one class: an answer that is always the same has most of the accuracy that these "
    "values share out, and a client whose data teach nothing is paid nearly like the others. Retrain by --metric "
    "balanced_accuracy or negative_loss."
)
_OTHER_SHAPE = (
    "KernelSHAP of the same trainings is outside of the interval of {}: there the shape that the fit takes the game "
    "for decides. Train more coalitions (--trainings all) before paying by it."
)
ONE_RUN = (
    "This is one run with one seed. Before anything of worth is shared out by it, repeat it with other seeds and see "
    "whether the order of the clients stays."
)


def at_chance(record: Mapping[str, Any]) -> list[str]:
    """By what the model is not told apart from a constant answer, each once."""
    return list({told["by"]: None for told in record.get("paid_in", {}).values() if told["told_apart"] is False})


def retrained_caveats(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> list[str]:
    """Caveats of retraining-based values.

    Args:
        rows: of ``retrained.csv``.
        names: of the same clients.
    """
    outside = [row["kernel_shap"] < row["low"] or row["kernel_shap"] > row["high"] for row in rows]
    others = [name for name, so in zip(names, outside) if so]
    found = [_OTHER_SHAPE.format(", ".join(others))] if others else []
    majority = rows[0]["majority"]
    return [*found, _ONE_CLASS.format(percent(majority))] if majority >= _MOSTLY else found


def caveats(metric: Mapping[str, Any], errors: bool) -> list[str]:
    """Caveats of a run's values.

    Args:
        metric: as ``run.json`` describes it.
        errors: whether there are standard errors or intervals.
    """
    found = list(CAVEATS.get(metric["class"], ()))
    return found if errors else [*found, NO_ERROR]


MOST = 30
#: Of more than that many clients the highest and the lowest ten are shown.
ENDS = 10


def caveats_of(run: Run) -> list[str]:
    """Of all its metrics, each said once, with the names of the metrics that it is of before it."""
    of: dict[str, list[str]] = {}
    for metric in run.metrics:
        for text in caveats(run.about(metric), values_of(run, metric).kind != ""):
            of.setdefault(text, []).append(metric)
    return [*(f"{text}." for text in undecided(run.record)), *(f"{', '.join(m)}: {text}" for text, m in of.items())]


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


def over_rounds(run: Run, clients: Sequence[int], names: Sequence[str], titles: Mapping[str, str]) -> list[Block]:
    """Of each metric the history of these clients, from where something is known of them.

    Args:
        run: of which.
        clients: their numbers.
        names: what they are called.
        titles: metric to what stands above its history.
    """
    blocks: list[Block] = []
    if run.rounds < 2:
        return blocks
    for metric, title in titles.items():
        history = [[row[client] for client in clients] for row in run.history(metric)]
        known = {r: row for r, row in zip(run.round_numbers, history) if any(value == value for value in row)}
        if known:
            blocks.append(Lines(names, [*known.values()], tuple(known), caption=title))
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
        titles = [run.label(client) for client in range(run.num_clients)]
    values = [run.final(metric, column) for column in columns]
    rows = [[column[client] for column in values] for client in clients]
    return [Heat(names, titles, rows, corner, f"{metric} by {what}: blue is above 0, orange below")]


def algorithm(run: Run) -> str:
    """The algorithm's parts, by their classes."""
    parts = {role: name for role, name in run.record["algorithm"].items() if name != "FullParticipation"}
    first = parts.pop("aggregator")
    return f"{first} with {', '.join(parts.values())}" if parts else first


def subtitle(run: Run, what: str) -> str:
    """The run in a line."""
    return f"{what}, {state_of(run)}, begun {run.record['started'][:10]}"


def state_of(run: Run) -> str:
    """The state of the run: its rounds, and whether it has ended."""
    if run.ended:
        return f"{run.rounds} rounds"
    planned = run.record["rounds"] or -1
    return f"{run.rounds}{f' of {planned}' if planned > 0 else ''} rounds (not ended)"


def guides(run: Run) -> list[Block]:
    """How to read the metrics: what each is, unit, sign, what they need and cost; what several have in common once."""
    of: dict[tuple[str, str], list[str]] = {}
    for metric in run.metrics:
        told = run.about(metric)
        for key in {"what it is": told["about"], **told["guide"]}.items():
            if key[1]:
                of.setdefault(key, []).append(metric)
    heads = list(dict.fromkeys(head for head, _ in of))
    rows = [[head, ", ".join(of[key]), key[1]] for head in heads for key in of if key[0] == head]
    return [Table(["", "metric", ""], rows, texts=True)] if rows else []


def logged(run: Run) -> list[tuple[str, str]]:
    """What the model has logged last, such as its validation accuracy."""
    return [(name, number(NAN if value is None else value)) for name, value in run.record.get("logged", {}).items()]


def share(part: float, whole: float) -> float:
    """NaN of nothing."""
    return part / whole if whole else NAN
