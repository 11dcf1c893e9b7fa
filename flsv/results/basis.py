"""Basis: the values by which clients are ordered and paid, one per client, and the inputs of the verdict on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pandas
import torch
from pandas import DataFrame
from torch import Tensor

from flsv.core import IntervalKind
from flsv.functional.intervals import seed_covariance, t_quantile
from flsv.functional.joint_shares import CaseValues, ValueErrors, joint_intervals
from flsv.results.folder import CASE_VALUES
from flsv.results.reading import Run, final_values
from flsv.results.text import (
    MESSAGES,
    design_in_words,
    is_fraction,
    joined,
    nearest_to_retraining_first,
    shares_in,
    titled,
)
from flsv.results.verdict import (
    PaymentInputs,
    Verdict,
    inputs_of_events,
    performance_inputs,
    verdict_of,
)
from flsv.utilities.choices import Negatives
from flsv.utilities.csv_files import NAN
from flsv.utilities.display import INTERVAL_LEVEL
from flsv.utilities.errors import ConfigurationError
from flsv.values.coalition_files import COALITIONS_FOLDER, read_untrained

#: Name of the values by retraining.
RETRAINED = "retrained"
#: The metric whose values they are, in the runs of ``flsv retrain``.
RETRAINED_METRIC = "value"
#: Largest deviation of the values' sum from the gain, as a fraction of the gain, with which steps are drawn.
MAX_DEVIATION_OF_SUM = 0.01


@dataclass(frozen=True)
class Basis:
    """One value per client, by which clients are ordered and a budget is shared out."""

    #: The name of a metric, or `"retrained"`.
    key: str
    #: The values' name as the page shows it.
    title: str
    #: A description of the runs that the values come from: coalitions, seeds, rounds and changed settings.
    origin: str
    #: The same without seeds, from which the others' parts of the data can be derived, and without settings, which may
    #: name other clients.
    origin_for_one: str
    #: A row per client with its `value`, NaN without one, and the ends `low` and `high` of its interval over seeds and
    #: validation samples, or over seeds if it is not known how much values depend on the samples. For values of one
    #: seed from metrics that train no coalitions, the ends are NaN: such intervals are too narrow to contain the mean
    #: over many seeds often enough.
    estimates: DataFrame
    #: How these intervals were computed from one seed's or several seeds' values.
    interval_kind: IntervalKind
    #: The facts that decide whether a budget may be shared out by the values.
    inputs: PaymentInputs
    client_names: Sequence[str] = ()
    #: The scores of the untrained model and of the model of all clients, NaN if they are not known.
    initial_score: float = NAN
    final_score: float = NAN
    #: The standard deviation of the score between untrained models with different initial weights, NaN if not known.
    untrained_deviation: float = NAN

    @property
    def values(self) -> Sequence[float]:
        """Return the clients' values ``[n]``."""
        return self.inputs.values

    @property
    def by(self) -> str:
        """Return the name of the performance that the values distribute among the clients, or "" without one."""
        return self.inputs.by

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
        inputs = replace(self.inputs, accepts_partners=accepts_partners)
        return verdict_of(inputs, rule)

    def for_one_client(self) -> Basis:
        """Return these values with a description that tells one client nothing about the others."""
        return replace(self, origin=self.origin_for_one)

    @property
    def lines(self) -> list[str]:
        """Return a sentence on the intervals and the verdict, as lines for a terminal."""
        return [self.sentence_on_intervals, *self.verdict().lines]

    @property
    def has_intervals(self) -> bool:
        """Return whether the interval of any value is known."""
        return bool(self.estimates["low"].notna().any())

    @property
    def has_standard_errors(self) -> bool:
        """Return whether intervals are known, and standard errors with them, by which shares have intervals, too."""
        return self.has_intervals and self.interval_kind.freedom is not None

    def _repr_html_(self) -> str:
        """Return the values and the verdict on them as HTML, for a notebook."""
        verdict = self.verdict()
        table = self.estimates.set_axis(list(self.client_names), axis=0)
        reasons = "".join(f"<li>{escape(text)}</li>" for text in verdict.reasons.values())
        return (
            f"<p>{escape(self.title)}</p>{table.to_html()}"
            f"<p>{escape(verdict.title)}</p><ul>{reasons}</ul>"
        )

    @property
    def adds_up(self) -> bool:
        """Return whether the values sum up to the difference between the untrained and the final model's scores."""
        total = self.final_score - self.initial_score
        sum_of_values = math.fsum(self.values)
        return abs(sum_of_values - total) <= MAX_DEVIATION_OF_SUM * abs(total)  # False for NaN

    @property
    def sentence_on_intervals(self) -> str:
        """Return a sentence that says what the intervals contain, or why there are none."""
        sentences: Mapping[str, str] = MESSAGES["intervals"]
        if not self.has_intervals:
            return sentences["none"]
        if not self.has_standard_errors:
            return sentences["ends"]
        if _has_joint_errors(self.inputs.errors, torch.tensor(self.values)):
            return sentences["seeds_and_samples"]
        return sentences["seeds"]


