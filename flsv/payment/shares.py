"""Shares of a budget, computed from the values of a run."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pandas import DataFrame

from flsv.functional.joint_shares import joint_shares
from flsv.payment.allocation import allocate
from flsv.results.basis import RETRAINED, RETRAINED_METRIC, Basis, basis_of
from flsv.results.reading import Run
from flsv.results.round_result import INVALID_UPDATES, data_warnings_in
from flsv.results.text import NO_NUMBER, joined, percent, shares_in
from flsv.results.verdict import Verdict
from flsv.utilities.choices import Negatives
from flsv.utilities.csv_files import NAN
from flsv.utilities.declared import Positive, checked
from flsv.utilities.errors import ConfigurationError

#: Currencies whose amounts have no decimals, and those with three. All others have two.
WITHOUT_DECIMALS = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF"
WITH_THREE_DECIMALS = "BHD IQD JOD KWD LYD OMR TND"


@checked
@dataclass(frozen=True)
class Budget:
    """A budget, and the rule by which it is shared out.

    Args:
        amount: the amount to be shared out.
        by: the name of a metric of the run, or ``"retrained"``. None: the values that the page shows without a budget.
        rule: the treatment of values below 0, see :func:`flsv.allocate`.
        currency: the currency's code, such as ``"EUR"``. It determines the number of decimals.
        evaluated_by_partners: whether to accept values for which the clients scored the models on their own validation
            samples.

    Raises:
        ConfigurationError: an argument is out of range, or the amount has more decimals than the currency.

    Example:
        >>> Budget(100, currency="EUR").text(33.3), Budget(1_000_000, currency="JPY").text(123456)
        ('33.30 EUR', '123,456 JPY')
    """

    amount: Positive
    by: str | None = None
    rule: Negatives = "zero"
    currency: str = ""
    evaluated_by_partners: bool = False

    def __post_init__(self) -> None:
        is_code = re.fullmatch("[A-Za-z]{3}|", self.currency)
        if not is_code:
            raise ConfigurationError(
                f"Budget(currency={self.currency!r}): expected a code of three letters, such as EUR, USD or CHF "
                "(ISO 4217)."
            )
        if round(self.amount, self.decimals) != self.amount:
            text = f"{self.amount} {self.currency}".rstrip()
            raise ConfigurationError(
                f"a budget of {text}: expected {self.decimals} decimals at most."
            )

    @property
    def decimals(self) -> int:
        code = self.currency.upper()
        if code in WITHOUT_DECIMALS.split():
            return 0
        if code in WITH_THREE_DECIMALS.split():
            return 3
        return 2

    @property
    def unit(self) -> float:
        """Return the currency's smallest amount, such as 0.01."""
        return float(f"1e-{self.decimals}")

    def text(self, amount: float) -> str:
        """Format an amount with the currency's decimals and code."""
        return f"{amount:,.{self.decimals}f} {self.currency}".rstrip()


#: Columns with an amount or a share.
AMOUNT_COLUMNS = ("share", "share_low", "share_high", "amount", "amount_low", "amount_high")
COLUMN_ORDER = (
    "client",
    "client_name",
    "value",
    "low",
    "high",
    *AMOUNT_COLUMNS,
    "currency",
    "finding",
    "by",
    "of",
    "rule",
    "verdict",
)


def shares_file(page: Path) -> Path:
    """Return the path of the CSV file with the shares of a report's page."""
    if page.stem == "report":
        return page.with_name("shares.csv")
    return page.with_name(f"{page.stem}_shares.csv")


@dataclass(frozen=True)
class Shares:
    """A budget, and each client's share of it."""

    #: The budget.
    budget: Budget
    #: The values by which the budget is shared out.
    basis: Basis
    #: Whether the budget may be shared out by these values. If not, no client has a share.
    verdict: Verdict
    #: One row per client, with the columns :data:`COLUMN_ORDER`. `share` is the client's fraction of the budget.
    #: `share_low` and `share_high` are the ends of its interval, from draws of all values together, see
    #: :mod:`flsv.functional.joint_shares`. `amount`, `amount_low` and `amount_high` are the same in money, rounded to
    #: the currency's decimals. `finding` is a text on its updates and its samples. Unknown numbers are NaN.
    table: DataFrame

    @property
    def title(self) -> str:
        """Format the budget's amount with its currency."""
        return self.budget.text(self.budget.amount)

    def cells(self, client: int) -> list[str]:
        """Format a client's share and its amount, each with its interval."""
        if client in self.missing:
            return [NO_NUMBER, NO_NUMBER]
        row = self.table.loc[client]
        share = percent(row["share"])
        amount = self.budget.text(row["amount"])
        low_percent = 100 * row["share_low"]
        high_percent = 100 * row["share_high"]
        if math.isnan(low_percent) or math.isnan(high_percent):
            return [share, amount]

        decimals = self.budget.decimals
        low_amount = f"{row['amount_low']:,.{decimals}f}"
        high_amount = f"{row['amount_high']:,.{decimals}f}"
        return [
            f"{share} [{low_percent:.1f} to {high_percent:.1f}]",
            f"{amount} [{low_amount} to {high_amount}]",
        ]

    def csv_table(self) -> DataFrame:
        """Return the table for ``shares.csv``, rounded and without empty columns."""
        format_of_amounts = f"{{:.{self.budget.decimals}f}}"
        number_formats = dict.fromkeys(("share", "share_low", "share_high"), "{:.6f}")
        number_formats |= dict.fromkeys(("amount", "amount_low", "amount_high"), format_of_amounts)
        number_formats |= dict.fromkeys(("value", "low", "high"), "{:.6g}")

        table = self.table.copy()
        for column, number_format in number_formats.items():
            numbers = self.table[column]
            texts = numbers.map(number_format.format)
            table[column] = texts.where(numbers.notna(), "")
        optional_columns = [*number_formats, "currency", "finding"]
        empty_columns = [column for column in optional_columns if not table[column].any()]
        return table.drop(columns=empty_columns)

    @property
    def missing(self) -> list[int]:
        """Return the ids of the clients without a value."""
        return self.table.index[self.table["share"].isna()].tolist()


