"""The page that one participant may see: what is its own, and of the others nothing but means over all.

What stands on it is chosen, not filtered: names, values, settings and hashes of others are never looked up. A mean is
given only where at least three clients are in it, since of two the other's value would follow; that is no privacy
guarantee, and who needs one publishes no means.
"""

from __future__ import annotations

from flsv.report.blocks import (
    NONE,
    Block,
    Bullets,
    Heat,
    Lines,
    Page,
    Section,
    Table,
    Text,
    deviation,
    mean,
    number,
    percent,
)
from flsv.report.caveats import ONE_RUN, caveats
from flsv.report.figures import algorithm, client_label, guides, logged, or_none, share, state_of, values_of
from flsv.report.for_all import GAIN_HEAD, SETTLED_HEAD, gain_cells, settled_cells
from flsv.report.reading import NAN, Run

#: Clients below which no mean is given.
FEWEST = 3
#: Flagged samples that are listed; the file has all.
LISTED = 50
OTHERS = "mean of all"


def page_for_one(run: Run, client: int) -> Page:
    """What one client contributed, as it may see it."""
    own = client_label(run, client)
    sections = [
        Section("Your part", _part(run, client)),
        Section("What you contributed", _contributions(run, client)),
        *_over_rounds(run, client),
        *_per_class(run, client),
        *_settled(run, client),
        *_gains(run, client),
        *_valuation(run, client),
        *_suspicious(run, client),
        Section("How to read this", _caveats(run)),
        Section("The run", _facts(run, client)),
    ]
    started = str(run.record.get("started", ""))[:10]
    subtitle = ", ".join(filter(None, [algorithm(run), state_of(run), started and f"begun {started}"]))
    return Page(f"Contribution of {own}", subtitle, sections)


def mean_of(values: list[float]) -> float:
    """Over all clients; NaN where it is of too few."""
    return mean(values) if sum(value == value for value in values) >= FEWEST else NAN


def _part(run: Run, client: int) -> list[Block]:
    samples, taken = run.record.get("samples"), run.taken_part()[client]
    rows = [["rounds with your update", f"{taken} of {run.rounds} ({percent(share(taken, run.rounds))})"]]
    if samples:
        rows.append(["your training samples", str(samples[client])])
        if len(samples) >= FEWEST:
            rows.append(["of all training samples", percent(share(samples[client], sum(samples)))])
    counts, classes = run.record.get("class_counts"), run.record.get("classes")
    blocks: list[Block] = [Table(["", ""], rows, texts=True)]
    if client in run.named:
        times, of = run.named[client]
        blocks.append(
            Text(
                f"In {times} of the {of} rounds in which you sent an update it was not finite, or far larger than all "
                "others. Those rounds count nothing for you: what you sent in them was not measured."
            )
        )
    if client in run.held:
        blocks.append(
            Text(
                "Your updates and another participant's were found to be the same but for little. Your payment is held "
                "back, as the other's is, until whoever runs the federation has looked at it."
            )
        )
    if counts and classes and len(classes) > 1:
        held = [(name, count) for name, count in zip(classes, counts[client]) if count]
        blocks += [Text("Your samples by class:"), Table(["class", "samples"], [[n, str(c)] for n, c in held])]
    return blocks


def _contributions(run: Run, client: int) -> list[Block]:
    if not run.metrics:
        return [Text("No contribution was measured: the run had no metric.")]
    rows, blocks = [], []
    for metric in run.metrics:
        values = values_of(run, metric)
        known = [value for value in values.values if value == value]
        shown = [number(mean_of(known)), number(deviation(known)) if len(known) >= FEWEST else NONE]
        rows.append([metric, values.shown([client])[0], *shown, _rank(known, values.values[client])])
        about = str(run.about(metric).get("about", ""))
        interval = f" In brackets: {values.kind}." if values.kind else ""
        if about or interval:
            blocks.append(Text(f"{metric}: {about}{interval}"))
    table = Table(["", "your value", OTHERS, "spread of all", "your place"], rows)
    missing = any(run.final(metric)[client] != run.final(metric)[client] for metric in run.metrics)
    note = (
        [Text("A dash is no value, which is not 0: you were not drawn, or nothing could be measured.")]
        if missing and client not in run.held
        else []
    )
    return [*blocks, table, *note, Text("The spread is the standard deviation over the clients.")]


def _rank(known: list[float], own: float) -> str:
    """Of the own value among all, the highest first."""
    if own != own or len(known) < FEWEST:
        return NONE
    return f"{1 + sum(value > own for value in known)} of {len(known)}"


