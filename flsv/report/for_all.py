"""The report for the operator of the federation: all clients by name. The first page tells decision makers in plain
words who contributed how much; the appendix shows the measurements. ``templates/all.html`` has its sentences."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from markupsafe import Markup
from pandas import DataFrame

from flsv.report import drawing, facts
from flsv.report.basis import (
    ALL_TAKE_PART,
    MOSTLY,
    PAYABLE,
    RETRAINED,
    Basis,
    basis_shown,
    fitness,
    small_gain_of,
    verdict,
)
from flsv.report.certainty import misallocated, other_scores, other_seeds
from flsv.report.html import render, table
from flsv.report.reading import Run
from flsv.report.shares import AMOUNTS, Shares
from flsv.results.text import (
    NONE,
    WORDS,
    beside,
    by_value,
    ends_of,
    joined,
    number,
    numbers,
    percent,
    performance,
    ranking,
    shares_in,
    titled,
    with_intervals,
)
from flsv.scores.class_scores import OWN_SCORES
from flsv.utilities.csv_files import NAN
from flsv.utilities.errors import listed

#: Largest number of clients that are all shown; of more, the ten highest and the ten lowest are shown.
MOST = 30
#: Largest number of classes for which each client's samples are counted.
COUNTED = 20
#: Number of the waterfall's steps; of more clients, those with the highest and the lowest values are shown.
MOST_STEPS = 12
#: Letters of a label that fit beside the waterfall.
MOST_LETTERS = 24
#: Verdicts that are set off as warnings if a budget is shared out.
WARNED = ("rounds", "unsuitable", "metric", "one_class")
#: The sampler's name in a record if all clients take part in every round.
EVERYBODY = "FullParticipation()"
#: Columns of the file with the page's numbers.
NUMBERS = ("what", "client", "client_name", "number")


class Notes:
    """The numbers on page one, as they come."""

    def __init__(self, shares: Shares | None) -> None:
        self.shares = shares
        self.numbers: list[tuple[str, int | str, float]] = []

    def note(self, what: str, value: float, client: int | str = "") -> float:
        """Store a number of the page under the name ``what``, and return it."""
        if value == value:
            self.numbers.append((what, client, value))
        return value

    def amount(self, fraction: float, what: str, digits: int = 2) -> str:
        """Format a fraction of a payment with ``digits`` significant digits: as an amount of the budget, or in percent
        if there is no budget."""
        fraction = self.note(what, float(f"{fraction:.{digits}g}"))
        if self.shares is None:
            return f"{100 * fraction:.{digits}g} % of a payment"
        budget = self.shares.budget
        amount = self.note(f"{what}, amount", float(f"{fraction * budget.amount:.{digits}g}"))
        places = 0 if amount >= 10 or amount == int(amount) else budget.decimals
        whole = re.sub(r"\.0+(?!\d)", "", self.shares.title)
        return f"{amount:,.{places}f} of these {whole}"

    def in_trials(self, *fractions: float) -> str:
        """Return a clause that states fractions of a payment as amounts; "" if there is no budget."""
        if self.shares is None:
            return ""
        amounts = [self.amount(fraction, "to others in trials") for fraction in fractions]
        return f", which is {' to '.join([*(each.partition(' ')[0] for each in amounts[:-1]), amounts[-1]])}"


class Shown:
    """The clients on the page, in order: all, or of many the highest and the lowest."""

    def __init__(self, run: Run, basis: Basis | None) -> None:
        self.clients = ends_of(by_value([0.0] * run.num_clients if basis is None else basis.values), MOST)
        self.names = [run.label(client) for client in self.clients]

    def of(self, values: Sequence[Any]) -> list[Any]:
        """Return the values ``[n]`` of the clients that are shown."""
        return [values[client] for client in self.clients]

    def table(self, corner: str, columns: Mapping[str, Sequence[str]]) -> Markup:
        """Return a table with the clients' names below ``corner``, and these columns."""
        return table([corner, *columns], [list(row) for row in zip(self.names, *columns.values())])

    def bars(self, values: Sequence[float], ends: Sequence[Sequence[float]], caption: str, of_seeds: bool) -> Markup:
        """Return a chart of the values ``[n]`` and the ends of their intervals ``[2, n]``."""
        return drawing.bars(self.names, self.of(values), [*map(self.of, ends)], caption, of_seeds)


