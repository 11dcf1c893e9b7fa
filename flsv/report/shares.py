"""Shares of a budget by the values of a run; all amounts are computed in this module."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from pandas import DataFrame

from flsv.functional.allocation import Negatives, allocate
from flsv.report.reading import Run, over_seeds
from flsv.results.budget import Budget as Budget
from flsv.results.text import NONE, WORDS, joined, percent
from flsv.utilities.csv_files import NAN
from flsv.utilities.display import CLIENTS
from flsv.utilities.errors import ConfigurationError

#: Name of the file of shares, beside the report.
SHARES = "shares.csv"
HEADER = (
    *("client", "client_name", "value", "low", "high", "share", "share_low", "share_high"),
    *("amount", "amount_low", "amount_high", "currency", "found", "by", "of", "rule"),
)
SHARE_HEAD = ("share", "amount")
#: Prefix of further columns of shares in retrained.csv: by another score, or without one of the seeds.
SHARE_BY = "share"
#: Name of the values by retraining.
RETRAINED = "retrained"
#: Kinds of coalitions whose trainings rank clients, but do not tell how much each is worth.
RANKING_ONLY = ("singles", "leave-one-out")


#: Among the settings that a retraining has changed: a coalition draws no cohorts, unlike the run.
ALL_TAKE_PART = "all members of a coalition train in every round"


@dataclass(frozen=True)
class Basis:
    """One value per client, by which a budget is shared out.

    Args:
        key: the name of a metric, or ``"retrained"``.
        title: the values' name for readers.
        of: a description of what was run: coalitions, seeds, rounds and date.
        values: ``[n]``, the clients' values, NaN for a client without one.
        low: ``[n]``, the lower ends of the values' intervals, NaN if unknown.
        high: ``[n]``, the upper ends.
        to_pay_by: whether the metric's documentation does not advise against payment.
        seeds: the number of seeds over which the values are means.
        retrains: whether the values come from training coalitions, after the run or beside it.
        judged: whether the partners themselves judged models.
    """

    key: str
    title: str
    of: str
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    to_pay_by: bool = True
    seeds: int = 1
    retrains: bool = False
    judged: bool = False


def basis_of(run: Run, by: str | None = None) -> Basis:
    """Return the values by which a budget is shared out.

    Args:
        run: the run.
        by: the name of a metric, or ``"retrained"``; None: the only values that are suitable for payment.

    Raises:
        ConfigurationError: nothing was measured; there are no values called ``by``; or ``by`` is None and there is not
            exactly one choice.
    """
    if "of_rounds" in run.record:
        raise ConfigurationError(
            f"{run.folder} has metrics of rounds that {run.record['of_rounds']} ran, and no budget is shared out by "
            "them: no coalition was trained. Run the federation with FederatedLoop, and ShadowShapley or flsv retrain."
        )
    # Costs, and values of pairs of clients, can never be a basis of payment.
    about = {name: run.about(name) for name in run.metrics}
    known = [name for name, of in about.items() if of["higher_is_better"] is not False and not of["columns"]]
    fit = [name for name in known if about[name]["to_pay_by"]]
    if any(run.retrained()):
        known, fit = [*known, RETRAINED], [RETRAINED]
    return _chosen(run, by, known, fit)


def _chosen(run: Run, by: str | None, known: Sequence[str], fit: Sequence[str]) -> Basis:
    """Return the basis that ``by`` names among the ``known`` values; if ``by`` is None, the only one in ``fit``."""
    if not known:
        raise ConfigurationError(f"{run.folder}: no contribution was measured, so there is nothing to share out by.")
    there = f"{run.folder} has values by {joined(known)}"
    if by is not None and by not in known:
        raise ConfigurationError(f"--by {by}: {there}. flsv retrain RUN adds {RETRAINED}.")
    if by is None and len(fit) != 1:
        against = (
            ", and the metrics' own pages say not to pay by them: flsv retrain RUN adds others. These all the same"
        )
        why = ". Say by which" if fit else against
        options = joined((f"--by {name}" for name in fit or known), "or")
        raise ConfigurationError(f"{there}{why}: {options}.")
    key = by or fit[0]
    return _retrained(run) if key == RETRAINED else _measured(run, key)


def _measured(run: Run, metric: str) -> Basis:
    """Return a metric's values as a basis; for a run of ``flsv repeat`` they are the means over all seeds."""
    run = over_seeds(run)
    title = f"{metric}, mean of {run.seeds} runs" if run.seeds > 1 else metric
    about, ends = run.about(metric), run.ends(metric)
    said: Any = about["to_pay_by"], run.seeds, about["class"] == "ShadowShapley", about.get("judges") == "clients"
    return Basis(metric, title, _of(run.runs), run.final(metric), *ends, *said)


def _retrained(run: Run) -> Basis:
    rows = run.retrained()
    first = next(row for row in rows if row)
    if first.get("trainings") in RANKING_ONLY:
        raise ConfigurationError(
            f"{run.folder}: its values by retraining come from {WORDS['trainings'][first['trainings']]}, which ranks "
            "clients and does not say how much each is worth. Train more: flsv retrain RUN without --trainings; or "
            "share out by a metric of the run (--by)."
        )
    value, low, high = ([row.get(name, NAN) for row in rows] for name in ("value", "low", "high"))
    of = f"{retrained_from(first, run.record['rounds'])}, {_day(run)}"
    title, seeds = f"retraining, by {first['by']}", len(first["seeds"].split())
    return Basis(RETRAINED, title, of, value, low, high, seeds=seeds, retrains=True, judged=by_partners(first["by"]))


def by_partners(by: str) -> bool:
    """Return whether ``by``, the title of a performance, says that the partners themselves judge the models."""
    return by.startswith(CLIENTS)


