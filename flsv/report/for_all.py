"""The report for the operator of the federation: all clients by name. The first page tells decision makers in plain
words who contributed how much; the appendix shows the measurements."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup
from pandas import DataFrame

from flsv.report import drawing, facts
from flsv.report.basis import RETRAINED, Basis, basis_shown
from flsv.report.facts import SAY
from flsv.report.first_page import FirstPage
from flsv.report.html import command, section, table
from flsv.report.reading import Run
from flsv.report.shares import Shares
from flsv.results.text import NONE, WORDS, by_value, ends_of, number, numbers, percent, titled
from flsv.scores.class_scores import OWN_SCORES
from flsv.utilities.errors import listed

#: Largest number of clients that are all shown; of more, the ten highest and the ten lowest are shown.
MOST = 30
#: Largest number of classes for which each client's samples are counted.
COUNTED = 20


def page_for_all(run: Run, shares: Shares | None = None) -> tuple[dict[str, Any], DataFrame]:
    """Return the report of all clients: a mapping with its title, subtitle, and the sections of its front and
    appendix; and the table of the numbers on its first page, see :meth:`flsv.report.first_page.FirstPage.frame`."""
    basis = basis_shown(run) if shares is None else shares.basis
    order = ends_of(by_value([0.0] * run.num_clients if basis is None else basis.values), MOST)
    names = [run.label(client) for client in order]
    first = FirstPage(run, basis, shares, order)
    histories = {**{name: name for name in run.metrics}, **WORDS["histories"]}
    appendix = [
        _clients(run, order, names, basis),
        _measured(run),
        _retrained(run, order, basis),
        _metrics(run, order, names, basis),
        facts.over_time(run, order, names, histories),
        facts.classes(run, run.metrics, order, names),
        facts.reading(run, *facts.of_rounds(run.record)),
        _settings(run),
        _replay(run),
    ]
    subtitle = facts.subtitle(run, f"{run.num_clients} partners")
    page = {"title": "Who contributed what", "subtitle": subtitle, "front": first.sections(), "appendix": appendix}
    return page, first.frame()


def _clients(run: Run, order: Sequence[int], names: Sequence[str], basis: Basis | None) -> Markup:
    """Return a section on the clients of ``order``: their samples, the rounds that they took part in, their own models'
    scores and their samples of each class."""
    samples, taken, half = run.record["samples"], run.taken_part(), len(order) // 2
    by = "number" if basis is None else basis.title
    some = SAY["clients_shown"].format(half, half, run.num_clients, by) if len(order) < run.num_clients else None
    shares = [percent(facts.share(samples[client], sum(samples))) for client in order]
    rows = [[name, str(samples[c]), of, f"{taken[c]} of {run.rounds}"] for name, c, of in zip(names, order, shares)]
    tables = [table(["client", "samples", "of all", "rounds"], rows)]
    own = [("last weight", "weight"), *((f"own {titled(name)}", name) for name in OWN_SCORES)]
    scores = {head: numbers([run.final(key)[client] for client in order]) for head, key in own if key in run.measured}
    if scores:
        tables.append(table(["client", *scores], list(zip(names, *scores.values()))))
    if (counted := facts.class_counts(run, 1, COUNTED)) is not None:
        rows = [[name, *map(str, counted[1][client])] for name, client in zip(names, order)]
        tables.append(table(["client", *counted[0]], rows, caption="Training samples of each class"))
    return section("Who took part", some, *tables, _never(run))


def _measured(run: Run) -> Markup:
    """Return a section on what was measured: the algorithm, metrics without values, faulty updates, the last logged
    values, and a table of each metric and the model's performance whose change it distributes among the clients."""
    unmeasured = [name for name in run.record["metrics"] if name not in run.metrics]
    last = ", ".join(f"{name} {value}" for name, value in facts.logged(run))
    lines = {
        "algorithm": facts.algorithm(run),
        "unmeasured": ", ".join(unmeasured),
        "at_fault": run.named,
        "logged_last": last,
    }
    head = ["metric", "distributes the model's", "at the start", "at the end", "sum of the values"]
    rows = [
        [
            metric or NONE,
            titled(game["by"]),
            *(NONE if game[x] is None else number(game[x]) for x in ("start", "end", "sum")),
        ]
        for metric, game in run.record.get("paid_in", {}).items()
    ]
    said = [SAY[name].format(told) for name, told in lines.items() if told or name == "algorithm"]
    return section("What was measured", said, table(head, rows) if rows else None)


