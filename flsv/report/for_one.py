"""The report for one participant: its own values, and nothing that reveals another participant's.

Its content is selected, not filtered: names, values, settings and hashes of other participants are never read, and
``templates/one.html`` gets no run. Numbers computed from all participants (a mean, a share of a sum, the joint model's
performance, the sum of a metric's values) appear only with at least :data:`FEWEST` clients and in a run that has ended,
because the difference between two rounds' means could be the value of a single client; means have two digits. Such a
number reveals the sum of the others' values, so participants who combine their pages learn no single value as long as
two others do not join them. Spreads, ranks, extremes and means per class or round would be further equations, and do
not appear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flsv.report import facts
from flsv.report.basis import RETRAINED, Basis, basis_shown, fitness
from flsv.report.html import render, table
from flsv.report.reading import Run
from flsv.report.shares import Shares
from flsv.results.text import NONE, gain, known_mean, number, numbers, percent
from flsv.utilities.csv_files import NAN

#: With fewer clients, no number computed from all of them is shown.
FEWEST = 5


def page_for_one(run: Run, client: int, shares: Shares | None = None) -> str:
    """Return the report for one client as HTML. ``shares`` adds the client's share of a budget."""
    # Columns that are not classes may be other clients.
    by_class = [metric for metric in run.metrics if run.columns_are_classes(metric)]
    basis = basis_shown(run) if shares is None else shares.basis
    others = [metric for metric in run.metrics if basis is None or metric != basis.key]
    counted = facts.class_counts(run, 2, float("inf"))
    return render(
        "one.html",
        title=f"Contribution of {run.label(client)}",
        subtitle=facts.subtitle(run, facts.algorithm(run)),
        gained=_gained(run, client, basis),
        fitness="" if basis is None else fitness(run, basis),
        share=None if shares is None else _share(client, shares),
        basis=None if basis is None else _own(run, client, basis),
        part=_part(run, client),
        faulty=run.named.get(client),
        copies=[len(group) > 1 for group in run.copies if client in group],
        samples_by_class=table(
            ["class", "samples"], [[name, str(n)] for name, n in zip(counted[0], counted[1][client]) if n]
        )
        if counted
        else None,
        others=_others(run, client, others) if others else None,
        intervals=facts.intervals(run, others),
        others_missing=any(run.final(metric)[client] != run.final(metric)[client] for metric in others),
        over_time=facts.over_time(run, [client], ["you"], dict(zip(run.metrics, run.metrics))),
        classes=facts.classes(run, by_class, [client], ["you"], ""),
        guides=facts.guides(run),
        caveats=facts.caveats_of(run),
        public=run.num_clients >= FEWEST and run.ended,
        ended=run.ended,
        fewest=FEWEST,
        num_clients=run.num_clients,
        facts_of_run=_facts(run, client),
    )


def _public(run: Run, values: Sequence[float]) -> bool:
    """Return whether a number computed from all clients' ``values`` may be shown: the run has ended, enough have
    one."""
    return bool(run.ended) and sum(value == value for value in values) >= FEWEST


def _gained(run: Run, client: int, basis: Basis | None) -> str:
    """Return how much this client's data changed the model's performance; "" if its value does not tell that."""
    if basis is None or not basis.by or not basis.to_pay_by:
        return ""
    if basis.ranks_only or (basis.key != RETRAINED and basis.key not in facts.adding_up(run)):
        return ""
    value = basis.values[client]
    # The whole has two digits, like means.
    whole = math.fsum(x for x in basis.values if x == x) if _public(run, basis.values) else NAN
    return gain(basis.by.partition(" (")[0], value, whole) if value == value else ""


def _part(run: Run, client: int) -> Markup:
    samples, taken = run.record["samples"], run.taken_part()[client]
    rows = [["rounds with your update", f"{taken} of {run.rounds} ({percent(facts.share(taken, run.rounds))})"]]
    rows.append(["your training samples", str(samples[client])])
    if _public(run, samples):
        rows.append(["of all training samples", f"{100 * facts.share(samples[client], sum(samples)):.0f} %"])
    return table(["", ""], rows, texts=True)


def _own(run: Run, client: int, basis: Basis) -> dict[str, Any]:
    """Return the client's value by ``basis`` and the mean over all clients as a table, and facts on them."""
    value, low, high = numbers([basis.values[client], basis.low[client], basis.high[client]])
    cell = value if NONE in (low, high) else f"{value} [{low} to {high}]"
    return {
        "table": table(["", "your value", "mean of all"], [[basis.title, cell, _mean(run, basis.values)]]),
        "title": basis.title,
        "of": basis.of,
        "judged": basis.judged,
        "brackets": basis.brackets,
        "missing": value == NONE,
        "other_trainings": basis.key == RETRAINED and run.seeds == 1,
    }


def _mean(run: Run, values: Sequence[float]) -> str:
    """Return the mean of all clients' ``values`` as a text, or a dash if it may not be shown."""
    # From more digits, or from several pages, others' values could be derived.
    return number(float(f"{known_mean(values):.1e}")) if _public(run, values) else NONE


def _others(run: Run, client: int, metrics: Sequence[str]) -> Markup:
    """Return a table of the client's values by the metrics that the page is not about."""
    shown = facts.values_of(run, [client])
    rows = [
        [
            metric,
            shown[metric][0],
            _mean(run, run.final(metric)),
            "" if run.about(metric)["to_pay_by"] else "Do not base payments on this.",
        ]
        for metric in metrics
    ]
    return table(["", "your value", "mean of all", "payment"], rows)


def _share(client: int, shares: Shares) -> dict[str, Any]:
    """Return the client's share of a budget."""
    value, cells = shares.basis.values[client], shares.cells(client)
    return {
        "title": shares.title,
        "rule": shares.budget.rule,
        "table": table(["", "share", "amount"], [["", *cells]]),
        "above_0": shares.budget.rule == "zero" and value > 0,
        "value": number(value),
        "percent": cells[0].partition(" [")[0],
        "bracketed": "[" in cells[0],
        "missing": client in shares.missing,
    }


def _facts(run: Run, client: int) -> Markup:
    """Return a table of classes and versions, without arguments, since these may name other clients."""
    record = run.record
    rows = [[role.replace("_", " "), name] for role, name in record["algorithm"].items()]
    rows.append(["model", record["module"]])
    rows += [[f"metric {name}", run.about(name)["class"]] for name in run.metrics]
    named = [name for name in run.client_names if not name.isdigit()]
    # Names of values that a model logs may contain a client's name.
    if _public(run, [0.0] * run.num_clients):
        rows += [[f"last {key}", value] for key, value in facts.logged(run) if not any(name in key for name in named)]
    rows += [[f"package {name}", version] for name, version in record["packages"].items()]
    own = record["hashes"].get(str(client))
    rows += [["hash of your samples and labels", own]] if own else []
    return table(["", ""], rows, texts=True)
