"""The report for those who run the federation: all clients by name. Page one says who contributed what, for those who
decide, in no words of those who measure; the appendix has what that rests on."""

from __future__ import annotations

import hashlib
import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from flsv.csv_files import NAN
from flsv.models.imbalance import OWN_SCORES
from flsv.report import drawing, facts
from flsv.report.folder import CONTRIBUTIONS
from flsv.report.html import table
from flsv.report.measured import own_title
from flsv.report.reading import Run
from flsv.report.shares import SHARE_HEAD, Shares
from flsv.report.text import NONE, WORDS, by_value, ends_of, joined, number, numbers, percent

#: Clients that are shown; of more the highest and the lowest ten.
MOST = 30
#: Classes up to which their samples are counted client by client.
COUNTED = 20
#: Of the waterfall, besides the clients at both ends when there are more.
MOST_STEPS = 12
#: By how much of the difference the values may miss it, to add up to it.
TOLERANCE = 0.01


def facts_for_all(run: Run, shares: Shares | None = None) -> dict[str, Any]:
    """What the report of all clients holds.

    Args:
        run: of which.
        shares: of a budget, where there is one.
    """
    order = ends_of(facts.order_of(run), MOST)
    names = [run.label(client) for client in order]
    config = run.folder / "config.yaml"
    never = [run.label(client) for client, count in enumerate(run.taken_part()) if not count] if run.rounds else []
    return {
        "title": "Who contributed what",
        "subtitle": facts.subtitle(run, f"{run.num_clients} partners"),
        "run": run,
        "state": facts.state_of(run),
        "partners": _partners(run),
        "red_lines": red_lines(run),
        "shares": shares,
        "share_table": None if shares is None else _shares(run, shares),
        "shown": len(order),
        "contributions": _contributions(run, order, names) if run.metrics else None,
        "intervals": _intervals(run),
        "without": sum(all(value != value for value in values) for values in zip(*map(run.final, run.metrics))),
        "learned": _learned(run),
        "logged": _logged(run),
        "clients": _clients(run, order, names),
        "class_counts": _class_counts(run, order, names),
        "algorithm": facts.algorithm(run),
        "unmeasured": [name for name in run.record["metrics"] if name not in run.metrics],
        "last_logged": ", ".join(f"{name} {value}" for name, value in facts.logged(run)),
        "games": _games(run),
        "bars": [_bars(run, metric, order, names) for metric in run.metrics],
        "histories": facts.over_rounds(
            run, order, names, {**{name: name for name in run.metrics}, **WORDS["histories"]}
        ),
        "by_class": [chart for metric in run.metrics for chart in facts.by_column(run, metric, order, names)],
        "retrained": _retrained(run, order),
        "gains": _gains(run, order, names),
        "flagged": _flagged(run),
        "never": ", ".join(never[:20]) + (", ..." if len(never) > 20 else ""),
        "valued": _valued(run, order, names),
        "guides": facts.guides(run),
        "caveats": facts.caveats_of(run),
        "settings": _settings(run),
        "command": f"flsv fit --config {shlex.quote(str(config))}" if config.is_file() else "",
        "hashes": _hashes(run),
    }


def _partners(run: Run) -> str:
    names = [run.label(client) for client in range(run.num_clients)]
    return joined(names) if 0 < len(names) <= MOST_STEPS else f"{len(names)} partners"


def red_lines(run: Run) -> list[str]:
    """What has to be known before anything is made of the values."""
    lines = []
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


def _shares(run: Run, shares: Shares) -> Markup:
    known = [client for client in by_value(shares.basis.values) if client not in shares.missing]
    found = any(shares.found)
    rows = [
        [run.label(client), *shares.cells(client), *([shares.found[client] or NONE] if found else [])]
        for client in ends_of([*known, *shares.missing], MOST)
    ]
    return table(["partner", *SHARE_HEAD, *(["found"] if found else [])], rows)


