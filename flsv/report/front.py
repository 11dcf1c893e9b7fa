"""The first page of a run's report: who contributed what, for those who decide, in no words of those who measure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from flsv.models.imbalance import OWN_SCORES
from flsv.report import facts
from flsv.report.blocks import (
    NONE,
    Bars,
    Block,
    Bullets,
    Section,
    Steps,
    Table,
    Text,
    Warning,
    joined,
    number,
    numbers,
    percent,
)
from flsv.report.measured import own_title
from flsv.report.reading import Run
from flsv.report.shares import SHARES, Shares, explained

#: What a model is judged by, as it is said to those who do not measure: what it is, and how much of it is good.
PLAIN = {
    "accuracy": "share of right answers",
    "balanced_accuracy": "share of right answers, of each kind of case alike",
    "per_class_accuracy": "share of right answers, of each kind of case alike",
    "negative_loss": "error",
    "auroc": "area under the ROC curve",
    "average_precision": "average precision",
    "f1": "F1 score",
}
#: Of clients whose updates are copies.
COPYING = (
    "These sent one another's updates but for little, as one client under several names does, or one who wants to "
    "bring another into disrepute: {}. Which of them copies which, updates do not tell."
)
ECHOING = "This one sent the model's own last step back, as one does who has not trained: {}."
#: Of the waterfall, besides the clients at both ends when there are more.
MOST_STEPS = 12
#: By how much of the difference the values may miss it, to add up to it.
TOLERANCE = 0.01


def front_page(run: Run, shares: Shares | None = None) -> list[Section]:
    """What everybody reads.

    Args:
        run: of which.
        shares: of a budget, where there is one.
    """
    sections = [Section("", [Text(_who(run)), *(Warning(text) for text in red_lines(run))])]
    if shares is not None:
        sections.append(Section(f"Shares of {shares.budget.text(shares.budget.amount)}", _shares(run, shares)))
    sections.append(Section("What each contributed", _contributions(run)))
    if steps := _steps(run):
        sections.append(Section("What the model has learned", steps))
    return [*sections, Section("What this rests on", _rests_on(run))]


def red_lines(run: Run) -> list[str]:
    """What has to be known before anything is made of the values."""
    lines = []
    if not run.ended:
        lines.append("The run has not come to its end: it was killed, or is still running. This is how far it was.")
    lines += [facts.AT_CHANCE.format(_plain(by)) for by in facts.at_chance(run.record)]
    if run.named:
        names = ", ".join(f"{run.label(who)} ({n} of {of} rounds)" for who, (n, of) in run.named.items())
        lines.append(
            f"Sent an update that was not finite, or far larger than all others: {names}. Those rounds count nothing "
            "for them."
        )
    for group in run.copies:
        names = ", ".join(run.label(client) for client in group)
        lines.append((COPYING if len(group) > 1 else ECHOING).format(names))
    return lines


def _who(run: Run) -> str:
    names = [run.label(client) for client in range(run.num_clients)]
    if not names:
        return f"Nobody has taken part yet: {facts.state_of(run)}."
    who = joined(names) if len(names) <= MOST_STEPS else f"{len(names)} partners"
    return f"{who} trained one model together, in {facts.state_of(run)}. These are their parts in what it has learned."


def _shares(run: Run, shares: Shares) -> list[Block]:
    known = [client for client in range(run.num_clients) if client not in shares.missing]
    order = facts.ends_of([*sorted(known, key=lambda client: -shares.basis.values[client]), *shares.missing])
    found = any(shares.found)
    rows = [
        [run.label(client), *share_cells(shares, client), *([shares.found[client] or NONE] if found else [])]
        for client in order
    ]
    said = explained(shares)
    if shares.missing:
        names = joined(run.label(client) for client in shares.missing)
        said.append(Text(f"No value, which is not 0, and so no share: {names}."))
    if found:
        said.append(Text("Nothing is held back from those of whom something was found: who pays decides."))
    if len(order) < run.num_clients:
        said.append(Text(f"Shown are {len(order)} of {run.num_clients} partners; {SHARES} has all."))
    head = ["partner", *SHARE_HEAD, *(["found"] if found else [])]
    return [Table(head, rows), *said]


SHARE_HEAD = ("share", "amount")


def share_cells(shares: Shares, client: int) -> list[str]:
    """A client's share and amount with their intervals, in :data:`SHARE_HEAD`'s order."""
    if client in shares.missing:
        return [NONE, NONE]
    cells = [percent(shares.shares[client]), shares.budget.text(shares.amounts[client])]
    low, high = shares.low[client], shares.high[client]
    if low != low or high != high:
        return cells
    least, most = (f"{amount:,.{shares.budget.decimals}f}" for amount in shares.ends(client))
    return [f"{cells[0]} [{100 * low:.1f} to {100 * high:.1f}]", f"{cells[1]} [{least} to {most}]"]


def _contributions(run: Run) -> list[Block]:
    """Every metric's values with their intervals, the last weights, and the scores of the clients' own models."""
    if not run.metrics:
        return [Text("No contribution was measured: the run had no metric.")]
    order = facts.ends_of(facts.order_of(run))
    found = [facts.values_of(run, metric) for metric in run.metrics]
    columns = {values.name: values.shown(order) for values in found}
    for title, key in (("last weight", "weight"), *((own_title(name), name) for name in OWN_SCORES)):
        if key in run.table.metrics:
            last = run.final(key)
            columns[title] = numbers([last[client] for client in order])
    rows = [[run.label(client), *cells] for client, *cells in zip(order, *columns.values())]
    blocks: list[Block] = [Table(["partner", *columns], rows)]
    for kind in dict.fromkeys(values.kind for values in found if values.kind):
        of = ", ".join(values.name for values in found if values.kind == kind)
        blocks.append(Text(f"In brackets, of {of}: {kind}."))
    without = sum(all(value != value for value in values) for values in zip(*(each.values for each in found)))
    if without:
        text = f"{without} clients were never drawn or could not be measured: they have no value, which is not 0."
        blocks.append(Text(text))
    return blocks


def _steps(run: Run) -> list[Block]:
    """From the model's performance at the start to that at the end, by the first metric whose values add up to it."""
    known = {name: each for name, each in run.record.get("paid_in", {}).items() if each["start"] is not None}
    told = {name: each for name, each in known.items() if name in run.metrics and None not in each.values()}
    for name, each in told.items():
        if _adds_up(run, name, each):
            return [_waterfall(run, name, each)]
    if not told:
        return [
            Text(f"The model's {_plain(by)}: {_shown(by, start)} when training began, {_shown(by, end)} at its end.")
            for by, start, end in ((each["by"], each["start"], each["end"]) for each in known.values())
        ]
    name, each = next(iter(told.items()))
    order = facts.ends_of(_by_value(run, name))
    caption = (
        f"The values of {name}. They do not add up to the difference of the model's {_plain(each['by'])} between start "
        f"and end ({_shown(each['by'], each['start'])} and {_shown(each['by'], each['end'])})"
    )
    values = run.final(name)
    return [Bars([run.label(client) for client in order], [values[client] for client in order], caption=caption)]


