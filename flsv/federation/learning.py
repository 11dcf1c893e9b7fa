"""The global model's performance at the start and the end of a run."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from flsv.federation.run import FederationRun
from flsv.scores.performance import Measure, title_of, undefined_untrained
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
    # Several measures may be scores of one evaluator, which evaluates the model once.
    scores_by_evaluator: dict[Any, Any] = {}
    performance_by_metric = {}
    for metric_name, measure in run.metrics.performances.items():
        assert run.server.games is not None
        evaluate = run.server.games.evaluator_of(measure)
        if evaluate not in scores_by_evaluator:
            models = run.state.model()[None]  # one model, [1, P]
            scores_by_evaluator[evaluate] = evaluate(models)

        scores = scores_by_evaluator[evaluate]
        value = float(scores.value(measure.name).mean())
        performance_by_metric[metric_name] = {
            "by": title_of(measure, run.engine.data.positive_class),
            "value": value if math.isfinite(value) else None,
            **_majority(measure, scores.support),
        }
    return performance_by_metric


def _majority(measure: Measure, support: Tensor | None) -> dict[str, Any]:
    """Return the accuracy of always predicting the most frequent class, and the number of samples, None for other
    measures."""
    if measure.called != "accuracy" or support is None:
        return {"majority": None, "cases": None}
    return {"majority": float(support.max() / support.sum()), "cases": int(support.sum())}


def learning_record(run: FederationRun) -> dict[str, Any]:
    """Return the items of ``run.json`` about the performance at the run's start and end."""
    try:
        performances_at_end = performances(run)
    except Exception as error:  # the run has ended, and its values are valid
        warnings.warn(
            f"the model could not be scored at the end of the run: {type(error).__name__}: {error}",
            stacklevel=2,
        )
        performances_at_end = {}
    record_by_metric = {
        name: _record_of_metric(run, name, performance)
        for name, performance in performances_at_end.items()
    }
    record: dict[str, Any] = {"paid_in": record_by_metric}
    if run.metrics.missing:
        record["missing"] = run.metrics.missing
    return record


def _record_of_metric(run: FederationRun, name: str, performance: dict[str, Any]) -> dict[str, Any]:
    """Return a metric's performance at the run's start and end, its sum of values, and its payment record."""
    values = run.metrics.values.get(name)
    sum_of_values = None
    if values is not None and not values.value.isnan().all():
        sum_of_values = float(values.value.nansum())
    start = run.state.untrained_scores.get(name)
    end = performance["value"]
    facts: dict[str, Any] = {}
    if values is not None:
        with run.metrics.keeping_run([name], "its record"):
            facts = values.record()
    ends = facts.pop("ends", None)
    if ends is not None:
        # Hooks may change between two validations what a model is scored by, such as an average of weights. The gain
        # is that which the values distribute.
        measure = run.metrics.performances[name]
        start, end = measure.utility(torch.tensor(ends, dtype=torch.float64)).tolist()
    return {
        "by": performance["by"],
        "start": start,
        "end": end,
        "majority": performance["majority"],
        "cases": performance["cases"],
        "sum": sum_of_values,
        **facts,
    }