def page_for_all(run: Run, shares: Shares | None = None) -> tuple[str, DataFrame]:
    """Return the report of all clients as HTML, and a table of the numbers on its first page with the columns
    :data:`NUMBERS`."""
    basis = basis_shown(run) if shares is None else shares.basis
    notes, shown, game = Notes(shares), Shown(run, basis), _game(run, basis)
    labels = [run.label(client) for client in range(run.num_clients)]
    partners = joined(labels) if 0 < run.num_clients <= MOST_STEPS else f"{run.num_clients} partners"
    notes.note("partners", run.num_clients)
    notes.note("rounds", run.rounds)
    notes.note("planned rounds", run.record["rounds"] or NAN)
    html = render(
        "all.html",
        **_of_run(run, notes),
        **_learned(game, notes),
        **({} if basis is None else _of_basis(run, basis, game, shares, notes, shown)),
        **_appendix(run, basis, shown),
        title="Who contributed what",
        subtitle=facts.subtitle(run, f"{run.num_clients} partners"),
        state=facts.state_of(run),
        retrained=basis is not None and basis.key == RETRAINED,
        partners=partners[0].upper() + partners[1:] if run.client_names[:1] == ("0",) else partners,
        run=run,
        basis=basis,
        shares=shares,
        shown=shown,
        facts=facts,
        note=notes.note,
        amount=notes.amount,
        in_trials=notes.in_trials,
    )
    rows = [(what, who, "" if who == "" else run.client_names[int(who)], f"{x:.10g}") for what, who, x in notes.numbers]
    return html, DataFrame(rows, columns=[*NUMBERS])


def _of_run(run: Run, notes: Notes) -> dict[str, Any]:
    """Return what page one says of the run, whatever was measured."""
    for client, (times, of) in run.named.items():
        notes.note("rounds with a faulty update", times, client)
        notes.note("rounds with an update", of, client)
    logged = run.record.get("logged", {})
    known = {name: text for name, text in WORDS["logged"].items() if logged.get(name) is not None}
    return {
        "faulty": [f"{run.label(who)} ({times} of {of} rounds)" for who, (times, of) in run.named.items()],
        "samples": sum(run.record["samples"]),
        "logged": [
            text.format(performance(name, notes.note(f"logged {name}", logged[name]))) for name, text in known.items()
        ],
    }


def _learned(game: Mapping[str, Any] | None, notes: Notes) -> dict[str, Any]:
    """Return the performance whose change the values distribute, at the start and the end of training."""
    if game is None:
        return {"game": None}
    title = titled(game["by"])
    start, end = (performance(game["by"], notes.note(f"{title} at the {x}", game[x])) for x in ("start", "end"))
    return {"game": game, "start": start, "end": end + beside(game)}


def _of_basis(
    run: Run, basis: Basis, game: Mapping[str, Any] | None, shares: Shares | None, notes: Notes, shown: Shown
) -> dict[str, Any]:
    """Return what page one says of the values."""
    if basis.majority >= MOSTLY:
        notes.note("largest class's part of the validation set", basis.majority)
    if basis.seeds > 1:
        notes.note("seeds", basis.seeds)
    why = verdict(run, basis)
    payable = shares is not None or why in PAYABLE
    drawn = run.record["settings"].get("sampler", EVERYBODY) != EVERYBODY and ALL_TAKE_PART not in basis.of
    source = basis.title if basis.key == RETRAINED else f"metric {basis.title}"
    labels, ends = [run.label(client) for client in range(run.num_clients)], (basis.low, basis.high)
    if game is not None and basis.key in facts.adding_up(run):
        picture = {"waterfall": partial(_waterfall, run, basis, game), "bars": ""}
    else:
        bars = shown.bars(basis.values, ends, f"The partners' values: {source}", basis.seeds > 1)
        picture = {"waterfall": None, "bars": bars}
    return picture | {
        "fitness": fitness(run, basis),
        "alarming": shares is not None and why in WARNED,
        "may_pay": why in PAYABLE,
        "payable": payable,
        "spread": other_seeds(run, basis, shares.budget.rule if shares else "zero") if why in PAYABLE else NAN,
        "small_gain": small_gain_of(basis),
        "trials": misallocated(run.num_clients, drawn, basis.seeds),
        "other_scores": other_scores(run, basis) if payable else {},
        "values": _values(basis, shares, payable, notes, shown),
        "source": source,
        "unknown": run.labels([client for client, value in enumerate(basis.values) if value != value]),
        "ranking": ranking(labels, (basis.values, *ends), basis.name),
    }


def _values(basis: Basis, shares: Shares | None, payable: bool, notes: Notes, shown: Shown) -> Markup:
    """Return a table of the clients' values, with shares and amounts if there is a budget, with shares alone if they
    may be paid by."""
    ends = basis.values, basis.low, basis.high
    value, low, high = map(shown.of, ends)
    columns = {"value": with_intervals(value, low, high, between=" to ")}
    for client in shown.clients:
        for what, of in zip(("value", "low", "high"), ends):
            notes.note(what, of[client], client)
    if shares is not None:
        columns["share"], columns["amount"] = map(list, zip(*map(shares.cells, shown.clients)))
        for client in shown.clients:
            for what in AMOUNTS:
                notes.note(what, float(shares.table.loc[client, what]), client)
        if shares.table["finding"].any():
            columns["finding"] = [found or NONE for found in shown.of(shares.table["finding"])]
    elif payable:
        parts = shares_in(basis.values)
        columns["share"] = [percent(notes.note("share", parts[client], client)) for client in shown.clients]
    return shown.table("partner", columns)


