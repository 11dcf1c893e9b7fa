"""Evaluators for tasks other than classification, tried before the first round."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import lightning as L
from torchmetrics import Metric

from flsv._lightning.validation import keep_batches
from flsv.games.evaluation.metric_of_outputs import MetricOfOutputs
from flsv.games.evaluation.validated import LoggedValues, ValidatedModels
from flsv.games.performance import ModelScore
from flsv.parameters import ParameterSpace
from flsv.seeding import isolated_rngs


def validated_models(
    trainer: L.Trainer,
    space: ParameterSpace,
    loaders: Any,
    measures: Mapping[str, Any],
    *,
    seed: int = 0,
) -> dict[Hashable, ValidatedModels]:
    """Evaluators for all that is not measured on logits alone, after a trial on the first batches.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors.
        loaders: one or several validation loaders; they are read if there is anything to evaluate.
        measures: who asks, for messages, to what for; see :mod:`flsv.games.performance`.
        seed: of what a validation draws.

    Returns:
        By :attr:`flsv.games.ModelScore.evaluator`.

    Raises:
        ConfigurationError: something cannot be had: a name that is not logged, outputs that a metric does not take.
    """
    asked = {name: measure for name, measure in measures.items() if isinstance(measure, ModelScore)}
    if not asked:
        return {}
    with isolated_rngs(seed, "utility batches"):
        kept = keep_batches(trainer, loaders)
    found: dict[Hashable, ValidatedModels] = {}
    logged = {name: measure.of for name, measure in asked.items() if isinstance(measure.of, str)}
    if logged:
        names = list(dict.fromkeys(logged.values()))
        asking = {name: ", ".join(who for who, each in logged.items() if each == name) for name in names}
        found["logged"] = LoggedValues(trainer, space, kept, names=names, seed=seed, asking=asking)
    for name, measure in asked.items():
        if isinstance(measure.of, Metric):
            found[measure.evaluator] = MetricOfOutputs(trainer, space, kept, metric=measure.of, seed=seed, asking=name)
    for evaluator in found.values():
        evaluator.attempt()
    return found
