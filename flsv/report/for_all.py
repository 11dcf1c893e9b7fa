"""The report for those who run the federation: all clients by name."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping, Sequence

from flsv.csv_files import NAN
from flsv.report import facts
from flsv.report.blocks import NONE, Bars, Block, Bullets, Code, Page, Section, Table, Text, number, percent
from flsv.report.folder import CONTRIBUTIONS
from flsv.report.front import front_page
from flsv.report.reading import Run
from flsv.report.shares import Shares

#: Classes up to which their samples are counted client by client.
COUNTED = 20


def page_for_all(run: Run, shares: Shares | None = None) -> Page:
    """The report of all clients: what each contributed, and in the appendix who took part, what was measured, how, and
    how to repeat the run.

    Args:
        run: of which.
        shares: of a budget, where there is one.
    """
    order = facts.ends_of(facts.order_of(run))
    names = [run.label(client) for client in order]
    per_class = [block for metric in run.metrics for block in facts.by_column(run, metric, order, names)]
    appendix = [
        Section("Who took part", _who(run, order, names)),
        Section("What was measured", _measured(run)),
        Section("Value by value", _bars(run, order, names)),
        Section("Over the rounds", _over_rounds(run, order, names)),
        Section("Class by class", per_class),
        Section("Retrained with some clients only", _retrained(run, order)),
        Section("Compared with training alone", _gains(run, order, names)),
        Section("Suspicious samples", _suspicious(run)),
        Section("Value of the data before training", _valuation(run, order)),
        Section("How to read this", [*facts.guides(run), Bullets([*facts.caveats_of(run), facts.ONE_RUN])]),
        Section("Settings", _settings(run)),
        Section("To replay the run", _replay(run)),
    ]
    subtitle = facts.subtitle(run, f"{run.num_clients} partners")
    return Page("Who contributed what", subtitle, front_page(run, shares), [each for each in appendix if each.blocks])


def _measured(run: Run) -> list[Block]:
    """What the games share out, and what else is known of the model."""
    items = [f"The algorithm: {facts.algorithm(run)}."]
    rows = [
        [metric or NONE, told["by"], *(NONE if told[x] is None else number(told[x]) for x in ("start", "end", "sum"))]
        for metric, told in run.record.get("paid_in", {}).items()
    ]
    head = ["metric", "shares out the model's", "at the start", "at the end", "sum of the values"]
    without = [name for name in run.record["metrics"] if name not in run.metrics]
    if without:
        items.append(
            f"Nobody has a value by {', '.join(without)}: its rounds have not come yet (OneRoundShapley plays after as "
            "many as it was told to collect), or it could not be measured."
        )
    if "not_known" in run.record:
        items.append(f"{facts.NOT_KNOWN}: {run.record['not_known']}.")
    if run.named:
        items.append(
            "What was not finite, or far too large, was not measured in the run. Values by retraining are of the data, "
            "whatever was sent in the run."
        )
    if run.record.get("logged"):
        said = ", ".join(f"{name} {value}" for name, value in facts.logged(run))
        items.append(f"The model has logged last: {said}.")
    return [Bullets(items), *([Table(head, rows)] if rows else [])]


def _who(run: Run, order: Sequence[int], names: Sequence[str]) -> list[Block]:
    samples, taken = run.record["samples"], run.taken_part()
    rows = [
        [
            *(name, str(samples[client]), percent(facts.share(samples[client], sum(samples)))),
            *(str(taken[client]), percent(facts.share(taken[client], run.rounds))),
        ]
        for client, name in zip(order, names)
    ]
    blocks: list[Block] = []
    if len(order) < run.num_clients:
        half = len(order) // 2
        by = f"by {run.metrics[0]}" if run.metrics else "by number"
        text = f"The first {half} and the last {half} of {run.num_clients} clients, {by}; {CONTRIBUTIONS} has all."
        blocks.append(Text(text))
    blocks.append(Table(["client", "samples", "of all", "rounds", "of all"], rows))
    counts, classes = run.record["class_counts"], run.record["classes"]
    if counts and classes and len(classes) <= COUNTED:
        rows = [[name, *map(str, counts[client])] for client, name in zip(order, names)]
        blocks.append(Table(["client", *classes], rows, caption="Training samples of each class"))
    return blocks


def _bars(run: Run, order: Sequence[int], names: Sequence[str]) -> list[Block]:
    """What each metric is, and its values as a chart."""
    blocks: list[Block] = []
    for values in (facts.values_of(run, metric) for metric in run.metrics):
        ends = ([] if end is None else [end[client] for client in order] for end in (values.low, values.high))
        low, high = (end or None for end in ends)
        caption = ": ".join(filter(None, (values.name, run.about(values.name)["about"])))
        blocks.append(Bars(names, [values.values[client] for client in order], low, high, caption))
    return blocks


def _over_rounds(run: Run, order: Sequence[int], names: Sequence[str]) -> list[Block]:
    titles = {name: name for name in run.metrics}
    titles |= {
        "weight": "The weight of each client in the aggregate",
        "accuracy": "Accuracy of the clients' own models",
        "balanced_accuracy": "Balanced accuracy of the clients' own models",
        "auroc": "AUROC of the clients' own models",
    }
    return facts.over_rounds(run, order, names, titles)


def _gains(run: Run, order: Sequence[int], names: Sequence[str]) -> list[Block]:
    rows = run.gains()
    if not any(rows):
        text = "It was not measured in this run what the clients would have come to alone. flsv compare does: "
        return [Text(text + "it trains every client by itself, too.")]
    gains = [rows[c]["accuracy_received"] - rows[c]["accuracy_alone"] if rows[c] else NAN for c in order]
    tests = next(row for row in rows if row)["tests"]
    where = "on the test set" if tests == "shared" else "on each client's own test samples"
    table = Table(["client", *GAIN_HEAD], [[name, *gain_cells(rows[c])] for c, name in zip(order, names)])
    text = f"Accuracy {where}: of a model that the client trains alone for as many rounds, and of what it receives."
    return [Text(text + BESIDE_GAINS), Bars(names, gains), table]


def _retrained(run: Run, order: Sequence[int]) -> list[Block]:
    found = run.retrained()
    known = [client for client in order if found and found[client]]
    if not known:
        return []
    rows, names = [found[client] for client in known], [run.label(client) for client in known]
    values, low, high = ([row[name] for row in rows] for name in ("value", "low", "high"))
    bars = Bars(names, values, low, high)
    cells = [[name, *retrained_cells(row), number(row["kernel_shap"])] for name, row in zip(names, rows)]
    notes = facts.retrained_caveats(rows, names)
    text = Text(RETRAINED.format(rows[0]["by"]))
    return [text, bars, Table([*RETRAINED_HEAD, "KernelSHAP"], cells), *([Bullets(notes)] if notes else [])]


RETRAINED = (
    "The same federation was trained again with some of its clients only (flsv retrain), each model was judged by {} "
    "on the server's validation set, and a Shapley value fitted to what came of it. Intervals, 90 %, say what these "
    "trainings leave open."
)
RETRAINED_HEAD = ("client", "value", "90 % interval", "share")


def retrained_cells(row: Mapping[str, float]) -> list[str]:
    """A client's value, interval and share, in ``RETRAINED_HEAD``'s order."""
    value, low, high = (number(row[name]) for name in ("value", "low", "high"))
    return [value, f"{low} to {high}" if row["low"] == row["low"] else low, percent(row["share"])]


GAIN_HEAD = ("alone", "received", "gain", "trained last", "balanced accuracy", "AUROC")
BESIDE_GAINS = " Balanced accuracy and AUROC are those of the same two models."


def gain_cells(row: Mapping[str, float]) -> list[str]:
    """A client's scores in ``GAIN_HEAD``'s order."""
    if not row:
        return [number(NAN)] * len(GAIN_HEAD)
    alone, received, trained = (row[f"accuracy_{what}"] for what in ("alone", "received", "trained"))
    balanced, area = ([row[f"{n}_{what}"] for what in ("alone", "received")] for n in ("balanced_accuracy", "auroc"))
    return [
        *(percent(alone), percent(received), f"{100 * (received - alone):+.1f} points", percent(trained)),
        *(" to ".join(map(percent, balanced)), " to ".join(map(number, area))),
    ]


def _suspicious(run: Run) -> list[Block]:
    blocks: list[Block] = []
    never = [i for i, count in enumerate(run.taken_part()) if not count]
    found, samples = run.flagged(), run.record["samples"]
    if found:
        rows = [
            [run.label(client), str(len(flagged)), percent(facts.share(len(flagged), samples[client]))]
            for client, flagged in sorted(found.items())
        ]
        text = "Samples that the clients flag in their own data. Which ones they are is each client's to know: "
        blocks.append(Text(text + "clients/<name>/flagged.csv, and its own page, list them."))
        blocks.append(Table(["client", "flagged", "of its samples"], rows))
    else:
        blocks.append(Text("Samples were not examined in this run. flsv value does, before anything is trained."))
    if never and run.rounds:
        names = ", ".join(run.label(client) for client in never[:20]) + (", ..." if len(never) > 20 else "")
        blocks.append(Text(f"Without an update in any round (not drawn, or every update was left out): {names}."))
    return blocks


def _valuation(run: Run, order: Sequence[int]) -> list[Block]:
    rows = run.valued()
    if not rows:
        return []
    text = "Distances of the clients' data from the server's validation set, or from their barycentre (flsv value):"
    cells = [[run.label(client), *map(number, rows[client].values())] for client in order]
    return [Text(text), Table(["client", *rows[0]], cells)]


def _settings(run: Run) -> list[Block]:
    settings = run.record["settings"] | {f"package {name}": of for name, of in run.record["packages"].items()}
    return [Table(["setting", "value"], [[name, str(value)] for name, value in settings.items()], texts=True)]


def _replay(run: Run) -> list[Block]:
    blocks: list[Block] = []
    config = run.folder / "config.yaml"
    files = [run.folder / CONTRIBUTIONS]
    if config.is_file():
        files.append(config)
        text = "The command, with the package versions above; on the same machine it gives the same numbers."
        blocks += [Text(text), Code(f"flsv fit --config {shlex.quote(str(config))}")]
    hashes = [[f"{file.name} (SHA-256)", hashlib.sha256(file.read_bytes()).hexdigest()] for file in files]
    for holder, digest in run.record["hashes"].items():
        who = "the server's validation set" if holder == "server" else run.label(int(holder))
        hashes.append([f"samples and labels: {who}", digest])
    return [
        *blocks,
        Text("Hashes: a second run that has the same ones dealt out the same samples, and measured the same."),
        Table(["of", "hash"], hashes, texts=True),
    ]