def _over_rounds(run: Run, client: int) -> list[Section]:
    blocks: list[Block] = []
    for metric in run.metrics if run.rounds > 1 else ():
        history = run.history(metric)
        if any(row[client] == row[client] for row in history):
            table = [[row[client], mean_of(row)] for row in history]
            names = ["you", OTHERS]
            if all(line[1] != line[1] for line in table):
                names, table = names[:1], [line[:1] for line in table]
            blocks += [Text(f"{metric}:"), Lines(names, table)]
    return [Section("Over the rounds", blocks)] if blocks else []


def _per_class(run: Run, client: int) -> list[Section]:
    blocks: list[Block] = []
    for metric in run.metrics:
        columns = run.columns(metric)
        if len(columns) < 2 or not run.columns_are_classes(metric):
            continue  # columns that are no classes may be the other clients
        table = [run.final(metric, column) for column in columns]
        rows = [[column[client] for column in table], [mean_of(column) for column in table]]
        names = ["you", OTHERS]
        if all(value != value for value in rows[1]):
            names, rows = names[:1], rows[:1]
        titles = [run.column_name(metric, column) for column in columns]
        blocks += [Text(f"{metric} by class; blue is above 0, orange below:"), Heat(names, titles, rows, "")]
    return [Section("Class by class", blocks)] if blocks else []


def _settled(run: Run, client: int) -> list[Section]:
    rows = run.settled()
    if not rows or not rows[client]:
        return []
    text = (
        "The same federation was trained again with some of its clients only (flsv settle), and a Shapley value fitted "
        "to what came of it. The interval, 90 %, says what these trainings leave open."
    )
    return [Section("Settled by training again", [Text(text), Table(SETTLED_HEAD[1:], [settled_cells(rows[client])])])]


def _gains(run: Run, client: int) -> list[Section]:
    rows = run.gains()
    if not rows or not rows[client]:
        return []
    where = "the test set" if rows[client].get("tests", "shared") == "shared" else "your own test samples"
    gains = [row["accuracy_received"] - row["accuracy_alone"] if row else NAN for row in rows]
    average = mean_of(gains)
    said = f" The mean gain of all clients is {100 * average:+.1f} points." if average == average else ""
    text = f"Accuracy on {where}: of a model that you train alone for as many rounds, and of what you receive.{said}"
    return [Section("Compared with training alone", [Text(text), Table(GAIN_HEAD, [gain_cells(rows[client])])])]


def _valuation(run: Run, client: int) -> list[Section]:
    """Its own row of the valuation, and the means of what is no count."""
    rows = run.valued()
    if not rows:
        return []
    table = []
    for name, cell in rows[client].items():
        table.append([name.replace("_", " "), number(cell), number(mean_of([row[name] for row in rows]))])
    text = "Your data against the server's validation set, or the clients' barycentre, before training (flsv value):"
    return [Section("Value of your data before training", [Text(text), Table(["", "yours", OTHERS], table)])]


def _suspicious(run: Run, client: int) -> list[Section]:
    flagged = run.flagged().get(client)
    if flagged is None:
        return []
    if not flagged:
        return [Section("Suspicious samples", [Text("None of your samples was flagged.")])]
    head = [name for name in ("index", "label", "score", "why") if name in flagged[0]]
    rows = [[or_none(row.get(name)) for name in head] for row in flagged[:LISTED]]
    text = f"{len(flagged)} of your samples look suspicious. A flag is a reason to look, not a proof."
    more = f" The {LISTED} most suspicious ones:" if len(flagged) > LISTED else ""
    return [Section("Suspicious samples", [Text(text + more), Table(head, rows, texts=True)])]


def _caveats(run: Run) -> list[Block]:
    items = [
        f"{metric}: {text}"
        for metric in run.metrics
        for text in caveats(run.about(metric), values_of(run, metric).kind != "")
    ]
    return [
        *guides(run),
        Bullets([*items, ONE_RUN, "Other participants appear on this page in means over all clients only."]),
    ]


def _facts(run: Run, client: int) -> list[Block]:
    """Classes and versions, no arguments: these may name other clients."""
    rows = [[role.replace("_", " "), name] for role, name in run.record.get("algorithm", {}).items()]
    rows += [["model", str(run.record["module"])]] if "module" in run.record else []
    rows += [[f"metric {name}", str(run.about(name).get("class", NONE))] for name in run.metrics]
    named = [name for name in run.client_names if not name.isdigit()]
    # What a model logs may be called after a client.
    rows += [[f"last {key}", value] for key, value in logged(run) if not any(name in key for name in named)]
    rows += [[f"package {name}", str(version)] for name, version in run.record.get("packages", {}).items()]
    own = run.record.get("hashes", {}).get(str(client))
    rows += [["hash of your samples and labels", own]] if own else []
    return [Table(["", ""], rows, texts=True)] if rows else [Text("The folder does not say.")]
