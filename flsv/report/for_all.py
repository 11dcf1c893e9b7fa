"""The report for the operator of the federation: all clients by name. The first page tells decision makers in plain
words who contributed how much; the appendix shows the measurements."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flsv.report import drawing, facts
from flsv.report.facts import SAY
from flsv.report.html import command, section, table, warning
from flsv.report.reading import Run
from flsv.report.shares import SHARE_HEAD, Shares
from flsv.results.text import (
    NONE,
    WORDS,
    by_value,
    ends_of,
    joined,
    nearest_first,
    number,
    numbers,
    own_title,
    percent,
    performance,
    ranking,
    titled,
)
from flsv.scores.class_scores import OWN_SCORES
from flsv.utilities.errors import listed

#: Largest number of clients that are all shown; of more, the ten highest and the ten lowest are shown.
MOST = 30
#: Largest number of classes for which each client's samples are counted.
COUNTED = 20
#: Number of the waterfall's steps; of more clients, those with the highest and the lowest values are shown.
MOST_STEPS = 12


def page_for_all(run: Run, shares: Shares | None = None) -> dict[str, Any]:
    """Return the report of all clients as a mapping: its title, subtitle, and the sections of its front and
    appendix."""
    order = ends_of(facts.order_of(run), MOST)
    names = [run.label(client) for client in order]
    partners, state = _partners(run), facts.state_of(run)
    begun = SAY["together"].format(partners, state) if run.num_clients else SAY["nobody"].format(state)
    front = [
        section("", begun, *map(warning, red_lines(run))),
        _shares(run, shares, len(order)) if shares is not None else "",
        _contributions(run, order, names, shares is None),
        section("What the model has learned", *_learned(run)),
        _rests_on(run),
    ]
    histories = {**{name: name for name in run.metrics}, **WORDS["histories"]}
    appendix = [
        _clients(run, order, names),
        _measured(run),
        section("Value by value", *(_bars(run, metric, order, names) for metric in run.metrics)),
        facts.over_time(run, order, names, histories),
        facts.classes(run, run.metrics, order, names),
        _retrained(run, order, shares is None),
        facts.reading(run),
        _settings(run),
        _replay(run),
    ]
    subtitle = facts.subtitle(run, f"{run.num_clients} partners")
    return {"title": "Who contributed what", "subtitle": subtitle, "front": front, "appendix": appendix}


def _partners(run: Run) -> str:
    names = [run.label(client) for client in range(run.num_clients)]
    return joined(names) if 0 < len(names) <= MOST_STEPS else f"{len(names)} partners"


def red_lines(run: Run) -> list[str]:
    """Return the warnings that a reader has to know before using the values."""
    lines = facts.of_rounds(run.record)
    if not run.ended:
        lines.append(WORDS["not_ended"])
    lines += [WORDS["at_chance"].format(_plain(by)) for by in facts.at_chance(run.record)]
    if run.named:
        names = ", ".join(f"{run.label(who)} ({n} of {of} rounds)" for who, (n, of) in run.named.items())
        lines.append(WORDS["at_fault"].format(names))
    for group in run.copies:
        names = ", ".join(run.label(client) for client in group)
        lines.append(WORDS["copying" if len(group) > 1 else "echoing"].format(names))
    return lines


def _shares(run: Run, shares: Shares, shown: int) -> Markup:
    known = [client for client in by_value(shares.basis.values) if client not in shares.missing]
    found = shares.table["found"]
    rows = [
        [run.label(client), *shares.cells(client), *([found[client] or NONE] if found.any() else [])]
        for client in ends_of([*known, *shares.missing], MOST)
    ]
    return section(
        f"Shares of {shares.title}",
        facts.fitness(run, shares.basis),
        table(["partner", *SHARE_HEAD, *(["found"] if found.any() else [])], rows),
        *facts.budget(shares),
        SAY["no_share"].format(run.labels(shares.missing)) if shares.missing else None,
        SAY["held_back"] if found.any() else None,
        SAY["shares_shown"].format(shown, run.num_clients) if shown < run.num_clients else None,
    )


def _contributions(run: Run, order: Sequence[int], names: Sequence[str], shares: bool) -> Markup:
    """Return a section with every metric's values and intervals; with ``shares`` if the page has no other shares."""
    title = "What each contributed"
    if not run.metrics:
        return section(title, SAY["no_metric"])
    columns = facts.values_and_shares(run, order, shares and not run.retrained())
    kinds = {metric: run.kind(metric) for metric in run.metrics}
    by_kind = {kind: ", ".join(m for m in kinds if kinds[m] == kind) for kind in kinds.values() if kind}
    without = sum(all(value != value for value in values) for values in zip(*map(run.final, run.metrics)))
    return section(
        title,
        table(["partner", *columns], [list(row) for row in zip(names, *columns.values())]),
        *_ranking(run),
        *(SAY["intervals"].format(metrics, kind) for kind, metrics in by_kind.items()),
        SAY["without"].format(without) if without else None,
    )


