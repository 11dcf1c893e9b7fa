"""The first page of a run's report: who has what share, for those who decide, in no words of those who measure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from flsv.errors import ConfigurationError
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
    percent,
)
from flsv.report.facts import AT_CHANCE, at_chance, client_label, ends_of, state_of
from flsv.report.payment import RULES, Payment, Terms, payment_by
from flsv.report.reading import Run
from flsv.report.verdict import Basis, bases, chosen, contradictions, order_in_words

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
#: Of clients whose payment is held back.
COPYING = (
    "These sent one another's updates but for little, as one client under several names does, or one who wants to "
    "bring another into disrepute: {}. Which of them copies which, updates do not tell."
)
ECHOING = "This one sent the model's own last step back, as one does who has not trained: {}."
#: Of the waterfall, besides the clients at both ends when there are more.
MOST_STEPS = 12
#: By how much of the difference the values may miss it, to add up to it.
TOLERANCE = 0.01


def front_page(run: Run, terms: Terms, repeats: Sequence[Run] = ()) -> list[Section]:
    """What everybody reads.

    Args:
        run: of which.
        terms: on which a budget is shared out; without one there are shares only.
        repeats: runs of the same federation with other seeds.
    """
    found = bases(run, repeats)
    basis = chosen(found, terms.by)
    sections = [Section("", [Text(_who(run)), *(Warning(text) for text in red_lines(run, found))])]
    if basis is None:
        return [*sections, Section("Shares", [Text("No contribution was measured: the run had no metric.")])]
    sections.append(Section("Shares" if terms.budget is None else "Shares and payment", _shares(run, basis, terms)))
    sections.append(Section("Is the order certain?", [Text(order_in_words(run, basis)), *_side_by_side(run, found)]))
    if steps := _steps(run):
        sections.append(Section("What the model has learned", steps))
    return [*sections, Section("What this rests on", _rests_on(run, basis))]


def red_lines(run: Run, found: Sequence[Basis]) -> list[str]:
    """What has to be known before anything is paid."""
    lines = []
    if run.ended is False:
        lines.append("The run has not come to its end: it was killed, or is still running. This is how far it was.")
    lines += [AT_CHANCE.format(PLAIN.get(by, by)) for by in at_chance(run.record)]
    contrary = contradictions(run, found)
    lines += [f"Values contradict each other. {' '.join(contrary)}"] if contrary else []
    if run.named:
        names = ", ".join(f"{client_label(run, who)} ({n} of {of} rounds)" for who, (n, of) in run.named.items())
        lines.append(
            f"Sent an update that was not finite, or far larger than all others: {names}. Those rounds count nothing "
            "for them."
        )
    for group in run.copies:
        names = ", ".join(client_label(run, client) for client in group)
        held = ", ".join(client_label(run, client) for client in group if client in run.held)
        state = (
            f"The payment is held back of: {held}" if held else "Somebody has looked at it, and all of them are paid"
        )
        what = COPYING if len(group) > 1 else ECHOING
        lines.append(f"{what.format(names)} {state}. Who is to be paid after all is named with flsv pay --release.")
    return lines


def _who(run: Run) -> str:
    names = [client_label(run, client) for client in range(run.num_clients)]
    if not names:
        return f"Nobody has taken part yet: {state_of(run)}."
    who = joined(names) if len(names) <= MOST_STEPS else f"{len(names)} partners"
    return f"{who} trained one model together, in {state_of(run)}. These are their parts in what it has learned."


def _shares(run: Run, basis: Basis, terms: Terms) -> list[Block]:
    try:
        payment = payment_by(basis, terms)
    except ConfigurationError:
        text = "Nobody can be given a share: by this rule no value is above 0."
        return [Warning(text)]
    order = ends_of([*basis.order, *(client for client in range(run.num_clients) if client not in basis.known)])
    head, rows = _share_table(run, payment, order)
    bounded = any(end == end for end in payment.low)
    caption = f"Shares by {basis.title}"
    if terms.budget is not None:
        caption = f"{terms.text(terms.budget)}, shared out by {basis.title}"
    said = f"{RULES[terms.rule]}."
    if bounded:
        said += (
            " In brackets is what the share would be if the partner's own value were at either end of its 90 % "
            f"interval, which {basis.known_of}, and the others' as they are."
        )
    blocks: list[Block] = [Table(head, rows, caption=caption), Text(said)]
    names = [client_label(run, client) for client in order]
    shares, low, high = (
        [100 * column[client] for client in order] for column in (payment.shares, payment.low, payment.high)
    )
    blocks.append(Bars(names, shares, low, high, "Shares in %", "%"))
    if run.num_clients > len(order):
        half = len(order) // 2
        blocks.append(Text(f"Shown are the first {half} and the last {half} of {run.num_clients} partners."))
    without = [client for client in range(run.num_clients) if client not in {*basis.known, *run.held}]
    if without:
        text = f"{len(without)} clients were never drawn or could not be measured: they have no value, which is not 0."
        blocks.append(Text(text))
    return blocks


def _share_table(run: Run, payment: Payment, order: Sequence[int]) -> tuple[list[str], list[list[str]]]:
    head, rows = ["partner", "share"], []
    if payment.amounts:
        head.append("amount")
    for client in order:
        low, high = payment.low[client], payment.high[client]
        known = payment.basis.values[client] == payment.basis.values[client]
        ends = f" [{100 * low:.1f} to {100 * high:.1f}]" if low == low else ""
        row = [client_label(run, client), percent(payment.shares[client]) + ends if known else NONE]
        if payment.amounts:
            row.append(_amount(run, payment, client))
        rows.append(row)
    return head, rows


def _amount(run: Run, payment: Payment, client: int) -> str:
    if client in run.held:
        return "held back"
    budget, low, high = payment.terms.budget or 0.0, payment.low[client], payment.high[client]
    ends = f" [{budget * low:,.0f} to {budget * high:,.0f}]" if low == low else ""
    return payment.terms.text(payment.amounts[client]) + ends


def _side_by_side(run: Run, found: Sequence[Basis]) -> list[Block]:
    """All that is known, as shares; who is below 0 says so."""
    if len(found) < 2:
        return []
    rows = []
    columns = [shares_in_words(basis) for basis in found]
    order = ends_of([*found[0].order, *(client for client in range(run.num_clients) if client not in found[0].known)])
    for client in order:
        rows.append([client_label(run, client), *(column[client] for column in columns)])
    caption = "Share of each partner by all that is known, side by side"
    return [Table(["partner", *(basis.title for basis in found)], rows, caption=caption)]


def shares_in_words(basis: Basis) -> list[str]:
    """What share each client has, ``[n]``; who is below 0 says so."""
    positive = math.fsum(max(value, 0.0) for value in basis.values if value == value)
    said = []
    for value in basis.values:
        if value != value:
            said.append(NONE)
        else:
            said.append("below 0" if value < 0 else percent(value / positive if positive else 0.0))
    return said


def _steps(run: Run) -> list[Block]:
    """From the model's performance at the start to that at the end, by the first metric whose values add up to it."""
    told = {name: each for name, each in run.record.get("paid_in", {}).items() if None not in each.values()}
    told = {name: each for name, each in told.items() if name in run.metrics}
    for name, each in told.items():
        if _adds_up(run, name, each):
            return [_waterfall(run, name, each)]
    if not told:
        return [Text(line) for line in _grown(run)]
    name, each = next(iter(told.items()))
    order = ends_of(_by_value(run, name))
    caption = (
        f"The values of {name}. They do not add up to the difference of the model's {_plain(each['by'])} between start "
        f"and end ({_shown(each['by'], each['start'])} and {_shown(each['by'], each['end'])})"
    )
    values = run.final(name)
    return [Bars([client_label(run, c) for c in order], [values[c] for c in order], caption=caption)]