def basis_of(run: Run, values_name: str | None = None) -> Basis:
    """Return the values by which to share a budget out: those of this name, or those of :func:`preferred_basis`.

    Raise ConfigurationError if there are no such values.
    """
    candidates = _metrics_to_share_by(run)
    if run.retrained is not None:
        candidates.append(RETRAINED)
    if values_name not in (None, *candidates):
        available = joined(candidates) or "no metric"
        raise ConfigurationError(
            f"Budget(by={values_name!r}): {run.folder} has values by {available}. flsv retrain RUN adds {RETRAINED}."
        )
    basis = preferred_basis(run) if values_name is None else _basis_by_name(run, values_name)
    if basis is None:
        raise ConfigurationError(
            f"{run.folder}: no contribution was measured, so a budget cannot be shared out. Train with a metric."
        )
    return basis


def preferred_basis(run: Run) -> Basis | None:
    """Return the values that pages and terminals show: by retraining, otherwise by the most suitable metric.

    Args:
        run: a run's folder as :func:`flsv.results.open_run` reads it.

    Returns:
        The values with their verdict. A notebook shows both. None if the run has no metric.

    Example:
        >>> from flsv.results import open_run, preferred_basis
        >>> preferred_basis(open_run("lightning_logs/version_0")).verdict().text  # doctest: +SKIP
        'These values can be a basis for payment: models were also trained without some of the partners, with 3 seeds.'
    """
    if run.retrained is not None:
        return basis_by_retraining(run)
    suitable = [metric for metric in run.metrics if run.metric_info(metric)["to_pay_by"]]
    class_by_metric = {metric: run.metric_info(metric)["class"] for metric in suitable}
    # The suitable one nearest to retraining, else any to share by, else any metric.
    preferred = [
        *nearest_to_retraining_first(class_by_metric),
        *_metrics_to_share_by(run),
        *run.metrics,
    ]
    measured = [metric for metric in preferred if metric in run.measured]
    metrics = [*measured, *preferred]
    return basis_by_metric(run, metrics[0]) if metrics else None


def _basis_by_name(run: Run, name: str) -> Basis:
    if name == RETRAINED:
        return basis_by_retraining(run)
    return basis_by_metric(run, name)


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


def basis_by_metric(run: Run, metric: str) -> Basis:
    """Return a metric's values in a run, or their means over its repetitions."""
    estimates = run.estimates(metric)
    interval_kind = run.interval_kind(metric)
    title = f"{metric}, mean of {run.seeds} runs" if run.seeds > 1 else metric
    errors = _errors_by_metric(run, metric, estimates, interval_kind)
    performance = run.performances.get(metric, {})
    trained_coalitions = design_in_words(run.design(metric))
    inputs = PaymentInputs(
        values=estimates["value"].tolist(),
        errors=errors,
        **_payment_inputs(run, metric),
    )
    return Basis(
        metric,
        title,
        origin=_listed(trained_coalitions, _seeds(run), _rounds(run)),
        origin_for_one=_listed(trained_coalitions, _rounds(run)),
        estimates=_with_joint_intervals(estimates, errors),
        interval_kind=interval_kind,
        inputs=inputs,
        client_names=run.client_names,
        initial_score=_number(performance.get("start")),
        final_score=_number(performance.get("end")),
        untrained_deviation=_untrained_deviation(run, performance.get("by", "")),
    )


def _untrained_deviation(run: Run, score: str) -> float:
    """Return the standard deviation of a score between untrained models, the mean over runs. NaN if it is unknown."""
    name, _, _ = score.partition(" of ")
    deviations = []
    for one_run in run.runs:
        utilities_by_measure = read_untrained(one_run.folder / COALITIONS_FOLDER)
        for measure, utilities in utilities_by_measure.items():
            measured_score, _, _ = measure.partition(" (")  # without the mode of a logged value
            if measured_score == name and utilities.shape[1] == 1:
                deviations.append(float(utilities.std()))
    return fmean(deviations) if deviations else NAN