def _ranking(run: Run) -> list[str]:
    """Return sentences that rank the clients by the metric closest to retraining, among those suitable for payment."""
    names = [run.label(client) for client in range(run.num_clients)]
    for metric in nearest_first({m: run.about(m)["class"] for m in run.metrics if run.about(m)["to_pay_by"]})[:1]:
        return ranking(names, (run.final(metric), *run.ends(metric)), metric, run.record)
    return []


def _learned(run: Run) -> list[Markup | str]:
    """Return the change of the model's performance over the run: a waterfall if a metric's values add up to it, else
    text."""
    known = {name: each for name, each in run.record.get("paid_in", {}).items() if each["start"] is not None}
    games = {name: each for name, each in known.items() if name in run.metrics and None not in each.values()}
    for name in facts.adding_up(run)[:1]:
        return [_waterfall(run, name, games[name])]
    if not games:
        ends = [[g["by"], *(performance(g["by"], g[when]) for when in ("start", "end"))] for g in known.values()]
        return [SAY["learned"].format(_plain(by), start, end) for by, start, end in ends]
    name, each = next(iter(games.items()))
    start, end = (performance(each["by"], each[when]) for when in ("start", "end"))
    return [SAY["not_adding_up"].format(name, _plain(each["by"]), start, end)]