def _metrics(run: Run, order: Sequence[int], names: Sequence[str], basis: Basis | None) -> Markup:
    """Return a section with a table of all metrics' values, and a chart of each with the metric's description."""
    if not run.metrics or basis is None:
        return Markup("")
    columns = facts.values_of(run, order)
    without = any(value != value for metric in run.metrics for value in run.final(metric))
    return section(
        "Metric by metric",
        _beside(run, basis),
        table(["partner", *columns], [list(row) for row in zip(names, *columns.values())]),
        *facts.intervals(run, run.metrics),
        SAY["without"] if without else None,
        *(_bars(run, metric, order, names) for metric in run.metrics),
    )


def _beside(run: Run, basis: Basis) -> str | None:
    """Return a sentence that says how the run's metrics relate to ``basis``, the values on page one; None if ``basis``
    is the run's only metric."""
    if basis.key == RETRAINED and run.seeds == 1:
        return SAY["earlier"]
    return SAY["other_metrics"].format(basis.title) if basis.key == RETRAINED or len(run.metrics) > 1 else None


def _bars(run: Run, metric: str, order: Sequence[int], names: Sequence[str]) -> Markup:
    """Return a chart of a metric's values, with the metric's description as its caption."""
    values, *ends = ([of[client] for client in order] for of in (run.final(metric), *run.ends(metric)))
    about = run.about(metric)
    caption = ": ".join(filter(None, (f"{metric} ({run.source})", about["about"])))
    caption += "" if about["to_pay_by"] else f" {SAY['not_to_pay_by']}"
    return drawing.bars(names, values, ends, caption, run.seeds > 1)


def _retrained(run: Run, order: Sequence[int], basis: Basis | None) -> Markup:
    """Return a section on the values by retraining: what was trained, the clients' shares by other scores and without
    each seed, and the values themselves unless they are the ``basis`` of page one. Return "" if there are none."""
    found = run.retrained()
    known = [client for client in order if found and found[client]]
    if not known:
        return Markup("")
    rows, names = [found[client] for client in known], [run.label(client) for client in known]
    parts: list[Markup | Sequence[str]] = [facts.other_shares(names, rows), facts.retrained_caveats(rows)]
    if basis is None or basis.key != RETRAINED:
        cells = [[name, *facts.retrained_cells(row)] for name, row in zip(names, rows)]
        value, low, high = ([row[column] for row in rows] for column in ("value", "low", "high"))
        bars = drawing.bars(names, value, (low, high), of_seeds=len(str(rows[0]["seeds"]).split()) > 1)
        parts = [bars, table(facts.RETRAINED_HEAD, cells), *parts]
    return facts.retrained(run, rows[0], *parts)


def _never(run: Run) -> str | None:
    """Return a sentence that names the clients whose updates were part of no round; None if there are none."""
    never = [run.label(client) for client, count in enumerate(run.taken_part()) if not count] if run.rounds else []
    return SAY["never"].format(listed(never, 20)) if never else None


def _settings(run: Run) -> Markup:
    settings = run.record["settings"] | {f"package {name}": of for name, of in run.record["packages"].items()}
    rows = [[name, str(value)] for name, value in settings.items()]
    return section("Settings", table(["setting", "value"], rows, texts=True))


def _replay(run: Run) -> Markup:
    config = run.folder / "config.yaml"
    rows = []
    for holder, digest in run.record["hashes"].items():
        who = "the server's validation set" if holder == "server" else run.label(int(holder))
        rows.append([f"samples and labels: {who}", digest])
    again = [SAY["command"], command(f"flsv fit --config {shlex.quote(str(config))}")] if config.is_file() else []
    hashes = [SAY["hashes"], table(["of", "hash"], rows, texts=True)] if rows else []
    return section("To repeat the run", *again, *hashes)