def _payment_inputs(run: Run, metric: str) -> dict[str, Any]:
    """Return the inputs of :class:`PaymentInputs` besides the values and their errors."""
    metric_info = run.metric_info(metric)
    return {
        "seeds": run.seeds,
        "unsuitable": "" if metric_info["to_pay_by"] else metric,
        "of_rounds": run.record.get("of_rounds", ""),
        "stopped_after": "" if run.ended else run.rounds_text,
        "evaluated_by_clients": metric_info.get("evaluators") == "clients",
        "margin": _margin_of_best_alone(run, metric),
        "source": "scores" if metric_info["class"] == "ShadowShapley" else "none",
        "validation_samples": _num_validation_samples(run, metric),
        "perfect_score": _perfect_score_of_table(run, metric),
        **performance_inputs(run.record, metric),  # replaces the default above
        **inputs_of_events(run.record["events"], run.client_names),
    }


def _num_validation_samples(run: Run, metric: str) -> int | None:
    """Return the number of samples on which the server scored models for a metric, None if it is not known."""
    is_by_server = run.metric_info(metric).get("evaluators") != "clients"
    if metric not in run.performances or not is_by_server:
        return None
    return (run.record.get("validation") or {}).get("rows")


def _perfect_score_of_table(run: Run, metric: str) -> str:
    """Return the name of the score by which the model of all is perfect on a table, else ""."""
    performance = run.performances.get(metric, {})
    is_table = run.record.get("dictionary") is not None
    final_score = performance.get("end")
    if not is_table or final_score is None:
        return ""
    is_perfect = is_fraction(performance["by"]) and final_score >= 1
    return titled(performance["by"]) if is_perfect else ""


def _margin_of_best_alone(run: Run, metric: str) -> float:
    """Return half the width of the 90 % interval of the score of all together minus that of the best client alone.

    The errors of a score from 0 to 1 on V validation samples have at most the variance p (1 - p) / V. Those of seeds
    follow from the difference in each seed.
    """
    performance = run.performances.get(metric, {})
    alone = performance.get("alone") or []  # a score of each client
    together = performance.get("together")
    if not alone or together is None:
        return 0.0
    margin_of_samples = 0.0
    num_samples = (run.record.get("validation") or {}).get("rows")
    if num_samples and is_fraction(performance["by"]):
        standard_error = math.sqrt(together * (1 - together) / num_samples)
        margin_of_samples = float(t_quantile(INTERVAL_LEVEL)) * standard_error
    if run.seeds == 1:
        return margin_of_samples

    best_client = alone.index(max(alone))
    differences = []
    for seed_run in run.runs:
        scores = seed_run.performances[metric]
        differences.append(scores["together"] - scores["alone"][best_client])
    standard_error = stdev(differences) / math.sqrt(run.seeds)
    margin_of_seeds = float(t_quantile(INTERVAL_LEVEL, run.seeds - 1)) * standard_error
    return math.hypot(margin_of_samples, margin_of_seeds)


def seed_summary(run: Run, metrics: Iterable[str] | None = None) -> DataFrame:
    """Summarize the last values of a run's repetitions with different seeds, in a row per metric and client."""
    summaries = [_summary_by_metric(run, metric) for metric in metrics or run.metrics]
    return pandas.concat(summaries, ignore_index=True)


def _summary_by_metric(run: Run, metric: str) -> DataFrame:
    values = final_values(run.runs, metric)
    basis = basis_by_metric(run, metric)
    summary = DataFrame(
        {
            "metric": metric,
            "client": values.columns,
            "client_name": run.client_names,
            "runs": values.count(),
            "mean": basis.estimates["value"],
            "std": values.std(),
            "low": basis.estimates["low"],
            "high": basis.estimates["high"],
            "share": NAN,
            "design": run.design(metric),
        }
    )
    only_ranks = run.performances.get(metric, {}).get("ranks_only")
    if not basis.inputs.unsuitable and not only_ranks:
        summary["share"] = shares_in(summary["mean"])
    return summary


def _number(recorded: float | None) -> float:
    return NAN if recorded is None else recorded


def _with_joint_intervals(estimates: DataFrame, errors: Sequence[ValueErrors]) -> DataFrame:
    """Return the values with intervals that combine all sources of their errors, if several are known."""
    values = torch.tensor(estimates["value"].to_numpy("float64"))
    if not _has_joint_errors(errors, values):
        return estimates
    low, high = joint_intervals(values, errors)
    return estimates.assign(low=low.tolist(), high=high.tolist())


def _has_joint_errors(errors: Sequence[ValueErrors], values: Tensor) -> bool:
    """Return whether values ``[n]`` have several sources of errors, of which each is known for all that are not NaN."""
    has_value = ~values.isnan()
    if len(errors) == 1 or not has_value.any():
        return False
    covariances = [source.covariance[has_value][:, has_value] for source in errors]
    return all(covariance.isfinite().all() for covariance in covariances)