def retrained_from(row: Mapping[str, Any], planned: int | None) -> str:
    """Return a text that says what values by retraining come from: coalitions, seeds, rounds, and changed settings.

    Args:
        row: a row of ``retrained.csv``.
        planned: the number of rounds that was set for the run.
    """
    coalitions = WORDS["trainings"].get(row.get("trainings"))
    parts = coalitions, _seeds(row["seeds"].split()), _rounds([row["rounds"]], planned), row.get("changed")
    return ", ".join(filter(None, parts))


def _of(runs: Sequence[Run]) -> str:
    seeds = (str(run.record["settings"]["federation_seed"]) for run in runs)
    rounds = _rounds([run.rounds for run in runs], runs[0].record["rounds"])
    return f"{_seeds(sorted(seeds, key=lambda seed: (len(seed), seed)))}, {rounds}, {_day(runs[0])}"


def _seeds(seeds: Sequence[str]) -> str:
    return f"seed{'s' * (len(seeds) > 1)} {joined(seeds)}"


def _rounds(rounds: Sequence[float], planned: int | None) -> str:
    """Return a text with the number of rounds (or the least and the most of several), and how many were ``planned``."""
    of = f" of {planned}" if planned and planned > 0 else ""
    had = " to ".join(f"{count:g}" for count in sorted({min(rounds), max(rounds)}))
    return f"{had}{of} rounds"


def _day(run: Run) -> str:
    return f"run of {run.record['started'][:10]}"


@dataclass(frozen=True)
class Shares:
    """The shares of a budget.

    Args:
        budget: the budget.
        basis: the values by which it is shared out.
        table: one row per client, with the columns :data:`HEADER`: ``share``, the client's fraction of the budget;
            ``share_low`` and ``share_high``, what its share would be if only its own value were at an end of its
            interval; ``amount`` in the currency's smallest units, with ``amount_low`` and ``amount_high``; ``found``, a
            text on what the run has found about its updates. Unknown numbers are NaN.
    """

    budget: Budget
    basis: Basis
    table: DataFrame

    @property
    def title(self) -> str:
        """Return the budget's amount with its currency."""
        return self.budget.text(self.budget.amount)

    def cells(self, client: int) -> list[str]:
        """Return a client's share and amount with their intervals as texts, in the order of :data:`SHARE_HEAD`."""
        if client in self.missing:
            return [NONE, NONE]
        row = self.table.loc[client]
        cells = [percent(row["share"]), self.budget.text(row["amount"])]
        low, high = row["share_low"], row["share_high"]
        if low != low or high != high:
            return cells
        least, most = (f"{row[name]:,.{self.budget.decimals}f}" for name in ("amount_low", "amount_high"))
        return [f"{cells[0]} [{100 * low:.1f} to {100 * high:.1f}]", f"{cells[1]} [{least} to {most}]"]

    @property
    def missing(self) -> list[int]:
        """Return the clients without a value."""
        return self.table.index[self.table["share"].isna()].tolist()


def shares_of(run: Run, budget: Budget) -> Shares:
    """Share a budget out by a run's values.

    Args:
        run: the run.
        budget: the budget.

    Returns:
        Every client's share and amount.

    Raises:
        ConfigurationError: the run has no suitable values, see :func:`basis_of`; partners judged models and the budget
            does not consent to that; or no client has a positive claim.
    """
    basis = basis_of(run, budget.by)
    if basis.judged and not budget.judged_by_partners:
        raise ConfigurationError(
            f"{basis.title}: {WORDS['judged']} To share a budget out among partners who trust each other, say "
            "--judged-by-partners (in Python Budget(..., judged_by_partners=True))."
        )
    values = torch.tensor(basis.values, dtype=torch.float64)
    shares, amounts = allocate(values, 1.0, budget.rule), allocate(values, budget.amount, budget.rule, unit=budget.unit)
    table = DataFrame({"client": range(run.num_clients), "client_name": run.client_names, "value": basis.values})
    table["share"] = shares.where(~values.isnan(), NAN).tolist()
    table["amount"] = amounts.where(~values.isnan(), NAN).tolist()
    for end, ends, beyond in (("low", basis.low, np.minimum), ("high", basis.high, np.maximum)):
        moved = [_share_at(values, client, each, budget.rule) for client, each in enumerate(ends)]
        rounded = [round(share * budget.amount, budget.decimals) for share in moved]
        table[end], table[f"share_{end}"] = ends, moved
        table[f"amount_{end}"] = beyond(rounded, table["amount"])
    table = table.assign(currency=budget.currency, found=found_in(run), by=basis.title, of=basis.of, rule=budget.rule)
    return Shares(budget, basis, table[[*HEADER]])


def _share_at(values: torch.Tensor, client: int, end: float, rule: Negatives) -> float:
    """Compute a client's share of 1 if ``end`` were its value and all others kept theirs; NaN if either is unknown."""
    if not math.isfinite(end) or values[client].isnan():
        return NAN
    moved = values.clone()
    moved[client] = end
    try:
        return float(allocate(moved, 1.0, "zero" if rule == "refuse" else rule)[client])
    except ConfigurationError:  # then no client has a claim
        return 0.0


def found_in(run: Run) -> list[str]:
    """Return for each client a text on the copies and outliers found among its updates, ``[n]``; "" if none were
    found."""
    found: list[list[str]] = [[] for _ in range(run.num_clients)]
    for group in run.copies:
        for client in group:
            others = joined(run.label(other) for other in group if other != client) if len(group) > 1 else ""
            found[client].append(f"updates like those of {others}" if others else "sent the model's last step back")
    for client, (times, of) in run.named.items():
        found[client].append(f"not finite or far too large in {times} of {of} rounds")
    return ["; ".join(each) for each in found]
