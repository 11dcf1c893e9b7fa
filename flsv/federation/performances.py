"""The global model's performance at the start and at the end of a run, by the measures of the metrics."""

from __future__ import annotations

import math
from typing import Any

from flsv.federation.run import FederationRun
from flsv.games import ModelScore
from flsv.games.performance import title_of


def performances(run: FederationRun) -> dict[str, dict[str, Any]]:
    """Compute the global model's performance, once for each metric that evaluates coalitions.

    Returns:
        ``{metric: {"by", "value", "majority"}}``: the name of the metric's performance measure; the performance, None
        if it is not finite; the accuracy of an answer that is always the most frequent class, None by another measure.
    """
    model, scores, found = run.state.model(), dict[Any, Any](), {}
    for name, measure in run.metrics.performances.items():
        other = measure if isinstance(measure, ModelScore) else None
        key = None if other is None else other.evaluator
        if key not in scores:
            assert run.server.games is not None
            scores[key] = run.server.games.evaluator_of(measure)(model[None])
        value = float(scores[key].value(measure if other is None else other.name).mean())
        support = scores[key].support if measure == "accuracy" else None
        found[name] = {
            "by": title_of(measure, run.engine.data.positive_class),
            "value": value if math.isfinite(value) else None,
            "majority": None if support is None else float(support.max() / support.sum()),
        }
    return found


def learning_record(run: FederationRun) -> dict[str, Any]:
    """Return entries of ``run.json`` after the last round: ``"paid_in"``, by metric the performance at the run's start
    and end, the majority class's accuracy, and the sum of the clients' values."""
    values = run.metrics.contributions
    return {
        "paid_in": {
            name: {
                "by": told["by"],
                "start": run.state.start.get(name),
                "end": told["value"],
                "majority": told["majority"],
                "sum": float(values[name].nansum()) if name in values else None,
            }
            for name, told in performances(run).items()
        }
    }
