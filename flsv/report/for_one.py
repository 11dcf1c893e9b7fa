"""The report for one participant: its own values, and nothing that reveals another one's.

What stands on it is chosen, not filtered: names, values, settings and hashes of others are never looked up. What is
worked out from all together (a mean, a share of a sum, what the model of all is worth, to which values of a game sum)
is on it from :data:`FEWEST` clients on, means in two digits, once, and of a run that has ended: of two means of one run
the difference may be of one client. From such a number the sum of the others' values follows, so that any participants
who put their pages together learn of no single other one as long as two others do not. Spreads, ranks, extremes and
means per class or round would be further equations, and are not on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flsv.csv_files import NAN
from flsv.report import facts
from flsv.report.html import table
from flsv.report.reading import Run
from flsv.report.shares import SHARE_HEAD, Shares
from flsv.report.text import NONE, WORDS, number, numbers, percent

#: Clients below which nothing is told that is worked out from all of them.
FEWEST = 5
#: Flagged samples that are listed; the file has all.
LISTED = 50


def facts_for_one(run: Run, client: int, shares: Shares | None = None) -> dict[str, Any]:
    """What the report for one client holds, with its share of a budget where there is one."""
    # Columns that are no classes may be the other clients.
    by_class = [metric for metric in run.metrics if run.columns_are_classes(metric)]
    chance = [WORDS["at_chance"].format(by) for by in facts.at_chance(run.record)]
    return {
        "title": f"Contribution of {run.label(client)}",
        "subtitle": facts.subtitle(run, facts.algorithm(run)),
        "run": run,
        "fewest": FEWEST,
        "part": _part(run, client),
        "fault": run.named.get(client),
        "copied": [len(group) > 1 for group in run.copies if client in group],
        "class_counts": _class_counts(run, client),
        "shares": shares,
        "share_table": None if shares is None else _share(client, shares),
        "no_share": shares is not None and client in shares.missing,
        "abouts": _abouts(run),
        "contributions": _contributions(run, client) if run.metrics else None,
        "dashes": any(run.final(metric)[client] != run.final(metric)[client] for metric in run.metrics),
        "histories": facts.over_rounds(run, [client], ["you"], dict(zip(run.metrics, run.metrics))),
        "by_class": [x for metric in by_class for x in facts.by_column(run, metric, [client], ["you"], "")],
        "retrained": _retrained(run, client),
        "gains": _gains(run, client),
        "valued": _valued(run, client),
        "flagged": _flagged(run, client),
        "guides": facts.guides(run),
        "caveats": [*facts.caveats_of(run), *chance],
        "facts": _facts(run, client),
    }


def _public(run: Run, values: Sequence[float]) -> bool:
    """Whether what is worked out from these values of the clients may be shown to one of them."""
    return bool(run.ended) and sum(value == value for value in values) >= FEWEST


def _part(run: Run, client: int) -> Markup:
    samples, taken = run.record["samples"], run.taken_part()[client]
    rows = [["rounds with your update", f"{taken} of {run.rounds} ({percent(facts.share(taken, run.rounds))})"]]
    rows.append(["your training samples", str(samples[client])])
    if _public(run, samples):
        rows.append(["of all training samples", f"{100 * facts.share(samples[client], sum(samples)):.0f} %"])
    return table(["", ""], rows, texts=True)


def _class_counts(run: Run, client: int) -> Markup | None:
    counts, classes = run.record["class_counts"], run.record["classes"]
    if not counts or not classes or len(classes) < 2:
        return None
    return table(["class", "samples"], [[name, str(n)] for name, n in zip(classes, counts[client]) if n])


def _abouts(run: Run) -> list[tuple[str, str, str]]:
    """Of each metric what it is, and what its intervals are."""
    known = ((metric, run.about(metric)["about"], run.kind(metric)) for metric in run.metrics)
    return [each for each in known if any(each[1:])]


def _contributions(run: Run, client: int) -> Markup:
    rows = []
    for metric in run.metrics:
        values = run.final(metric)
        # Over all clients, in two digits.
        mean = number(float(f"{facts.mean(values):.1e}")) if _public(run, values) else NONE
        rows.append([metric, facts.shown(run, metric, [client])[0], mean])
    return table(["", "your value", "mean of all"], rows)


def _share(client: int, shares: Shares) -> Markup:
    """Its part of a budget."""
    basis = shares.basis
    value, low, high = numbers([basis.values[client], basis.low[client], basis.high[client]])
    known = shares.low[client] == shares.low[client]
    return table(
        ["", "your value", *SHARE_HEAD], [["", f"{value} [{low} to {high}]" if known else value, *shares.cells(client)]]
    )


def _retrained(run: Run, client: int) -> dict[str, Any] | None:
    rows = run.retrained()
    if not rows or not rows[client]:
        return None
    # Of how many that is the share, is not told either.
    shown = slice(None if _public(run, [row.get("value", NAN) for row in rows]) else -1)
    cells = facts.retrained_cells(rows[client])[shown]
    return {"by": rows[client]["by"], "table": table(facts.RETRAINED_HEAD[1:][shown], [cells])}


def _gains(run: Run, client: int) -> dict[str, Any] | None:
    rows = run.gains()
    if not rows or not rows[client]:
        return None
    return {
        "shared": rows[client]["tests"] == "shared",
        "table": table(facts.GAIN_HEAD, [facts.gain_cells(rows[client])]),
    }


def _valued(run: Run, client: int) -> Markup | None:
    rows = run.valued()
    if not rows:
        return None
    # From a distance and its share the others' distances follow.
    public = _public(run, [row.get("share", NAN) for row in rows])
    shown = {name: cell for name, cell in rows[client].items() if public or name != "share"}
    return table(["", "yours"], [[name.replace("_", " "), number(cell)] for name, cell in shown.items()])


def _flagged(run: Run, client: int) -> dict[str, Any] | None:
    flagged = run.flagged().get(client)
    if flagged is None:
        return None
    head = [name for name in ("index", "label", "score", "why") if flagged and name in flagged[0]]
    rows = [[row.get(name) or NONE for name in head] for row in flagged[:LISTED]]
    return {"count": len(flagged), "listed": LISTED, "table": table(head, rows, texts=True) if flagged else ""}


def _facts(run: Run, client: int) -> Markup:
    """Classes and versions, no arguments: these may name other clients."""
    record = run.record
    rows = [[role.replace("_", " "), name] for role, name in record["algorithm"].items()]
    rows.append(["model", record["module"]])
    rows += [[f"metric {name}", run.about(name)["class"]] for name in run.metrics]
    named = [name for name in run.client_names if not name.isdigit()]
    # What a model logs may be called after a client.
    if _public(run, [0.0] * run.num_clients):
        rows += [[f"last {key}", value] for key, value in facts.logged(run) if not any(name in key for name in named)]
    rows += [[f"package {name}", version] for name, version in record["packages"].items()]
    own = record["hashes"].get(str(client))
    rows += [["hash of your samples and labels", own]] if own else []
    return table(["", ""], rows, texts=True)
