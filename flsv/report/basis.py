"""Basis: the values, one per client, by which a report orders and pays clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flsv.functional.intervals import seed_freedom
from flsv.functional.joint_shares import ValueErrors, joint_intervals
from flsv.report.reading import Run, over_seeds
from flsv.results.folder import CASE_COVARIANCE, SEED_COVARIANCE
from flsv.results.text import WORDS, joined, nearest_to_retraining_first, titled
from flsv.results.verdict import (
    PaymentFacts,
    Verdict,
    doubt_facts,
    game_facts,
    matrix_of,
    value_errors,
    verdict_of,
)
from flsv.utilities.choices import Negatives
from flsv.utilities.csv_files import NAN, number_or_nan
from flsv.utilities.display import CLIENTS_PREFIX
from flsv.utilities.errors import ConfigurationError

#: Name of the values by retraining.
RETRAINED = "retrained"
#: Text in the column ``changed`` of retrained.csv if the run drew cohorts and the trainings of its coalitions do not.
ALL_TAKE_PART = "all members of a coalition train in every round"


@dataclass(frozen=True)
class Basis:
    """One value per client, by which clients are ordered and a budget is shared out."""

    #: The name of a metric, or `"retrained"`.
    key: str
    #: The values' name as the page shows it.
    title: str
    #: A description of the runs that the values come from: coalitions, seeds and rounds.
    origin: str
    #: `[n]`, the clients' values, NaN for a client without one.
    values: Sequence[float]
    #: `[n]`, the lower ends of the values' intervals. For values of one seed from metrics that train no coalitions, all
    #: are NaN: such intervals are too narrow to contain the mean over many seeds often enough.
    low: Sequence[float]
    #: `[n]`, the upper ends of the intervals. NaN where `low` is NaN.
    high: Sequence[float]
    #: All else on which it depends whether a budget may be shared out by the values, see
    #: :class:`flsv.results.verdict.PaymentFacts`.
    facts: Mapping[str, Any] = field(default_factory=dict)
    #: The degrees of freedom of the intervals, which are Student's t. None: they are normal.
    degrees_of_freedom: int | None = None
    #: `[n, n]`, the values' covariance between seeds. None: only the intervals are known.
    seed_covariance: Tensor | None = None
    #: `[n, n]`, the values' covariance between draws of as many validation samples. None: it is not known.
    case_covariance: Tensor | None = None

    @property
    def by(self) -> str:
        """Return the name of the performance that the values distribute among the clients, or "" without one."""
        return str(self.facts.get("by", ""))

    @property
    def seeds(self) -> int:
        """Return the number of seeds over which the values are averaged."""
        return int(self.facts.get("seeds", 1))

    def verdict(
        self,
        rule: Negatives = "zero",
        accepts_partners: bool = False,
    ) -> Verdict:
        """Decide whether a budget may be shared out by these values.

        Args:
            rule: the rule for values below 0.
            accepts_partners: whether the payer accepts values for which the clients scored the models.
        """
        facts = PaymentFacts(
            values=self.values,
            errors=self.errors(),
            accepts_partners=accepts_partners,
            **self.facts,  # its other fields, from the run's record
        )
        return verdict_of(facts, rule)

    def errors(self) -> list[ValueErrors]:
        """Return the sources of the values' errors, see :func:`flsv.results.verdict.value_errors`."""
        return value_errors(
            self.low,
            self.high,
            degrees_of_freedom=self.degrees_of_freedom,
            seed_covariance=self.seed_covariance,
            case_covariance=self.case_covariance,
        )

    @property
    def has_intervals(self) -> bool:
        """Return whether the interval of any value is known."""
        return any(not math.isnan(bound) for bound in self.low)

    @cached_property
    def interval_with_other_cases(self) -> tuple[list[float], list[float]] | None:
        """The ends of the values' intervals for other validation samples and other seeds, ``[n]`` each. None if it is
        not known how much values depend on the validation samples.
        """
        if self.case_covariance is None or not self.has_intervals:
            return None
        values = torch.tensor(self.values, dtype=torch.float64)
        low, high = joint_intervals(values, self.errors())
        return low.tolist(), high.tolist()