def _waterfall(run: Run, name: str, game: Mapping[str, Any]) -> Markup:
    """Return a waterfall with the clients of the highest and lowest values as steps, and all others in one step."""
    values = run.final(name)
    known = [client for client in by_value(values) if values[client] == values[client]]
    order = ends_of(known, MOST_STEPS, MOST_STEPS // 2)
    names, heights = [run.label(client) for client in order], [values[client] for client in order]
    whole = game["end"] - game["start"]
    rest = whole - math.fsum(heights)
    if len(order) < run.num_clients and abs(rest) > facts.TOLERANCE * abs(whole):
        names, heights = [*names, "all others"], [*heights, rest]
    sign = 1.0
    if game["by"] == "negative_loss":
        # A loss is shown as such; clients that raise it come first, or the waterfall could fall below 0 in between.
        sign, names, heights = -1.0, names[::-1], heights[::-1]
    by = _plain(game["by"])
    caption = (
        f"The model's {by}, from {performance(game['by'], game['start'])} when training began to "
        f"{performance(game['by'], game['end'])} at its end, and each partner's part in that "
        f"(by {name}, {run.source}; they add up)"
    )
    heights = [sign * height for height in heights]
    return drawing.steps(names, heights, sign * game["start"], sign * game["end"], caption, by, sign < 0)


def _plain(by: str) -> str:
    return titled(by, "plain")


def _rests_on(run: Run) -> Markup:
    judged, logged = run.record["validation"], run.record.get("logged", {})
    known = {name: value for name in WORDS["logged"] if (value := logged.get(name)) is not None}
    said = ", ".join(WORDS["logged"][name].format(performance(name, value)) for name, value in known.items())
    lines = []
    if judged:
        cases = "cases" if judged["rows"] is None else f"{judged['rows']:,} cases"
        lines.append(SAY["judged"].format(cases, judged["of"]))
    lines += [SAY["logged"].format(said)] if said else []
    seeds = SAY["one_run_only"] if run.seeds == 1 else SAY["mean_of_runs"].format(run.seeds)
    samples = sum(run.record["samples"])
    lines += [*([SAY["cases"].format(samples)] if samples else []), seeds, SAY["appendix"]]
    return section("What this rests on", lines)


def _clients(run: Run, order: Sequence[int], names: Sequence[str]) -> Markup:
    samples, taken, shown = run.record["samples"], run.taken_part(), len(order)
    shares = {client: percent(facts.share(samples[client], sum(samples))) for client in order}
    rows = [[name, str(samples[c]), shares[c], f"{taken[c]} of {run.rounds}"] for c, name in zip(order, names)]
    own = [("last weight", "weight"), *((own_title(name), name) for name in OWN_SCORES)]
    scores = {head: [run.final(key)[client] for client in order] for head, key in own if key in run.measured}
    by = run.metrics[0] if run.metrics else "number"
    counted = facts.class_counts(run, 1, COUNTED)
    counts = []
    if counted is not None:
        cells = [[name, *map(str, counted[1][client])] for client, name in zip(order, names)]
        counts.append(table(["client", *counted[0]], cells, caption="Training samples of each class"))
    some = SAY["clients_shown"].format(shown // 2, shown // 2, run.num_clients, by) if shown < run.num_clients else None
    head = ["client", "samples", "of all", "rounds"]
    models = [table(["client", *scores], [list(row) for row in zip(names, *map(numbers, scores.values()))])]
    return section("Who took part", some, table(head, rows), *models[: len(scores)], *counts, _never(run))


def _measured(run: Run) -> Markup:
    """Return a section on the algorithm, on metrics without values, and on the performances that the metrics divide."""
    unmeasured = [name for name in run.record["metrics"] if name not in run.metrics]
    last = ", ".join(f"{name} {value}" for name, value in facts.logged(run))
    lines = {
        "algorithm": facts.algorithm(run),
        "unmeasured": ", ".join(unmeasured),
        "not_known": run.record.get("not_known"),
        "at_fault": run.named,
        "logged_last": last,
    }
    head = ["metric", "shares out the model's", "at the start", "at the end", "sum of the values"]
    rows = [
        [metric or NONE, game["by"], *(NONE if game[x] is None else number(game[x]) for x in ("start", "end", "sum"))]
        for metric, game in run.record.get("paid_in", {}).items()
    ]
    said = [SAY[name].format(told) for name, told in lines.items() if told or name == "algorithm"]
    return section("What was measured", said, table(head, rows) if rows else None)


def _bars(run: Run, metric: str, order: Sequence[int], names: Sequence[str]) -> Markup:
    """Return a chart of a metric's values, with the metric's description as its caption."""
    values, *ends = ([of[client] for client in order] for of in (run.final(metric), *run.ends(metric)))
    caption = ": ".join(filter(None, (f"{metric} ({run.source})", run.about(metric)["about"])))
    return drawing.bars(names, values, ends, caption, run.seeds > 1)


def _retrained(run: Run, order: Sequence[int], shares: bool) -> Markup:
    found = run.retrained()
    known = [client for client in order if found and found[client]]
    if not known:
        return Markup("")
    rows, names = [found[client] for client in known], [run.label(client) for client in known]
    some = slice(None if shares else -1)
    cells = [[name, *facts.retrained_cells(row)[some]] for name, row in zip(names, rows)]
    value, low, high = ([row[column] for row in rows] for column in ("value", "low", "high"))
    of_seeds = len(str(rows[0]["seeds"]).split()) > 1
    bars = drawing.bars(names, value, (low, high), of_seeds=of_seeds)
    shown = table(facts.RETRAINED_HEAD[some], cells)
    others = facts.other_shares(names, rows)
    return facts.retrained(run, rows[0], bars, shown, others, facts.retrained_caveats(rows))


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
    return section("To replay the run", *again, *hashes)
