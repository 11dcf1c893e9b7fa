"""Shares out a budget by a run's values, to the last cent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from flsv.arguments import check_number, check_one_of
from flsv.csv_files import save_csv
from flsv.errors import ConfigurationError
from flsv.functional.allocation import Negatives, allocate
from flsv.report.reading import NAN, Run, open_run
from flsv.report.record import write_record
from flsv.report.repeated import repeated_runs
from flsv.report.verdict import Basis, bases, chosen

#: In the run's folder.
PAYMENT = "payment.csv"
HEADER = ("client", "client_name", "value", "share", "share_low", "share_high", "amount", "amount_low", "amount_high")
#: What each rule makes of values below 0, in words.
RULES: dict[Negatives, str] = {
    "zero": "Whoever has a value below 0 gets nothing, and the others share as if it were not there",
    "shift": "Values are counted from the lowest one, if that is below 0; whoever has it gets nothing",
    "softmax": "Everybody gets something, the more the higher the value",
    "refuse": "No value is below 0: with one, nothing would have been shared out",
}


@dataclass(frozen=True)
class Terms:
    """On what terms a budget is shared out.

    Args:
        budget: what there is; None: shares only.
        rule: what becomes of values below 0, see :func:`flsv.allocate`.
        by: a metric of the run, or ``"retrained"``; None: retraining where there is one, else the first metric.
        unit: the smallest amount.
        currency: what the budget is of.

    Raises:
        ConfigurationError: an argument out of range, or a budget that is no multiple of the unit.

    Example:
        >>> Terms(100.0).text(33.3)
        '33.30'
        >>> Terms(1000000, unit=1, currency="yen").text(123456)
        '123,456 yen'
    """

    budget: float | None = None
    rule: Negatives = "zero"
    by: str | None = None
    unit: float = 0.01
    currency: str = ""

    def __post_init__(self) -> None:
        check_one_of(self, "rule", self.rule, get_args(Negatives))
        check_number(self, "unit", self.unit, above=0)
        if self.budget is not None:
            check_number(self, "budget", self.budget, above=0)
            allocate(torch.ones(1), self.budget, unit=self.unit)

    def text(self, amount: float) -> str:
        """An amount as it is read."""
        places = max(0, -math.floor(math.log10(self.unit) + 1e-9))
        return f"{amount:,.{places}f} {self.currency}".rstrip()


SHARES_ONLY = Terms()


@dataclass(frozen=True)
class Payment:
    """What each client gets.

    Args:
        terms: on which.
        basis: by which values.
        shares: ``[n]``, with the sum 1.
        low: ``[n]``, what the share would be were the client's own value at the low end of what is known of it, and the
            others' as they are; NaN where nothing is known.
        high: likewise, at the high end.
        amounts: ``[n]`` in whole units, which sum to the budget; none without a budget.
    """

    terms: Terms
    basis: Basis
    shares: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    amounts: Sequence[float] = ()

    def rows(self, run: Run) -> list[dict[str, Any]]:
        """A row per client, by the names in :data:`HEADER`."""
        budget = self.terms.budget or NAN
        rows = []
        for client, name in enumerate(run.client_names):
            low, high = self.low[client], self.high[client]
            amount = self.amounts[client] if self.amounts else NAN
            cells = (client, name, self.basis.values[client], self.shares[client], low, high)
            rows.append(dict(zip(HEADER, (*cells, amount, low * budget, high * budget))))
        return rows


def payment_of(run: Run, terms: Terms, repeated: Path | None = None) -> Payment:
    """Share out by a run's values.

    Raises:
        ConfigurationError: nothing was measured, or nobody has a value above 0 by the rule.
    """
    basis = chosen(bases(run, repeated_runs(run, repeated)), terms.by)
    if basis is None:
        raise ConfigurationError(f"{run.folder}: no contribution was measured, so there is nothing to share out by.")
    return payment_by(basis, terms)


def payment_by(basis: Basis, terms: Terms) -> Payment:
    """Share out by these values.

    Raises:
        ConfigurationError: nobody has a value above 0 by the rule.
    """
    values = torch.tensor(basis.values, dtype=torch.float64)
    shares = allocate(values, 1.0, terms.rule)
    low, high = (
        [_share_at(values, client, end, terms) for client, end in enumerate(row)] for row in (basis.low, basis.high)
    )
    amounts = () if terms.budget is None else allocate(values, terms.budget, terms.rule, unit=terms.unit).tolist()
    return Payment(terms, basis, shares.tolist(), low, high, amounts)


def _share_at(values: torch.Tensor, client: int, end: float, terms: Terms) -> float:
    """A client's share were its value this one."""
    if end != end or values[client] != values[client]:
        return NAN
    rule = "zero" if terms.rule == "refuse" else terms.rule
    moved = values.clone()
    moved[client] = end
    if rule == "zero" and not (moved > 0).any():
        return 0.0
    return float(allocate(moved, 1.0, rule)[client])


def pay(path: str | Path, terms: Terms, repeated: str | Path | None = None) -> tuple[Run, Payment]:
    """Share a budget out, write ``payment.csv`` into the run's folder, and keep the terms in its record, by which
    reports show the amounts from then on.

    Args:
        path: the run's folder.
        terms: with a budget.
        repeated: a folder of ``flsv repeat`` on the same data.

    Raises:
        ConfigurationError: no run there, no budget, nothing that was measured, nobody who has a claim.
    """
    if terms.budget is None:
        raise ConfigurationError("pay: say the budget that is to be shared out.")
    run = open_run(path)
    found = payment_of(run, terms, None if repeated is None else Path(repeated))
    save_csv(run.folder / PAYMENT, [HEADER, *([_cell(row[name]) for name in HEADER] for row in found.rows(run))])
    told = {**asdict(terms), "repeated": None if repeated is None else str(Path(repeated).resolve())}
    if run.record:
        write_record(run.folder, {**run.record, "payment": told})
    return open_run(path), found


def terms_of(run: Run) -> tuple[Terms, Path | None]:
    """Those on which it was paid, and the folder of runs with other seeds that was named then; else no budget and no
    folder."""
    told = dict(run.record.get("payment", {}))
    repeated = told.pop("repeated", None)
    return Terms(**told), None if repeated is None else Path(repeated)


def _cell(value: Any) -> Any:
    return "" if isinstance(value, float) and value != value else value
