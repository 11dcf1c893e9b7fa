"""The report for those who run the federation: all clients by name."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path

from flsv.csv_files import NAN
from flsv.report.blocks import (
    NONE,
    Bars,
    Block,
    Bullets,
    Code,
    Page,
    Section,
    Table,
    Text,
    number,
    percent,
)
from flsv.report.facts import (
    NOT_KNOWN,
    ONE_RUN,
    algorithm,
    by_column,
    caveats_of,
    client_label,
    ends_of,
    guides,
    logged,
    order_of,
    over_rounds,
    retrained_caveats,
    share,
    state_of,
    values_of,
)
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
    appendix = [
        Section("Who took part", _who(run)),
        Section("What was measured", _measured(run)),
        *_bars(run),
        *_over_rounds(run),
        *_per_class(run),
        *_retrained(run),
        *_gains(run),
        Section("Suspicious samples", _suspicious(run)),
        *_valuation(run),
        Section("How to read this", _caveats(run)),
        Section("Settings", _settings(run)),
        Section("To replay the run", _replay(run)),
    ]
    return Page("Who contributed what", subtitle(run), front_page(run, shares), appendix)


def subtitle(run: Run) -> str:
    """The run in a line."""
    started = str(run.record.get("started", ""))[:10]
    return ", ".join(filter(None, [f"{run.num_clients} partners", state_of(run), started and f"begun {started}"]))


def _measured(run: Run) -> list[Block]:
    """What the games share out, and what else is known of the model."""
    items = [f"The algorithm: {algorithm(run)}."]
    rows = [
        [metric or NONE, told["by"], *(NONE if told[x] is None else number(told[x]) for x in ("start", "end", "sum"))]
        for metric, told in run.record.get("paid_in", {}).items()
    ]
    head = ["metric", "shares out the model's", "at the start", "at the end", "sum of the values"]
    without = [name for name in run.record.get("metrics", ()) if name not in run.metrics]
    if without:
        items.append(
            f"Nobody has a value by {', '.join(without)}: its rounds have not come yet (OneRoundShapley plays after as "
            "many as it was told to collect), or it could not be measured."
        )
    if "not_known" in run.record:
        items.append(f"{NOT_KNOWN}: {run.record['not_known']}.")
    if run.named:
        items.append(
            "What was not finite, or far too large, was not measured in the run. Values by retraining are of the data, "
            "whatever was sent in the run."
        )
    if run.record.get("logged"):
        said = ", ".join(f"{name} {value}" for name, value in logged(run))
        items.append(f"The model has logged last: {said}.")
    return [Bullets(items), *([Table(head, rows)] if rows else [])]


def _who(run: Run) -> list[Block]:
    samples, taken = run.record.get("samples"), run.taken_part()
    order = ends_of(order_of(run))
    total = sum(samples) if samples else 0
    head = ["client", *(["samples", "of all"] if samples else []), "rounds", "of all"]
    rows = []
    for client in order:
        row = [client_label(run, client)]
        if samples:
            row += [str(samples[client]), percent(share(samples[client], total))]
        rows.append([*row, str(taken[client]), percent(share(taken[client], run.rounds))])
    blocks: list[Block] = [Table(head, rows)]
    if len(order) < run.num_clients:
        half = len(order) // 2
        by = f"by {run.metrics[0]}" if run.metrics else "by number"
        blocks.insert(
            0,
            Text(f"The first {half} and the last {half} of {run.num_clients} clients, {by}; {CONTRIBUTIONS} has all."),
        )
    counts, classes = run.record.get("class_counts"), run.record.get("classes")
    if counts and classes and len(classes) <= COUNTED:
        rows = [[client_label(run, client), *map(str, counts[client])] for client in order]
        blocks.append(Table(["client", *classes], rows, caption="Training samples of each class"))
    return blocks


def _bars(run: Run) -> list[Section]:
    """What each metric is, and its values as a chart."""
    order = ends_of(order_of(run))
    names = [client_label(run, client) for client in order]
    blocks: list[Block] = []
    for values in (values_of(run, metric) for metric in run.metrics):
        about = str(run.about(values.name).get("about", ""))
        low = None if values.low is None else [values.low[client] for client in order]
        high = None if values.high is None else [values.high[client] for client in order]
        caption = f"{values.name}: {about}" if about else values.name
        blocks.append(Bars(names, [values.values[client] for client in order], low, high, caption))
    return [Section("Value by value", blocks)] if blocks else []


def _over_rounds(run: Run) -> list[Section]:
    if run.rounds < 2:
        return []
    order = ends_of(order_of(run))
    titles = {name: name for name in run.metrics}
    titles |= {
        "weight": "The weight of each client in the aggregate",
        "accuracy": "Accuracy of the clients' own models",
        "balanced_accuracy": "Balanced accuracy of the clients' own models",
        "auroc": "AUROC of the clients' own models",
    }
    blocks = over_rounds(run, order, [client_label(run, client) for client in order], titles)
    return [Section("Over the rounds", blocks)] if blocks else []


def _per_class(run: Run) -> list[Section]:
    order = ends_of(order_of(run))
    names = [client_label(run, client) for client in order]
    blocks = [block for metric in run.metrics for block in by_column(run, metric, order, names)]
    return [Section("Class by class", blocks)] if blocks else []


def _gains(run: Run) -> list[Section]:
    rows = run.gains()
    if not any(rows):
        return [
            Section(
                "Compared with training alone",
                [
                    Text(
                        "It was not measured in this run what the clients would have come to alone. flsv compare does: "
                        "it trains every client by itself, too."
                    )
                ],
            )
        ]
    order = ends_of(order_of(run))
    cells = [gain_cells(rows[client]) for client in order]
    names = [client_label(run, client) for client in order]
    gains = [rows[c]["accuracy_received"] - rows[c]["accuracy_alone"] if rows[c] else NAN for c in order]
    tests = next(row for row in rows if row).get("tests", "shared")
    where = "on the test set" if tests == "shared" else "on each client's own test samples"
    table = Table(["client", *GAIN_HEAD], [[name, *row] for name, row in zip(names, cells)])
    text = f"Accuracy {where}: of a model that the client trains alone for as many rounds, and of what it receives."
    text += BESIDE_GAINS
    return [Section("Compared with training alone", [Text(text), Bars(names, gains), table])]


def _retrained(run: Run) -> list[Section]:
    rows = run.retrained()
    if not any(rows):
        return []
    order = [client for client in ends_of(order_of(run)) if rows[client]]
    names = [client_label(run, client) for client in order]
    values, low, high = ([rows[client][name] for client in order] for name in ("value", "low", "high"))
    cells = [[*retrained_cells(rows[client]), number(rows[client]["kernel_shap"])] for client in order]
    table = Table([*RETRAINED_HEAD, "KernelSHAP"], [[name, *row] for name, row in zip(names, cells)])
    text = RETRAINED.format(rows[order[0]]["by"])
    bars = Bars(names, values, low, high)
    notes = retrained_caveats([rows[client] for client in order], names)
    return [
        Section("Retrained with some clients only", [Text(text), bars, table, *([Bullets(notes)] if notes else [])])
    ]


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
    balanced, area = (
        [row.get(f"{name}_{what}", NAN) for what in ("alone", "received")] for name in ("balanced_accuracy", "auroc")
    )
    return [
        *(percent(alone), percent(received), f"{100 * (received - alone):+.1f} points", percent(trained)),
        *(" to ".join(map(percent, balanced)), " to ".join(map(number, area))),
    ]


def _suspicious(run: Run) -> list[Block]:
    blocks: list[Block] = []
    never = [i for i, count in enumerate(run.taken_part()) if not count]
    found = run.flagged()
    samples = run.record.get("samples")
    if found:
        rows = []
        for client, flagged in sorted(found.items()):
            of = percent(share(len(flagged), samples[client])) if samples else ""
            rows.append([client_label(run, client), str(len(flagged)), *([of] if samples else [])])
        text = "Samples that the clients flag in their own data. Which ones they are is each client's to know: "
        blocks.append(Text(text + "clients/<name>/flagged.csv, and its own page, list them."))
        blocks.append(Table(["client", "flagged", *(["of its samples"] if samples else [])], rows))
    else:
        blocks.append(Text("Samples were not examined in this run. flsv value does, before anything is trained."))
    if never and run.rounds:
        names = ", ".join(client_label(run, client) for client in never[:20]) + (", ..." if len(never) > 20 else "")
        blocks.append(Text(f"Without an update in any round (not drawn, or every update was left out): {names}."))
    return blocks


def _valuation(run: Run) -> list[Section]:
    rows = run.valued()
    if not rows:
        return []
    text = "Distances of the clients' data from the server's validation set, or from their barycentre (flsv value):"
    cells = [[client_label(run, client), *map(number, row.values())] for client, row in enumerate(rows)]
    table = Table(["client", *rows[0]], [cells[client] for client in ends_of(order_of(run))])
    return [Section("Value of the data before training", [Text(text), table])]


def _caveats(run: Run) -> list[Block]:
    return [*guides(run), Bullets([*caveats_of(run), ONE_RUN])]


def _settings(run: Run) -> list[Block]:
    settings = {**run.record.get("settings", {})}
    settings |= {f"package {name}": version for name, version in run.record.get("packages", {}).items()}
    rows = [[name, value if isinstance(value, str) else str(value)] for name, value in settings.items()]
    return [Table(["setting", "value"], rows, texts=True)] if rows else [Text("The folder does not say.")]


def _replay(run: Run) -> list[Block]:
    blocks: list[Block] = []
    config = run.folder / "config.yaml"
    if config.is_file():
        blocks += [
            Text("The command, with the package versions above; on the same machine it gives the same numbers."),
            Code(f"flsv fit --config {shlex.quote(str(config))}"),
        ]
    hashes = [["contributions.csv (SHA-256)", _sha(run.folder / CONTRIBUTIONS)]]
    if config.is_file():
        hashes.append(["config.yaml (SHA-256)", _sha(config)])
    for holder, digest in run.record.get("hashes", {}).items():
        who = "the server's validation set" if holder == "server" else client_label(run, int(holder))
        hashes.append([f"samples and labels: {who}", digest])
    return [
        *blocks,
        Text("Hashes: a second run that has the same ones dealt out the same samples, and measured the same."),
        Table(["of", "hash"], hashes, texts=True),
    ]


def _sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
