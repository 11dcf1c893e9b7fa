"""Facts about a run that appear in the same words on the page for all clients and on the page for one client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from flsv.functional.intervals import BRACKETS
from flsv.report import drawing
from flsv.report.basis import BY_SCORE, MOSTLY, RANKING_ONLY, SHARE_BY, by_partners
from flsv.report.basis import retrained_from as retrained_from
from flsv.report.certainty import moved
from flsv.report.html import heat, table
from flsv.report.reading import Run
from flsv.results.text import NONE, WORDS, number, percent, titled, with_intervals
from flsv.utilities.csv_files import NAN, number_or_nan

#: Largest relative error with which values are said to add up to a difference.
TOLERANCE = 0.01


def share(part: float, whole: float) -> float:
    """Return ``part / whole``; NaN if the whole is 0."""
    return part / whole if whole else NAN


def retrained_caveats(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the caveats on values by retraining; ``rows`` are the rows of ``retrained.csv``."""
    found = [WORDS["ranking_only"]] if rows[0].get("trainings") in RANKING_ONLY else []
    found += [WORDS["judged"]] if by_partners(rows[0]["by"]) else []
    majority = rows[0]["majority"]
    return [*found, WORDS["one_class"].format(percent(majority))] if majority >= MOSTLY else found


def caveats(metric: Mapping[str, Any], errors: bool) -> list[str]:
    """Return the caveats on a metric's values; ``metric`` is its entry in ``run.json``."""
    found = [WORDS["judged"]] if metric.get("judges") == "clients" else []
    found += WORDS["caveats"].get(metric["class"], ())
    return found if errors else [*found, WORDS["no_error"]]


def caveats_of(run: Run) -> list[str]:
    """Return the caveats on a run's values: first those on its metrics, each once, after the metrics' names."""
    of = _grouped((text, metric) for metric in run.metrics for text in caveats(run.about(metric), run.brackets(metric)))
    seeds = WORDS["one_seed"] if run.seeds == 1 else WORDS["some_seeds"].format(run.seeds)
    rounds = [WORDS["of_rounds"].format(run.record["of_rounds"])] if "of_rounds" in run.record else []
    return [*(f"{', '.join(m)}: {text}" for text, m in of.items()), seeds, *rounds]


def _grouped(pairs: Iterable[tuple[Any, str]]) -> dict[Any, list[str]]:
    """Collect pairs ``(thing, name)`` into ``{thing: [names]}``, in the order of the pairs."""
    of: dict[Any, list[str]] = {}
    for thing, name in pairs:
        of.setdefault(thing, []).append(name)
    return of


def values_of(run: Run, clients: Sequence[int]) -> dict[str, list[str]]:
    """Format the values of some clients as ``{metric: cells}``, with intervals if they have any."""
    found = {}
    for metric in run.metrics:
        values, low, high = ([each[client] for client in clients] for each in (run.final(metric), *run.ends(metric)))
        found[metric] = with_intervals(values, low, high)
    return found


def intervals(run: Run, metrics: Iterable[str]) -> list[str]:
    """Return the sentence on intervals if any of the metrics has them."""
    return [BRACKETS] if any(map(run.brackets, metrics)) else []


def adding_up(run: Run) -> list[str]:
    """Return the names of the metrics whose values sum to the change of the model's performance over the run, or to the
    negative of this change."""
    games = run.record.get("paid_in", {})
    return [metric for metric in games if metric in run.metrics and direction(run, metric)]


def direction(run: Run, metric: str) -> int:
    """Return 1 if a metric's values sum to the change of the model's performance over the run, -1 if they sum to minus
    this change (as for a logged loss), and 0 otherwise."""
    game = run.record.get("paid_in", {}).get(metric)
    if game is None or None in (game["start"], game["end"]):
        return 0
    whole, total = game["end"] - game["start"], math.fsum(value for value in run.final(metric) if value == value)
    return next((sign for sign in (1, -1) if whole and abs(sign * total - whole) <= TOLERANCE * abs(whole)), 0)


def over_time(run: Run, clients: Sequence[int], names: Sequence[str], titles: Mapping[str, str]) -> Markup:
    """Return charts of the metrics' values over the rounds, ``titles`` is ``{metric: title}``."""
    charts = []
    for metric, title in titles.items() if run.rounds > 1 else ():
        history = run.history(metric)[list(clients)].dropna(how="all")
        if len(history):
            title = title if run.seeds == 1 else f"{title} ({WORDS['own_rounds']})"
            rounds = [index + 1 for index in history.index]
            charts.append(drawing.lines(names, history.to_numpy(dtype=float), rounds, title))
    return Markup("").join(charts)


