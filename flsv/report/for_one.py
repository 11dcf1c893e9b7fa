"""The report for one participant: its own values, and nothing that reveals another participant's.

Its content is selected, not filtered: names, values, settings and hashes of other participants are never read. Numbers
computed from all participants (a mean, a share of a sum, the joint model's performance, the sum of a metric's values)
appear only with at least :data:`FEWEST` clients and in a run that has ended, because the difference between two rounds'
means could be the value of a single client; means have two digits. Such a number reveals the sum of the others' values,
so participants who combine their pages learn no single value as long as two others do not join them. Spreads, ranks,
extremes and means per class or round would be further equations, and do not appear.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from flsv.functional.shapley.one_seed import BRACKETS
from flsv.report import facts
from flsv.report.basis import RETRAINED, Basis, basis_shown
from flsv.report.facts import SAY
from flsv.report.front import fitness
from flsv.report.html import section, table, warning
from flsv.report.reading import Run
from flsv.report.shares import Shares
from flsv.results.text import NONE, WORDS, gain, known_mean, number, numbers, percent
from flsv.utilities.csv_files import NAN

#: With fewer clients, no number computed from all of them is shown.
FEWEST = 5


def page_for_one(run: Run, client: int, shares: Shares | None = None) -> dict[str, Any]:
    """Return the report for one client as a mapping: its title, subtitle, and the sections of its front and appendix.
    ``shares`` adds the client's share of a budget."""
    # Columns that are not classes may be other clients.
    by_class = [metric for metric in run.metrics if run.columns_are_classes(metric)]
    basis = basis_shown(run) if shares is None else shares.basis
    front = [
        section("", _gained(run, client, basis)),
        _share(run, client, shares) if shares is not None else "",
        section("What you contributed", *_contributions(run, client, basis, shares)),
        _part(run, client),
    ]
    appendix = [
        _others(run, client, basis),
        facts.over_time(run, [client], ["you"], dict(zip(run.metrics, run.metrics))),
        facts.classes(run, by_class, [client], ["you"], ""),
        facts.reading(run, *facts.of_rounds(run.record), *_of_others(run, shares is not None)),
        section("The run", _facts(run, client)),
    ]
    subtitle = facts.subtitle(run, facts.algorithm(run))
    return {"title": f"Contribution of {run.label(client)}", "subtitle": subtitle, "front": front, "appendix": appendix}


def _public(run: Run, values: Sequence[float]) -> bool:
    """Return whether a client's page may show a number, such as a mean, computed from all clients' ``values``: the run
    has ended, and at least :data:`FEWEST` clients have a value."""
    return bool(run.ended) and sum(value == value for value in values) >= FEWEST


def _gained(run: Run, client: int, basis: Basis | None) -> str:
    """Return a sentence on how much this client's data changed the model's performance. Return "" if the client has no
    value, or if the values by ``basis`` only rank the clients, do not sum to the change of a performance, or are
    unsuitable for payment."""
    if basis is None or not basis.by or not basis.to_pay_by:
        return ""
    if basis.ranks_only or (basis.key != RETRAINED and basis.key not in facts.adding_up(run)):
        return ""
    value = basis.values[client]
    # The whole has two digits, like means.
    whole = math.fsum(x for x in basis.values if x == x) if _public(run, basis.values) else NAN
    return f"Your data {gain(basis.by.partition(' (')[0], value, whole)}." if value == value else ""


def _part(run: Run, client: int) -> Markup:
    samples, taken = run.record["samples"], run.taken_part()[client]
    rows = [["rounds with your update", f"{taken} of {run.rounds} ({percent(facts.share(taken, run.rounds))})"]]
    rows.append(["your training samples", str(samples[client])])
    if _public(run, samples):
        rows.append(["of all training samples", f"{100 * facts.share(samples[client], sum(samples)):.0f} %"])
    parts: list[Markup | str] = [table(["", ""], rows, texts=True)]
    if client in run.named:
        parts.append(SAY["your_fault"].format(*run.named[client]))
    for group in run.copies:
        if client in group:
            others = "another participant's" if len(group) > 1 else "the model's own last step"
            parts.append(SAY["your_copies"].format(others))
    counted = facts.class_counts(run, 2, float("inf"))
    if counted is not None:
        counts = [[name, str(n)] for name, n in zip(counted[0], counted[1][client]) if n]
        parts += ["Your samples by class:", table(["class", "samples"], counts)]
    return section("Your part", *parts)