def intervals_to_show(basis: Basis, for_payment: bool) -> tuple[Sequence[float], Sequence[float]]:
    """Return the ends of the intervals beside the values, ``[n]`` each.

    Where values are to pay by, they are for other cases and other seeds if those are known. Else they are for this
    validation set and other seeds.
    """
    if for_payment and basis.interval_with_other_cases is not None:
        return basis.interval_with_other_cases
    return basis.low, basis.high


def basis_of(run: Run, values_name: str | None = None) -> Basis:
    """Return the values by which to share a budget out: those of this name, or the only suitable ones.

    Raise ConfigurationError if no values or several are suitable.
    """
    candidates = _metrics_to_share_by(run)
    suitable = _suitable_metrics(run)
    if any(run.retrained()):  # the only suitable values then
        candidates = [*candidates, RETRAINED]
        suitable = [RETRAINED]
    key = _selected_key(run, values_name, candidates, suitable)
    if key == RETRAINED:
        return _basis_by_retraining(run)
    return _basis_by_metric(run, key)


def _selected_key(
    run: Run,
    values_name: str | None,
    candidates: Sequence[str],
    suitable: Sequence[str],
) -> str:
    """Return the values to share a budget by: ``values_name``, or the only ``suitable`` one."""
    if not candidates:
        raise ConfigurationError(
            f"{run.folder}: no contribution was measured, so there is nothing to share out by."
        )
    available = f"{run.folder} has values by {joined(candidates)}"
    if values_name is not None:
        if values_name not in candidates:
            raise ConfigurationError(
                f"--by {values_name}: {available}. flsv retrain RUN adds {RETRAINED}."
            )
        return values_name

    framework = run.record.get("of_rounds")  # which ran single rounds, or None
    if framework:
        reason = WORDS["against"]["rounds"].format(framework)
        raise ConfigurationError(f"{available}. {reason}")
    if not suitable:
        raise ConfigurationError(
            f"{available}, which the metrics' documentation advises against as a basis for payment. flsv retrain RUN "
            "adds suitable ones."
        )
    if len(suitable) > 1:
        options = joined((f"--by {name}" for name in suitable), "or")
        raise ConfigurationError(f"{available}. Choose one: {options}.")
    return suitable[0]


def preferred_basis(run: Run) -> Basis | None:
    """Return the values that a report without a budget shows: by retraining, else by the most suitable metric."""
    if any(run.retrained()):
        return _basis_by_retraining(run)
    class_by_metric = {
        metric: run.metric_info(metric)["class"] for metric in _suitable_metrics(run)
    }
    # The suitable one nearest to retraining, else any to share by, else any metric.
    preferred = [
        *nearest_to_retraining_first(class_by_metric),
        *_metrics_to_share_by(run),
        *run.metrics,
    ]
    for metric in preferred:
        if metric in run.measured:
            return _basis_by_metric(run, metric)
    if not preferred:
        return None
    return _basis_by_metric(run, preferred[0])


def _metrics_to_share_by(run: Run) -> list[str]:
    """Return the metrics by which a budget could be shared out, without costs and values of pairs."""
    metrics = []
    for metric in run.metrics:
        metric_info = run.metric_info(metric)
        is_cost = metric_info["higher_is_better"] is False
        has_one_value = not metric_info["columns"]
        if has_one_value and not is_cost:
            metrics.append(metric)
    return metrics


def _suitable_metrics(run: Run) -> list[str]:
    """Return the metrics whose documentation does not advise against payments by them."""
    candidates = _metrics_to_share_by(run)
    return [metric for metric in candidates if run.metric_info(metric)["to_pay_by"]]


def _basis_by_metric(run: Run, metric: str) -> Basis:
    """Return a metric's values in a run, or their means over all runs of its ``flsv repeat``."""
    run = over_seeds(run)
    metric_info = run.metric_info(metric)
    low, high = run.ends(metric)
    title = f"{metric}, mean of {run.seeds} runs" if run.seeds > 1 else metric

    recorded_seeds = []
    for one_run in run.runs:
        seed = one_run.record["settings"].get("federation_seed")
        if seed is not None:  # other frameworks' rounds have none
            recorded_seeds.append(int(seed))
    seed_texts = [str(seed) for seed in sorted(recorded_seeds)]
    rounds = [one_run.rounds for one_run in run.runs]
    return Basis(
        metric,
        title,
        origin=", ".join(_seeds_and_rounds(seed_texts, rounds, run.record["rounds"])),
        values=run.final(metric),
        low=low,
        high=high,
        facts={
            "source": "scores" if metric_info["class"] == "ShadowShapley" else "none",
            **game_facts(run.record, metric),
            **doubt_facts(run.record["events"], run.client_names),
            "seeds": run.seeds,
            "unsuitable": "" if metric_info["to_pay_by"] else metric,
            "of_rounds": run.record.get("of_rounds", ""),
            "is_finished": run.ended,
            "judged": metric_info.get("judges") == "clients",
        },
        degrees_of_freedom=run.seeds - 1 if run.seeds > 1 else None,
        case_covariance=_case_covariance_of_runs(run.runs, metric),
    )