def _adds_up(run: Run, name: str, told: Mapping[str, Any]) -> bool:
    whole = told["end"] - told["start"]
    values = [value for value in run.final(name) if value == value]
    return bool(whole) and abs(math.fsum(values) - whole) <= TOLERANCE * abs(whole)


def _waterfall(run: Run, name: str, told: Mapping[str, Any]) -> Steps:
    """Of many clients those at both ends, and the others in one step."""
    values, order = run.final(name), _by_value(run, name)
    shown = order if len(order) <= MOST_STEPS else [*order[: MOST_STEPS // 2], *order[-(MOST_STEPS // 2) :]]
    names = [run.label(client) for client in shown]
    heights = [values[client] for client in shown]
    rest = told["end"] - told["start"] - math.fsum(heights)
    if len(shown) < run.num_clients and abs(rest) > TOLERANCE * abs(told["end"] - told["start"]):
        names.append("all others")
        heights.append(rest)
    sign = 1.0
    if told["by"] == "negative_loss":
        # Errors are shown as such, and who adds to it comes first, or it would seem to fall below 0 on its way.
        sign = -1.0
        names, heights = names[::-1], heights[::-1]
    by = _plain(told["by"])
    caption = (
        f"The model's {by}, from {_shown(told['by'], told['start'])} when training began to "
        f"{_shown(told['by'], told['end'])} at its end, and each partner's part in that (by {name}; they add up)"
    )
    heights = [sign * height for height in heights]
    return Steps(names, heights, sign * told["start"], sign * told["end"], caption, by, less_is_better=sign < 0)


def _by_value(run: Run, name: str) -> list[int]:
    values = run.final(name)
    known = [client for client in range(run.num_clients) if values[client] == values[client]]
    return sorted(known, key=lambda client: (-values[client], client))


def _plain(by: str) -> str:
    return PLAIN.get(by, by)


def _shown(by: str, value: float) -> str:
    return percent(value) if by.endswith("accuracy") else number(abs(value) if by == "negative_loss" else value)


#: What a module logs of the validation set, and how it is said.
_LOGGED = {
    "val_accuracy": "{} of the answers are right",
    "val_balanced_accuracy": "{} where each kind of case counts alike",
    "val_auroc": "the area under the ROC curve is {}",
}


def _rests_on(run: Run) -> list[Block]:
    items, judge = [], run.record["validation"]
    if judge:
        cases = "" if judge["rows"] is None else f"{judge['rows']:,} cases of "
        items.append(f"The model was judged on {cases}{judge['of']}.")
    told = run.record.get("logged", {})
    said = [
        text.format(percent(told[name]) if "accuracy" in name else number(told[name]))
        for name, text in _LOGGED.items()
        if told.get(name) is not None
    ]
    if said:
        items.append(f"At the end of training, on these cases: {', '.join(said)}.")
    items.append(f"The partners hold {sum(run.record['samples']):,} cases to train on.")
    items.append("The values are of one run: with another seed, other partners or cases they would be others.")
    items.append("The appendix has the methods, what they cannot see, all settings, and how to repeat the run.")
    return [Bullets(items)]