def _grown(run: Run) -> list[str]:
    """The performance at start and end where no metric shares it out."""
    return [
        f"The model's {_plain(each['by'])}: {_shown(each['by'], each['start'])} when training began, "
        f"{_shown(each['by'], each['end'])} at its end."
        for each in run.record.get("paid_in", {}).values()
        if each["end"] is not None and each["start"] is not None
    ]


def _adds_up(run: Run, name: str, told: Mapping[str, Any]) -> bool:
    whole = told["end"] - told["start"]
    values = [value for value in run.table.last(name, run.num_clients) if value == value]
    return bool(whole) and abs(math.fsum(values) - whole) <= TOLERANCE * abs(whole)


def _waterfall(run: Run, name: str, told: Mapping[str, Any]) -> Steps:
    """Of many clients those at both ends, and the others in one step."""
    values, order = run.final(name), _by_value(run, name)
    shown = order if len(order) <= MOST_STEPS else [*order[: MOST_STEPS // 2], *order[-(MOST_STEPS // 2) :]]
    names = [client_label(run, client) for client in shown]
    heights = [values[client] for client in shown]
    rest = told["end"] - told["start"] - math.fsum(heights)
    if len(shown) < run.num_clients and abs(rest) > TOLERANCE * abs(told["end"] - told["start"]):
        names.append("held back" if len(order) == len(shown) else "all others")
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


def _rests_on(run: Run, basis: Basis) -> list[Block]:
    items = []
    held = run.record.get("validation")
    if held:
        cases = "" if held["rows"] is None else f"{held['rows']:,} cases of "
        items.append(f"The model was judged on {cases}{held['of']}.")
    told = run.record.get("logged", {})
    said = [
        text.format(percent(told[name]) if "accuracy" in name else number(told[name]))
        for name, text in _LOGGED.items()
        if told.get(name) is not None
    ]
    if said:
        items.append(f"At the end of training, on these cases: {', '.join(said)}.")
    if run.record.get("samples"):
        items.append(f"The partners hold {sum(run.record['samples']):,} cases to train on.")
    if basis.source == "run":
        items.append("The shares are of one run: with another seed, other partners or cases they would be others.")
    items.append("The appendix has the methods, what they cannot see, all settings, and how to repeat the run.")
    return [Bullets(items)]