def classes(
    run: Run, metrics: Iterable[str], clients: Sequence[int], names: Sequence[str], corner: str = "client"
) -> Markup:
    """Return a heatmap of the last values of some ``clients`` for each metric with several columns."""
    charts = []
    for metric in metrics:
        columns, what = run.columns(metric), "class" if run.columns_are_classes(metric) else "column"
        if len(columns) < 2:
            continue
        titles = [run.column_name(metric, column) for column in columns]
        if columns == [*map(str, range(run.num_clients))] and what == "column":
            titles = [run.label(client) for client in range(run.num_clients)]
        values = np.array([run.final(metric, column) for column in columns]).T[list(clients)]
        caption = f"{metric} by {what}: blue is above 0, orange below"
        charts.append(heat(names, titles, values.tolist(), corner, caption))
    return Markup("").join(charts)


def algorithm(run: Run) -> str:
    """Return the class names of the run's strategies as a text, the aggregator's first; ``FullParticipation`` is left
    out."""
    parts = {role: name for role, name in run.record["algorithm"].items() if name != "FullParticipation"}
    first = parts.pop("aggregator", "")
    return f"{first} with {', '.join(parts.values())}" if parts else first


def subtitle(run: Run, what: str) -> str:
    """Return a subtitle for the page: ``what``, the run's state and its date."""
    return f"{what}, {state_of(run)}, started {run.record['started'][:10]}"


def state_of(run: Run) -> str:
    """Return a text with the number of rounds of the run, and whether it has ended."""
    if run.ended:
        return f"{run.rounds} rounds"
    planned = run.record["rounds"] or -1
    return f"{run.rounds}{f' of {planned}' if planned > 0 else ''} rounds (not ended)"


def guides(run: Run) -> Markup:
    """Return a table on how to read the metrics: what each is, its unit, sign, needs and costs; equal texts appear
    once."""
    of = _grouped(
        (key, metric)
        for metric in run.metrics
        for key in {"what it is": run.about(metric)["about"], **run.about(metric)["guide"]}.items()
        if key[1]
    )
    heads = list(dict.fromkeys(head for head, _ in of))
    rows = [[head, ", ".join(of[key]), key[1]] for head in heads for key in of if key[0] == head]
    return table(["", "metric", ""], rows, texts=True) if rows else Markup("")


def logged(run: Run) -> list[tuple[str, str]]:
    """Return ``(name, formatted value)`` of the values that the model has logged last, such as its validation
    accuracy."""
    return [(name, number(NAN if value is None else value)) for name, value in run.record.get("logged", {}).items()]


def other_shares(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a table of the clients' shares by other scores and without each seed, and what these would move."""
    heads = [name for name in rows[0] if name.startswith(f"{SHARE_BY} ")]
    if not heads:
        return Markup("")
    paid = {head: [number_or_nan(row[head]) for row in rows] for head in heads}
    cells = [
        [name, percent(row["share"]), *map(percent, of)] for name, row, of in zip(names, rows, zip(*paid.values()))
    ]
    shares = [row["share"] for row in rows]
    cells.append(["paid to different partners", NONE, *(percent(moved(shares, paid[head])) for head in heads)])
    titles = (f"by {titled(head.removeprefix(BY_SCORE))}" if head.startswith(BY_SCORE) else head for head in heads)
    return table(["client", "share", *(title.removeprefix(f"{SHARE_BY} ") for title in titles)], cells)


def class_counts(run: Run, least: int, most: float) -> tuple[list[str], list[list[int]]] | None:
    """Return the names of the M classes and each client's samples of them; None unless M is ``least`` to ``most``."""
    counts, names = run.record["class_counts"], run.record["classes"]
    return (names, counts) if counts and names and least <= len(names) <= most else None


def retrained_values(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Markup:
    """Return a chart and a table of values by retraining: the clients' names, and their rows of ``retrained.csv``."""
    value, low, high = ([row[column] for row in rows] for column in ("value", "low", "high"))
    bars = drawing.bars(names, value, (low, high), of_seeds=len(str(rows[0]["seeds"]).split()) > 1)
    ends = [f"{number(a)} to {number(b)}" if a == a else NONE for a, b in zip(low, high)]
    cells = zip(names, map(number, value), ends, (percent(row["share"]) for row in rows))
    return bars + table(["client", "value", "90 % interval", "share"], [list(row) for row in cells])