def _errors_by_metric(
    run: Run, metric: str, estimates: DataFrame, interval_kind: IntervalKind
) -> list[ValueErrors]:
    """Return the sources of the errors of a metric's values: the seeds, and the validation samples if their part is
    known.

    Without trained coalitions the errors of two values are independent, and follow from the values' intervals. They are
    NaN if the intervals are not known, or do not tell standard errors.
    """
    errors_by_source = [_errors_of_seeds(run, metric, estimates, interval_kind)]
    covariance_of_samples = _sample_covariance(run.runs, metric)
    if covariance_of_samples is not None:
        errors_by_source.append(ValueErrors(covariance_of_samples))
    return errors_by_source


def _errors_of_seeds(
    run: Run, metric: str, estimates: DataFrame, interval_kind: IntervalKind
) -> ValueErrors:
    low = torch.tensor(estimates["low"].to_numpy("float64"))
    high = torch.tensor(estimates["high"].to_numpy("float64"))
    standard_errors = interval_kind.standard_error(low, high)
    if run.seeds > 1 and run.metric_info(metric)["class"] == "ShadowShapley":
        values = torch.tensor(final_values(run.runs, metric).to_numpy("float64"))  # [seeds, n]
        covariance = seed_covariance(values, standard_errors)
    else:  # the values' errors count as independent
        covariance = standard_errors.square().diag()
    return ValueErrors(covariance, interval_kind.common_freedom)


def _sample_covariance(runs: Sequence[Run], metric: str) -> Tensor | None:
    """Return the covariance of mean values over all runs between draws of validation samples, or None."""
    values_by_run = []
    for run in runs:
        values_by_sample = _values_by_sample(run, metric)
        if values_by_sample is None:
            return None
        values_by_run.append(values_by_sample)
    mean_values = torch.stack([run_values.values for run_values in values_by_run]).mean(0)
    return replace(values_by_run[0], values=mean_values).covariance()


def _values_by_sample(run: Run, metric: str) -> CaseValues | None:
    """Return a metric's values on each validation sample, None if they are not known."""
    performance = run.performances.get(metric, {})
    if "case_values" in performance:  # of a run that has just ended, and may write no files
        return performance["case_values"]
    return read_case_values(run.folder, metric)


def basis_by_retraining(run: Run) -> Basis:
    """Return the values of the runs by which ``flsv retrain`` has trained a run's coalitions."""
    assert run.retrained is not None
    basis = basis_by_metric(run.retrained, RETRAINED_METRIC)
    inputs_of_run = inputs_of_events(run.record["events"], run.client_names)
    # Incidents stay those of the repetitions, in which a site may have sent what it did not send in the run.
    payment_inputs = replace(
        basis.inputs,
        validation_copies=inputs_of_run["validation_copies"],
        shared_samples=inputs_of_run["shared_samples"],
        data_warnings=inputs_of_run["data_warnings"],
        # A repetition may have taken coalitions over from the run.
        unlike_run=inputs_of_run["unlike_run"] or basis.inputs.unlike_run,
    )
    return replace(
        basis,
        key=RETRAINED,
        title=f"retraining, measured by {titled(basis.by)}",
        origin=_listed(basis.origin, run.changed_settings),
        inputs=payment_inputs,
    )


def bases_by_other_scores(run: Run) -> list[Basis]:
    """Return the values by retraining for each score but that of :func:`basis_by_retraining`."""
    if run.retrained is None:
        return []
    bases = []
    for metric in run.retrained.metrics:
        if metric != RETRAINED_METRIC:
            basis = basis_by_metric(run.retrained, metric)
            bases.append(replace(basis, key=f"{RETRAINED} ({titled(basis.by)})"))
    return bases


def _listed(*descriptions: str) -> str:
    return ", ".join(filter(None, descriptions))


def _seeds(run: Run) -> str:
    """Describe the seeds of a run or of several, as in "seeds 0 and 1"."""
    seeds = []
    for one_run in run.runs:
        seed = one_run.record["settings"].get("federation_seed")
        if seed is not None:  # rounds that other frameworks ran have no seed
            seeds.append(int(seed))
    if not seeds:
        return ""
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {joined(map(str, sorted(seeds)))}"


def _rounds(run: Run) -> str:
    """Describe the rounds of a run or of several, as in "18 to 20 of 20 rounds"."""
    shortest_run = min(run.runs, key=lambda one_run: one_run.rounds)
    longest_run = max(run.runs, key=lambda one_run: one_run.rounds)
    rounds = longest_run.rounds_text
    if shortest_run.rounds < longest_run.rounds:
        rounds = f"{shortest_run.rounds} to {rounds}"
    return rounds


def read_case_values(folder: Path, metric: str) -> CaseValues | None:
    """Read a metric's values on each validation sample, or return None if a run has written none."""
    path = folder / CASE_VALUES
    if not path.is_file():
        return None
    states: Any = torch.load(path, weights_only=True)
    if metric not in states:
        return None
    return CaseValues(**states[metric])