def _contributions(run: Run, client: int, basis: Basis | None, shares: Shares | None) -> list[Markup | str]:
    """Return the parts of a section on the client's value by ``basis``: a table with the value and the mean over all
    clients, and sentences on how to use them."""
    if basis is None:
        return [WORDS["no_metric"]]
    value, low, high = numbers([basis.values[client], basis.low[client], basis.high[client]])
    cell = value if NONE in (low, high) else f"{value} [{low} to {high}]"
    parts: list[Markup | str] = [
        table(["", "your value", "mean of all"], [[basis.title, cell, _mean(run, basis.values)]]),
    ]
    if shares is None:
        parts.insert(0, fitness(run, basis))
    else:
        parts.append(SAY["budget"].format(basis.title, basis.of))
    return [*parts, *([BRACKETS] if basis.brackets else []), *([SAY["dash"]] if value == NONE else [])]


def _mean(run: Run, values: Sequence[float]) -> str:
    """Return the mean of all clients' ``values`` as a text, or a dash if it may not be shown. It has two digits,
    because others' values could be derived from more digits, or from several pages."""
    return number(float(f"{known_mean(values):.1e}")) if _public(run, values) else NONE


def _others(run: Run, client: int, basis: Basis | None) -> Markup:
    """Return a section with the client's values by the metrics that the page is not about."""
    others = [metric for metric in run.metrics if basis is None or metric != basis.key]
    shown = facts.values_of(run, [client])
    rows = []
    for metric in others:
        advice = "" if run.about(metric)["to_pay_by"] else SAY["not_to_pay_by"]
        rows.append([metric, shown[metric][0], _mean(run, run.final(metric)), advice])
    unknown = any(run.final(metric)[client] != run.final(metric)[client] for metric in others)
    return section(
        "Other measurements",
        SAY["earlier"] if basis is not None and basis.key == RETRAINED and run.seeds == 1 and rows else None,
        table(["", "your value", "mean of all", "payment"], rows) if rows else None,
        *facts.intervals(run, others),
        SAY["dash"] if unknown else None,
    )


def _share(run: Run, client: int, shares: Shares) -> Markup:
    """Return a section with the client's share of a budget."""
    basis, missing = shares.basis, client in shares.missing
    value = number(basis.values[client])
    cells = shares.cells(client)
    return section(
        f"Your share of {shares.title}",
        fitness(run, basis),
        warning(WORDS["judged"]) if basis.judged else None,
        table(["", "share", "amount"], [["", *cells]]),
        SAY["why_share"].format(value, cells[0].partition(" [")[0])
        if shares.budget.rule == "zero" and basis.values[client] > 0
        else None,
        SAY["bracket_shares"] if "[" in cells[0] else None,
        WORDS["rules"][shares.budget.rule],
        SAY["no_share_of_yours"] if missing else None,
    )


def _of_others(run: Run, shares: bool) -> list[str]:
    """Return sentences that tell the client what its page reveals of other clients, or why it reveals nothing."""
    if run.num_clients >= FEWEST and run.ended:
        return [SAY["means_of_others"], SAY["of_two"]]
    why = SAY["too_few"].format(run.num_clients) if run.ended else SAY["too_early"]
    nothing = SAY["nothing_of_others"].format(FEWEST, why)
    return [f"{nothing} {SAY['but_your_share']}" if shares else nothing, SAY["of_two"]]


def _facts(run: Run, client: int) -> Markup:
    """Return a table of the classes of strategies, model and metrics, and of versions. Arguments are left out, since
    they may name other clients."""
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