def _case_covariance_of_runs(runs: Sequence[Run], metric: str) -> Tensor | None:
    """Return the mean over all runs of the values' covariance between draws of validation samples, or None."""
    covariances = []
    for run in runs:
        performance_by_metric = run.record.get("paid_in", {})  # what the metrics' values distribute
        performance = performance_by_metric.get(metric, {})
        covariance = matrix_of(performance.get("case_covariance") or [])
        if covariance is None:
            return None
        covariances.append(covariance)
    # The runs have the same validation samples, so that a mean over runs varies as much as one of them.
    return torch.stack(covariances).mean(0)


def _basis_by_retraining(run: Run) -> Basis:
    return basis_of_retrained(run.retrained(), run.record)


def basis_of_retrained(
    rows: Sequence[Mapping[str, Any]],
    record: Mapping[str, Any],
) -> Basis:
    """Return the values in the rows of ``retrained.csv``, one for each client, empty without a value."""
    row = next(row for row in rows if row)
    seeds = len(row["seeds"].split())
    validation = record.get("validation") or {}
    return Basis(
        RETRAINED,
        f"retraining, measured by {titled(row['by'])}",
        origin=retrained_from(row, record["rounds"]),
        values=_column(rows, "value"),
        low=_column(rows, "low"),
        high=_column(rows, "high"),
        facts={
            "by": row["by"],
            "source": row.get("source", "outputs"),
            "alone_only": row.get("trainings") == "singles",
            "halved": row.get("trainings") == "halves",
            "ranks_only": row.get("trainings") == "leave-one-out",
            "seeds": seeds,
            "judged": row["by"].startswith(CLIENTS_PREFIX),
            "alone": _column(rows, "alone"),
            "together": _number(row.get("together")),
            "accuracy": _number(row.get("together")),
            "majority": row["majority"],
            "cases": validation.get("rows"),
            **doubt_facts(record["events"], record["clients"]),
        },
        degrees_of_freedom=seed_freedom(seeds),
        seed_covariance=matrix_of([row.get(SEED_COVARIANCE, "") for row in rows]),
        case_covariance=matrix_of([row.get(CASE_COVARIANCE, "") for row in rows]),
    )


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [_number(row.get(name)) for row in rows]


def _number(cell: str | float | None) -> float:
    """Return a cell's number, NaN if it is empty or there is none."""
    if cell is None:
        return NAN
    return number_or_nan(str(cell))


def retrained_from(row: Mapping[str, Any], planned: int | None) -> str:
    """Describe how the values in a row of ``retrained.csv`` arose: coalitions, seeds, rounds and changed settings."""
    seeds = row["seeds"].split()
    trainings = WORDS["trainings"].get(row.get("trainings"))  # None in older files
    changes = row.get("changed")
    parts = [trainings, *_seeds_and_rounds(seeds, [row["rounds"]], planned), changes]
    return ", ".join(filter(None, parts))


def _seeds_and_rounds(
    seeds: Sequence[str],
    rounds: Sequence[float],
    planned: int | None,
) -> list[str]:
    """Describe seeds and rounds, as in "seeds 0 and 1" and "18 to 20 of 20 rounds"."""
    descriptions = []
    if len(seeds) == 1:
        descriptions.append(f"seed {seeds[0]}")
    elif seeds:
        descriptions.append(f"seeds {joined(seeds)}")

    fewest_rounds = min(rounds)
    most_rounds = max(rounds)
    count = f"{fewest_rounds:g}"
    if fewest_rounds < most_rounds:
        count += f" to {most_rounds:g}"
    if planned and planned > 0:
        count += f" of {planned}"
    descriptions.append(f"{count} rounds")
    return descriptions
