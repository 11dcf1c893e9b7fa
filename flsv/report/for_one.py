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

from flsv.csv_files import NAN
from flsv.report import facts
from flsv.report.blocks import NONE, Block, Bullets, Page, Section, Table, Text, number, numbers, percent
from flsv.report.for_all import BESIDE_GAINS, GAIN_HEAD, RETRAINED, RETRAINED_HEAD, gain_cells, retrained_cells
from flsv.report.front import SHARE_HEAD, share_cells
from flsv.report.reading import Run
from flsv.report.shares import Shares, explained

#: Clients below which nothing is told that is worked out from all of them.
FEWEST = 5
#: Flagged samples that are listed; the file has all.
LISTED = 50


def page_for_one(run: Run, client: int, shares: Shares | None = None) -> Page:
    """The report for one client, with its share of a budget where there is one."""
    of_share = "" if shares is None else shares.budget.text(shares.budget.amount)
    # Columns that are no classes may be the other clients.
    by_class = [metric for metric in run.metrics if run.columns_are_classes(metric)]
    sections = [
        Section("Your part", _part(run, client)),
        Section(f"Your share of {of_share}", [] if shares is None else _share(client, shares)),
        Section("What you contributed", _contributions(run, client)),
        Section("Over the rounds", facts.over_rounds(run, [client], ["you"], dict(zip(run.metrics, run.metrics)))),
        Section(
            "Class by class", [x for metric in by_class for x in facts.by_column(run, metric, [client], ["you"], "")]
        ),
        Section("Retrained with some clients only", _retrained(run, client)),
        Section("Compared with training alone", _gains(run, client)),
        Section("Value of your data before training", _valuation(run, client)),
        Section("Suspicious samples", _suspicious(run, client)),
        Section("How to read this", _caveats(run, shares is not None)),
        Section("The run", _facts(run, client)),
    ]
    title = f"Contribution of {run.label(client)}"
    return Page(title, facts.subtitle(run, facts.algorithm(run)), [each for each in sections if each.blocks])


def _told(run: Run, values: Sequence[float]) -> bool:
    """Whether what is worked out from these values of the clients may be shown to one of them."""
    return bool(run.ended) and sum(value == value for value in values) >= FEWEST


def _mean(run: Run, values: Sequence[float]) -> str:
    """Over all clients, in two digits."""
    return number(float(f"{facts.mean(values):.1e}")) if _told(run, values) else NONE


def _part(run: Run, client: int) -> list[Block]:
    samples, taken = run.record["samples"], run.taken_part()[client]
    rows = [["rounds with your update", f"{taken} of {run.rounds} ({percent(facts.share(taken, run.rounds))})"]]
    rows.append(["your training samples", str(samples[client])])
    if _told(run, samples):
        rows.append(["of all training samples", f"{100 * facts.share(samples[client], sum(samples)):.0f} %"])
    counts, classes = run.record["class_counts"], run.record["classes"]
    blocks: list[Block] = [Table(["", ""], rows, texts=True)]
    if client in run.named:
        times, of = run.named[client]
        text = f"In {times} of the {of} rounds in which you sent an update it was not finite, or far larger than all "
        text += "others. Those rounds count nothing for you: what you sent in them was not measured."
        blocks.append(Text(text))
    for group in run.copies:
        if client in group:
            what = "another participant's" if len(group) > 1 else "the model's own last step"
            blocks.append(Text(f"Your updates and {what} were found to be the same but for little."))
    if counts and classes and len(classes) > 1:
        own = [(name, count) for name, count in zip(classes, counts[client]) if count]
        blocks += [Text("Your samples by class:"), Table(["class", "samples"], [[n, str(c)] for n, c in own])]
    return blocks


def _contributions(run: Run, client: int) -> list[Block]:
    if not run.metrics:
        return [Text("No contribution was measured: the run had no metric.")]
    rows, blocks = [], list[Block]()
    for metric in run.metrics:
        values = facts.values_of(run, metric)
        rows.append([metric, values.shown([client])[0], _mean(run, values.values)])
        about = run.about(metric)["about"]
        interval = f" In brackets: {values.kind}." if values.kind else ""
        if about or interval:
            blocks.append(Text(f"{metric}: {about}{interval}"))
    blocks.append(Table(["", "your value", "mean of all"], rows))
    if any(run.final(metric)[client] != run.final(metric)[client] for metric in run.metrics):
        blocks.append(Text("A dash is no value, which is not 0: you were not drawn, or nothing could be measured."))
    return blocks