def _contributions(run: Run, order: Sequence[int], names: Sequence[str]) -> Markup:
    """Every metric's values with their intervals, the last weights, and the scores of the clients' own models."""
    columns = {metric: facts.shown(run, metric, order) for metric in run.metrics}
    for title, key in (("last weight", "weight"), *((own_title(name), name) for name in OWN_SCORES)):
        if key in run.measured:
            final = run.final(key)
            columns[title] = numbers([final[client] for client in order])
    return table(["partner", *columns], [list(row) for row in zip(names, *columns.values())])


def _intervals(run: Run) -> dict[str, str]:
    """What the intervals are, and of which metrics."""
    kinds = {metric: run.kind(metric) for metric in run.metrics}
    return {kind: ", ".join(m for m in kinds if kinds[m] == kind) for kind in dict.fromkeys(kinds.values()) if kind}


def _learned(run: Run) -> list[Markup]:
    """From the model's performance at the start to that at the end, by the first metric whose values add up to it."""
    known = {name: each for name, each in run.record.get("paid_in", {}).items() if each["start"] is not None}
    games = {name: each for name, each in known.items() if name in run.metrics and None not in each.values()}
    for name, each in games.items():
        whole = each["end"] - each["start"]
        values = [value for value in run.final(name) if value == value]
        if whole and abs(math.fsum(values) - whole) <= TOLERANCE * abs(whole):
            return [_waterfall(run, name, each)]
    text = Markup("<p>The model's {}: {} when training began, {} at its end.</p>\n")
    if not games:
        performances = (each["by"] for each in known.values())
        ends = [(_shown(each["by"], each["start"]), _shown(each["by"], each["end"])) for each in known.values()]
        return [text.format(_plain(by), *each) for by, each in zip(performances, ends)]
    name, each = next(iter(games.items()))
    start, end = (_shown(each["by"], each[when]) for when in ("start", "end"))
    caption = (
        f"The values of {name}. They do not add up to the difference of the model's {_plain(each['by'])} between start "
        f"and end ({start} and {end})"
    )
    values, order = run.final(name), ends_of(_known(run, name), MOST)
    return [
        drawing.bars([run.label(client) for client in order], [values[client] for client in order], caption=caption)
    ]


