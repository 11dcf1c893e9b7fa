"""The global model's performance at the start and the end of a run."""

from __future__ import annotations

import math
import warnings
from typing import Any

from flsv.federation.run import FederationRun
from flsv.metrics import ContributionMetric
from flsv.scores.performance import ModelScore, title_of, undefined_untrained
from flsv.utilities.errors import ConfigurationError


def untrained_scores(run: FederationRun) -> dict[str, float]:
    """Return the untrained model's performance by each metric's measure, ``{metric: score}``.

    Raises:
        ConfigurationError: a score is not finite, so values would not be finite, either.
    """
    scores = {}
    for name, performance in performances(run).items():
        score = performance["value"]
        if score is None:
            raise _undefined_score(run, name)
        scores[name] = score
    return scores


def _undefined_score(run: FederationRun, name: str) -> ConfigurationError:
    """Return the error for a metric's measure that is not defined for the untrained model, with its outputs."""
    assert run.server.games is not None
    measure = run.metrics.performances[name]
    evaluate = run.server.games.evaluator_of(measure)
    models = run.state.model()[None]  # one model, [1, P]
    outputs = evaluate(models, keep=True).outputs
    return undefined_untrained(f"metric {name!r}", measure, outputs)


def performances(run: FederationRun) -> dict[str, dict[str, Any]]:
    """Return the global model's performance by each metric's measure, ``{metric: {"value": ...}}``."""
    # "value" is None if it is not finite. "majority" is the accuracy of always predicting the most frequent class, None
    # for other measures.
    model = run.state.model()
    scores_by_evaluator: dict[Any, Any] = {}
    entries = {}
    for name, measure in run.metrics.performances.items():
        if isinstance(measure, ModelScore):
            evaluator = measure.evaluator_key
            score_name = measure.name
        else:  # the name of a classifier's score
            evaluator = None
            score_name = measure
        if evaluator not in scores_by_evaluator:
            assert run.server.games is not None
            score_models = run.server.games.evaluator_of(measure)
            scores_by_evaluator[evaluator] = score_models(model[None])

        scores = scores_by_evaluator[evaluator]
        value = float(scores.value(score_name).mean())
        majority = None
        num_cases = None
        if measure == "accuracy" and scores.support is not None:
            support = scores.support
            majority = float(support.max() / support.sum())
            num_cases = int(support.sum())
        entries[name] = {
            "by": title_of(measure, run.engine.data.positive_class),
            "value": value if math.isfinite(value) else None,
            "majority": majority,
            "cases": num_cases,
        }
    return entries


def learning_record(run: FederationRun) -> dict[str, Any]:
    """Return the items of ``run.json`` about the performance at the run's start and end."""
    contributions = run.metrics.contributions
    record_by_metric: dict[str, dict[str, Any]] = {}
    try:
        performances_at_end = performances(run)
    except Exception as error:  # the run has ended, and its values are valid
        warnings.warn(
            f"the model could not be scored at the end of the run: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        performances_at_end = {}
    for name, performance in performances_at_end.items():
        sum_of_values = None
        if name in contributions and not contributions[name].isnan().all():
            sum_of_values = float(contributions[name].nansum())
        record_by_metric[name] = {
            "by": performance["by"],
            "start": run.state.start.get(name),
            "end": performance["value"],
            "majority": performance["majority"],
            "cases": performance["cases"],
            "sum": sum_of_values,
        }
        metric = run.metrics.metrics[name]
        if isinstance(metric, ContributionMetric):
            with run.metrics.keeping_run([name], "its record"):
                record_by_metric[name].update(metric.payment_record())
    # By metric: the performance at the run's start and end, the accuracy of always predicting the most frequent class,
    # the number of samples, the sum of values, and the metric's payment record.
    record: dict[str, Any] = {"paid_in": record_by_metric}
    if run.metrics.missing:
        record["missing"] = dict(run.metrics.missing)
    return record
