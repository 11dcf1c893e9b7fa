"""The report for one participant: its own values, and nothing that reveals another participant's.

Its content is selected, not filtered: names, values, settings and hashes of other participants are never read. Numbers
computed from all participants (a mean, a share of a sum, the joint model's performance, the sum of a game's values)
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

from flsv.report import facts
from flsv.report.facts import SAY
from flsv.report.html import section, table
from flsv.report.reading import Run
from flsv.report.shares import SHARE_HEAD, Shares
from flsv.results.text import NONE, WORDS, gain, known_mean, number, numbers, percent
from flsv.utilities.csv_files import NAN

#: With fewer clients, no number computed from all of them is shown.
FEWEST = 5


def page_for_one(run: Run, client: int, shares: Shares | None = None) -> dict[str, Any]:
    """Return the report for one client as a mapping: its title, subtitle and sections, with its share of a budget if
    given."""
    # Columns that are not classes may be other clients.
    by_class = [metric for metric in run.metrics if run.columns_are_classes(metric)]
    chance = [WORDS["at_chance"].format(by) for by in facts.at_chance(run.record)]
    if run.record.get("not_known"):
        chance.append(SAY["not_known_to_you"])
    front = [
        section("", _gained(run, client)),
        _share(run, client, shares) if shares is not None else "",
        section("What you contributed", *_contributions(run, client, shares is None)),
        _part(run, client),
        facts.over_time(run, [client], ["you"], dict(zip(run.metrics, run.metrics))),
        facts.classes(run, by_class, [client], ["you"], ""),
        _retrained(run, client, shares is None),
        facts.reading(run, *facts.of_rounds(run.record), *chance, *_of_others(run, shares is not None)),
        section("The run", _facts(run, client)),
    ]
    subtitle = facts.subtitle(run, facts.algorithm(run))
    return {"title": f"Contribution of {run.label(client)}", "subtitle": subtitle, "front": front, "appendix": []}


def _public(run: Run, values: Sequence[float]) -> bool:
    """Return whether a number computed from these values of all clients may be shown to one of them."""
    return bool(run.ended) and sum(value == value for value in values) >= FEWEST


def _gained(run: Run, client: int) -> str:
    """Return a sentence on how much the model gained by this client; "" if no values add up to the model's gain."""
    rows, metrics = run.retrained(), [name for name in facts.adding_up(run) if run.about(name)["to_pay_by"]]
    if facts.at_chance(run.record):
        return ""
    if rows:
        values, by = [row.get("value", NAN) for row in rows], next(row["by"] for row in rows if row)
    elif metrics:
        values, by = run.final(metrics[0]), run.record["paid_in"][metrics[0]]["by"]
    else:
        return ""
    value = values[client]
    # The whole has two digits, like means.
    whole = math.fsum(x for x in values if x == x) if _public(run, values) else NAN
    return f"Your data {gain(by.partition(' (')[0], value, whole)}." if value == value else ""


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


def _contributions(run: Run, client: int, shares: bool) -> list[Markup | str]:
    if not run.metrics:
        return [SAY["no_metric"]]
    parts: list[Markup | str] = []
    rows, shown = [], facts.values_and_shares(run, [client])
    for metric in run.metrics:
        values = run.final(metric)
        # Two digits: with more digits, or from several pages, the others' values could be derived.
        of_all = number(float(f"{known_mean(values):.1e}")) if _public(run, values) else NONE
        rows.append([metric, shown[metric][0], of_all])
    parts.append(table(["", "your value", "mean of all"], rows))
    kinds = {metric: kind for metric in run.metrics if (kind := run.kind(metric))}
    parts += [SAY["intervals"].format(metric, kind) for metric, kind in kinds.items()]
    if any(run.final(metric)[client] != run.final(metric)[client] for metric in run.metrics):
        parts.append(SAY["dash"])
    return parts


def _share(run: Run, client: int, shares: Shares) -> Markup:
    """Return a section with the client's share of a budget."""
    basis = shares.basis
    value, low, high = numbers([basis.values[client], basis.low[client], basis.high[client]])
    known = shares.table["share_low"].notna()[client]
    cells = ["", f"{value} [{low} to {high}]" if known else value, *shares.cells(client)]
    return section(
        f"Your share of {shares.title}",
        facts.fitness(run, shares.basis),
        table(["", "your value", *SHARE_HEAD], [cells]),
        SAY["why_share"].format(value, cells[2].partition(" [")[0]) if shares.budget.rule == "zero" else None,
        *facts.budget(shares),
        SAY["no_share_of_yours"] if client in shares.missing else None,
    )


def _retrained(run: Run, client: int, shares: bool) -> Markup:
    rows = run.retrained()
    if not rows or not rows[client]:
        return Markup("")
    # The total that the share is relative to is not shown either.
    shown = slice(None if shares and _public(run, [row.get("value", NAN) for row in rows]) else -1)
    cells = facts.retrained_cells(rows[client])[shown]
    return facts.retrained(run, rows[client], table(facts.RETRAINED_HEAD[1:][shown], [cells]))


def _of_others(run: Run, shares: bool) -> list[str]:
    """Return sentences on which information about other clients the page contains."""
    if run.num_clients >= FEWEST and run.ended:
        return [SAY["means_of_others"], SAY["of_two"]]
    why = SAY["too_few"].format(run.num_clients) if run.ended else SAY["too_early"]
    nothing = SAY["nothing_of_others"].format(FEWEST, why)
    return [f"{nothing} {SAY['but_your_share']}" if shares else nothing, SAY["of_two"]]


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