def _game(run: Run, basis: Basis | None) -> Mapping[str, Any] | None:
    """Return the entry in ``run.json`` of the performance whose change the values distribute; None if its values at the
    start and end of training are not known."""
    games = run.record.get("paid_in", {})
    of = None if basis is None else games.get(basis.key)
    by = "" if basis is None else basis.by
    found = [of] if of else [game for game in games.values() if game["by"] == by] or list(games.values())
    return next((game for game in found if game and None not in (game["start"], game["end"])), None)


def _waterfall(run: Run, basis: Basis, game: Mapping[str, Any], caption: str) -> Markup:
    """Return a waterfall with the clients of the highest and lowest values as steps, and all others as one step."""
    known = [client for client in by_value(basis.values) if basis.values[client] == basis.values[client]]
    order = ends_of(known, MOST_STEPS, MOST_STEPS // 2)
    names, heights = [run.label(client) for client in order], [basis.values[client] for client in order]
    start, end, less = game["start"], game["end"], facts.direction(run, basis.key) < 0
    if game["by"] == "negative_loss":  # shown as a loss
        start, end, less = -start, -end, True
    whole = start - end if less else end - start
    rest = whole - math.fsum(heights)
    if len(order) < run.num_clients and abs(rest) > facts.TOLERANCE * abs(whole):
        names, heights = [*names, "all others"], [*heights, rest]
    if less:  # clients that raise it come first, or the waterfall could fall below 0 in between
        names, heights = names[::-1], [-height for height in heights[::-1]]
    unit = titled(game["by"], "plain")
    return drawing.steps(names, heights, start, end, caption, unit if len(unit) <= MOST_LETTERS else "", less)


def _appendix(run: Run, basis: Basis | None, shown: Shown) -> dict[str, Any]:
    """Return what the appendix shows."""
    taken, rows = run.taken_part(), run.retrained()
    never = [run.label(client) for client, count in enumerate(taken) if not count]
    known = [client for client in shown.clients if rows and rows[client]]
    titles = {**{name: name for name in run.metrics}, **WORDS["histories"]}
    return _replay(run) | {
        "clients": _clients(run, shown, taken),
        "never": listed(never, 20) if never and run.rounds else "",
        "games": _games(run.record.get("paid_in", {})),
        "retrained_rows": [rows[client] for client in known],
        "retrained_names": [run.label(client) for client in known],
        "some_without": any(value != value for metric in run.metrics for value in run.final(metric)),
        "metric_bars": [] if basis is None else [_metric_bars(run, metric, shown) for metric in run.metrics],
        "over_time": facts.over_time(run, shown.clients, shown.names, titles),
    }


def _replay(run: Run) -> dict[str, Any]:
    """Return the run's settings, its command and hashes, by which it can be repeated."""
    record, config = run.record, run.folder / "config.yaml"
    settings = record["settings"] | {f"package {name}": of for name, of in record["packages"].items()}
    holders = {"server": "the server's validation set"} | {str(i): run.label(i) for i in range(run.num_clients)}
    return {
        "settings": [[name, str(value)] for name, value in settings.items()],
        "hashes": [[f"samples and labels: {holders[who]}", digest] for who, digest in record["hashes"].items()],
        "command": f"flsv fit --config {shlex.quote(str(config))}" if config.is_file() else "",
    }


def _games(games: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return rows on the performances whose changes the metrics distribute."""
    return [
        [metric or NONE, titled(game["by"])]
        + [NONE if game[x] is None else number(game[x]) for x in ("start", "end", "sum")]
        for metric, game in games.items()
    ]


def _clients(run: Run, shown: Shown, taken: Sequence[int]) -> Markup:
    """Return tables of the clients' samples, rounds, scores of their own models, and samples of each class."""
    samples = run.record["samples"]
    columns = {
        "samples": [str(count) for count in shown.of(samples)],
        "of all": [percent(facts.share(count, sum(samples))) for count in shown.of(samples)],
        "rounds": [f"{count} of {run.rounds}" for count in shown.of(taken)],
    }
    own = [("last weight", "weight"), *((f"own {titled(name)}", name) for name in OWN_SCORES)]
    scores = {head: numbers(shown.of(run.final(key))) for head, key in own if key in run.measured}
    found = shown.table("client", columns) + (shown.table("client", scores) if scores else "")
    if (counted := facts.class_counts(run, 1, COUNTED)) is None:
        return found
    rows = [[name, *map(str, counts)] for name, counts in zip(shown.names, shown.of(counted[1]))]
    return found + table(["client", *counted[0]], rows, caption="Training samples of each class")


def _metric_bars(run: Run, metric: str, shown: Shown) -> Markup:
    about = run.about(metric)
    caption = ": ".join(filter(None, (f"{metric} ({run.source})", about["about"])))
    caption += "" if about["to_pay_by"] else " Do not base payments on this."
    return shown.bars(run.final(metric), run.ends(metric), caption, run.seeds > 1)