def _waterfall(run: Run, name: str, game: Mapping[str, Any]) -> Markup:
    """Of many clients those at both ends, and the others in one step."""
    values, order = run.final(name), ends_of(_known(run, name), MOST_STEPS, MOST_STEPS // 2)
    names, heights = [run.label(client) for client in order], [values[client] for client in order]
    whole = game["end"] - game["start"]
    rest = whole - math.fsum(heights)
    if len(order) < run.num_clients and abs(rest) > TOLERANCE * abs(whole):
        names, heights = [*names, "all others"], [*heights, rest]
    sign = 1.0
    if game["by"] == "negative_loss":
        # Errors are shown as such, and who adds to it comes first, or it would seem to fall below 0 on its way.
        sign, names, heights = -1.0, names[::-1], heights[::-1]
    by = _plain(game["by"])
    caption = (
        f"The model's {by}, from {_shown(game['by'], game['start'])} when training began to "
        f"{_shown(game['by'], game['end'])} at its end, and each partner's part in that (by {name}; they add up)"
    )
    heights = [sign * height for height in heights]
    return drawing.steps(names, heights, sign * game["start"], sign * game["end"], caption, by, sign < 0)


def _known(run: Run, metric: str) -> list[int]:
    """Clients with a value, the highest first."""
    values = run.final(metric)
    return [client for client in by_value(values) if values[client] == values[client]]


def _plain(by: str) -> str:
    return WORDS["plain"].get(by, by)


def _shown(by: str, value: float) -> str:
    return percent(value) if by.endswith("accuracy") else number(abs(value) if by == "negative_loss" else value)


def _logged(run: Run) -> str:
    """What the module says of the validation set at the end."""
    values = {name: value for name in WORDS["logged"] if (value := run.record.get("logged", {}).get(name)) is not None}
    shown = {name: percent(value) if "accuracy" in name else number(value) for name, value in values.items()}
    return ", ".join(WORDS["logged"][name].format(value) for name, value in shown.items())


def _clients(run: Run, order: Sequence[int], names: Sequence[str]) -> Markup:
    samples, taken = run.record["samples"], run.taken_part()
    shares = {client: percent(facts.share(samples[client], sum(samples))) for client in order}
    parts = {client: percent(facts.share(taken[client], run.rounds)) for client in order}
    rows = [[name, str(samples[c]), shares[c], str(taken[c]), parts[c]] for c, name in zip(order, names)]
    return table(["client", "samples", "of all", "rounds", "of all"], rows)


def _class_counts(run: Run, order: Sequence[int], names: Sequence[str]) -> Markup | None:
    counts, classes = run.record["class_counts"], run.record["classes"]
    if not counts or not classes or len(classes) > COUNTED:
        return None
    rows = [[name, *map(str, counts[client])] for client, name in zip(order, names)]
    return table(["client", *classes], rows, caption="Training samples of each class")


def _games(run: Run) -> Markup | None:
    head = ["metric", "shares out the model's", "at the start", "at the end", "sum of the values"]
    rows = [
        [metric or NONE, game["by"], *(NONE if game[x] is None else number(game[x]) for x in ("start", "end", "sum"))]
        for metric, game in run.record.get("paid_in", {}).items()
    ]
    return table(head, rows) if rows else None


def _bars(run: Run, metric: str, order: Sequence[int], names: Sequence[str]) -> Markup:
    """What a metric is, and its values as a chart."""
    values, known = run.final(metric), run.ends(metric)
    ends = None if known is None else [[end[client] for client in order] for end in known]
    caption = ": ".join(filter(None, (metric, run.about(metric)["about"])))
    return drawing.bars(names, [values[client] for client in order], ends, caption)


def _retrained(run: Run, order: Sequence[int]) -> dict[str, Any] | None:
    found = run.retrained()
    known = [client for client in order if found and found[client]]
    if not known:
        return None
    rows, names = [found[client] for client in known], [run.label(client) for client in known]
    cells = [[name, *facts.retrained_cells(row), number(row["kernel_shap"])] for name, row in zip(names, rows)]
    value, low, high = ([row[column] for row in rows] for column in ("value", "low", "high"))
    return {
        "by": rows[0]["by"],
        "bars": drawing.bars(names, value, (low, high)),
        "table": table([*facts.RETRAINED_HEAD, "KernelSHAP"], cells),
        "notes": facts.retrained_caveats(rows, names),
    }


def _gains(run: Run, order: Sequence[int], names: Sequence[str]) -> dict[str, Any] | None:
    rows = run.gains()
    if not any(rows):
        return None
    gains = [rows[c]["accuracy_received"] - rows[c]["accuracy_alone"] if rows[c] else NAN for c in order]
    cells = [[name, *facts.gain_cells(rows[client])] for client, name in zip(order, names)]
    return {
        "shared": next(row for row in rows if row)["tests"] == "shared",
        "bars": drawing.bars(names, gains),
        "table": table(["client", *facts.GAIN_HEAD], cells),
    }


def _flagged(run: Run) -> Markup | None:
    samples = run.record["samples"]
    rows = [
        [run.label(client), str(len(flagged)), percent(facts.share(len(flagged), samples[client]))]
        for client, flagged in sorted(run.flagged().items())
    ]
    return table(["client", "flagged", "of its samples"], rows) if rows else None


def _valued(run: Run, order: Sequence[int], names: Sequence[str]) -> Markup | None:
    rows = run.valued()
    cells = [[name, *map(number, rows[client].values())] for client, name in zip(order, names)] if rows else []
    return table(["client", *rows[0]], cells) if rows else None


def _settings(run: Run) -> Markup:
    settings = run.record["settings"] | {f"package {name}": of for name, of in run.record["packages"].items()}
    return table(["setting", "value"], [[name, str(value)] for name, value in settings.items()], texts=True)


def _hashes(run: Run) -> Markup:
    files = [path for path in (run.folder / CONTRIBUTIONS, run.folder / "config.yaml") if path.is_file()]
    rows = [[f"{file.name} (SHA-256)", hashlib.sha256(file.read_bytes()).hexdigest()] for file in files]
    for holder, digest in run.record["hashes"].items():
        who = "the server's validation set" if holder == "server" else run.label(int(holder))
        rows.append([f"samples and labels: {who}", digest])
    return table(["of", "hash"], rows, texts=True)