def shares_of(run: Run, budget: Budget) -> Shares:
    """Share a budget out by a run's values. If the verdict on them forbids it, no client has an amount.

    Raise ConfigurationError if the run has no such values, or if the rule refuses them.
    """
    basis = basis_of(run, budget.by)
    verdict = basis.verdict(budget.rule, accepts_partners=budget.evaluated_by_partners)
    table = basis.estimates.copy()
    table["client"] = range(run.num_clients)
    table["client_name"] = run.client_names
    table[list(AMOUNT_COLUMNS)] = NAN
    if not verdict.forbids_payment:
        _share_out(table, run, budget, basis)

    table["currency"] = budget.currency
    table["finding"] = findings(run)
    table["by"] = basis.title
    table["of"] = basis.origin
    table["rule"] = budget.rule
    table["verdict"] = verdict.text
    return Shares(budget, basis, verdict, table[list(COLUMN_ORDER)])


def _share_out(table: DataFrame, run: Run, budget: Budget, basis: Basis) -> None:
    """Write the clients' shares and amounts into the table."""
    values = torch.tensor(basis.values, dtype=torch.float64)
    clients_below_0 = (values < 0).nonzero().flatten().tolist()
    if budget.rule == "refuse" and clients_below_0:
        names = joined(map(run.label, clients_below_0))
        raise ConfigurationError(
            f"Budget(rule='refuse'): the values of {names} are below 0. Choose the rule zero, shift or softmax."
        )
    intervals = joint_shares(values, basis.inputs.errors, budget.rule)
    table["share"] = _nan_where_unvalued(allocate(values, 1.0, budget.rule), values)
    table["share_low"] = intervals.low.tolist()
    table["share_high"] = intervals.high.tolist()

    amounts = allocate(values, budget.amount, budget.rule, unit=budget.unit)
    table["amount"] = _nan_where_unvalued(amounts, values)
    lowest = (table["share_low"] * budget.amount).round(budget.decimals)
    highest = (table["share_high"] * budget.amount).round(budget.decimals)
    # Rounding may move an amount out of its interval.
    table["amount_low"] = np.minimum(lowest, table["amount"])
    table["amount_high"] = np.maximum(highest, table["amount"])


def _nan_where_unvalued(amounts: torch.Tensor, values: torch.Tensor) -> list[float]:
    """Return the amounts ``[n]``, with NaN for the clients without a value."""
    return amounts.where(~values.isnan(), NAN).tolist()


def findings(run: Run, for_one_client: bool = False) -> list[str]:
    """Describe each client's invalid updates and the data-quality warnings about its samples, ``[n]`` texts.

    A text is "" if there are none. With ``for_one_client`` it neither names nor describes other clients.
    """
    texts: list[list[str]] = [[] for _ in range(run.num_clients)]
    for event in run.record["events"]:
        if event.what in INVALID_UPDATES:
            texts[event.client].append(INVALID_UPDATES[event.what].format(event.times, event.of))

    for data_warning in data_warnings_in(run.record["events"]):
        if data_warning.client is None:
            continue  # a warning about all tables is a reason of the verdict
        description = "a data-quality warning" if for_one_client else data_warning.text
        texts[data_warning.client].append(f"{data_warning.column}: {description}")
        for other_client in data_warning.others:
            name = "another participant" if for_one_client else run.label(data_warning.client)
            texts[other_client].append(f"{data_warning.column}: some are also samples of {name}")
    return ["; ".join(client_texts) for client_texts in texts]


def fractions_moved_by_scores(run: Run, basis: Basis) -> dict[str, float]:
    """Return, for each other score of retrained models, the fraction of a payment that it would give to others."""
    if basis.key != RETRAINED or run.retrained is None:
        return {}
    shares = shares_in(run.retrained.final(RETRAINED_METRIC))
    fractions = {}
    for metric in run.retrained.metrics:
        score = run.retrained.performances.get(metric, {}).get("by")
        if score and score != basis.by:
            other_shares = shares_in(run.retrained.final(metric))
            fractions[score] = fraction_moved(shares, other_shares)
    return fractions


def fraction_moved(shares: Sequence[float], other_shares: Sequence[float]) -> float:
    """Compute the fraction of a payment by which two vectors of shares ``[n]`` differ.

    Example:
        >>> round(fraction_moved([0.5, 0.3, 0.2], [0.4, 0.3, 0.3]), 3)
        0.1
    """
    differences = np.subtract(shares, other_shares)
    return float(np.nansum(np.abs(differences))) / 2