def _share(client: int, shares: Shares) -> list[Block]:
    """Its part of a budget, and why."""
    value = numbers([shares.basis.values[client], shares.basis.low[client], shares.basis.high[client]])
    known = shares.low[client] == shares.low[client]
    cells = [f"{value[0]} [{value[1]} to {value[2]}]" if known else value[0], *share_cells(shares, client)]
    said = explained(shares)
    if client in shares.missing:
        said.append(Text("You have no value by it, which is not 0, and so no share."))
    return [Table(["", "your value", *SHARE_HEAD], [["", *cells]]), *said]


def _retrained(run: Run, client: int) -> list[Block]:
    rows = run.retrained()
    if not rows or not rows[client]:
        return []
    # Of how many that is the share, is not told either.
    shown = slice(None if _told(run, [row.get("value", NAN) for row in rows]) else -1)
    table = Table(RETRAINED_HEAD[1:][shown], [retrained_cells(rows[client])[shown]])
    return [Text(RETRAINED.format(rows[client]["by"])), table]


def _gains(run: Run, client: int) -> list[Block]:
    rows = run.gains()
    if not rows or not rows[client]:
        return []
    where = "the test set" if rows[client]["tests"] == "shared" else "your own test samples"
    text = f"Accuracy on {where}: of a model that you train alone for as many rounds, and of what you receive."
    return [Text(text + BESIDE_GAINS), Table(GAIN_HEAD, [gain_cells(rows[client])])]


def _valuation(run: Run, client: int) -> list[Block]:
    rows = run.valued()
    if not rows:
        return []
    # From a distance and its share the others' distances follow.
    told = _told(run, [row.get("share", NAN) for row in rows])
    own = [[name.replace("_", " "), number(cell)] for name, cell in rows[client].items() if told or name != "share"]
    text = "Your data against the server's validation set, or the clients' barycentre, before training (flsv value):"
    return [Text(text), Table(["", "yours"], own)]


def _suspicious(run: Run, client: int) -> list[Block]:
    flagged = run.flagged().get(client)
    if flagged is None:
        return []
    if not flagged:
        return [Text("None of your samples was flagged.")]
    head = [name for name in ("index", "label", "score", "why") if name in flagged[0]]
    rows = [[row.get(name) or NONE for name in head] for row in flagged[:LISTED]]
    text = f"{len(flagged)} of your samples look suspicious. A flag is a reason to look, not a proof."
    more = f" The {LISTED} most suspicious ones:" if len(flagged) > LISTED else ""
    return [Text(text + more), Table(head, rows, texts=True)]


def _caveats(run: Run, paid: bool) -> list[Block]:
    items = [*facts.caveats_of(run), *(facts.AT_CHANCE.format(by) for by in facts.at_chance(run.record))]
    items += [f"{facts.NOT_KNOWN}."] if "not_known" in run.record else []
    return [*facts.guides(run), Bullets([*items, facts.ONE_RUN, *_disclosure(run, paid)])]


def _disclosure(run: Run, paid: bool) -> list[str]:
    """What this page tells of the others, for those who are on it and for those who read it."""
    if run.num_clients < FEWEST or not run.ended:
        why = f"the run has {run.num_clients} participants" if run.ended else "the run has not come to its end"
        rule = (
            "This page has nothing of the other participants, nor what is worked out from all (means, shares, what the "
            f"model is worth): that is told of {FEWEST} or more, at the end of a run, and {why}."
            + (" But for your share of the budget, from which the sum of the others' values follows." if paid else "")
        )
    else:
        rule = (
            "Of the other participants this page has nothing but what is worked out from all of them: means, in two "
            "digits, shares, and what the model is worth. The sum of the others' values follows from that; whoever "
            "puts several of these pages together learns what a single other one has only if all but that one join in."
        )
    whole = (
        "Where values are shares of a whole, your own says what the others have together: of two participants, what "
        "the other one has. Pages of several runs in which others take part tell more than the page of one."
    )
    return [rule, whole]


def _facts(run: Run, client: int) -> list[Block]:
    """Classes and versions, no arguments: these may name other clients."""
    record = run.record
    rows = [[role.replace("_", " "), name] for role, name in record["algorithm"].items()]
    rows.append(["model", record["module"]])
    rows += [[f"metric {name}", run.about(name)["class"]] for name in run.metrics]
    named = [name for name in run.client_names if not name.isdigit()]
    # What a model logs may be called after a client.
    if _told(run, [0.0] * run.num_clients):
        rows += [[f"last {key}", value] for key, value in facts.logged(run) if not any(name in key for name in named)]
    rows += [[f"package {name}", version] for name, version in record["packages"].items()]
    own = record["hashes"].get(str(client))
    rows += [["hash of your samples and labels", own]] if own else []
    return [Table(["", ""], rows, texts=True)]
