"""The evaluators that metrics ask for, made and tried before the first round."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torchmetrics import Metric

from flsv._lightning.evaluation import on_device
from flsv._lightning.validation import KeptBatches, ValidationRun, keep_batches
from flsv.core.parameter_space import ParameterSpace
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.performance import ModelScore
from flsv.games.validated_models import ValidatedModels, fresh_copy
from flsv.games.vector_evaluator import VectorEvaluator
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.seeding import isolated_rngs

#: Names of values of which less is better.
LESS = re.compile("loss|err|mse|mae|perplexity", re.IGNORECASE)


def make_evaluators(
    trainer: L.Trainer,
    space: ParameterSpace,
    loaders: Any,
    measures: Mapping[str, Any],
    *,
    seed: int = 0,
) -> dict[Hashable, VectorEvaluator]:
    """Make the evaluators of everything but classifiers' scores, and try them on the first batches.

    Args:
        trainer: of the fit, with its module on its device.
        space: the map between the module and vectors.
        loaders: one or several validation loaders; they are read if there is anything to evaluate.
        measures: name of the metric, for messages, to its performance measure; see :mod:`flsv.games.performance`.
        seed: of the random numbers that a validation draws.

    Returns:
        :attr:`flsv.games.ModelScore.evaluator` to the evaluator.

    Raises:
        ConfigurationError: a measure that is not available: a name that is not logged, outputs that a metric does not
            take.
    """
    model_scores = {name: measure for name, measure in measures.items() if isinstance(measure, ModelScore)}
    if not model_scores:
        return {}
    with isolated_rngs(seed, "utility batches"):
        batches = keep_batches(trainer, loaders)
    evaluators: dict[Hashable, VectorEvaluator] = {}
    logged = {name: measure.of for name, measure in model_scores.items() if isinstance(measure.of, str)}
    if logged:
        names = list(dict.fromkeys(logged.values()))
        asking = {name: ", ".join(who for who, each in logged.items() if each == name) for name in names}
        derived = [measure.name for measure in model_scores.values() if measure.derived]
        by_validation = ValidatedModels(trainer, space, batches, names=names, derived=derived, asking=asking, seed=seed)
        by_validation.attempt()
        evaluators["logged"] = by_validation
    for name, measure in model_scores.items():
        if isinstance(measure.of, Metric):
            evaluators[measure.evaluator] = ModelEvaluator(
                trainer.lightning_module,
                space,
                _pairs(trainer, batches, name),
                metric=measure.of,
                context=trainer.strategy.precision_plugin.forward_context,
                seed=seed,
                asking=name,
            )
    return evaluators


def suggest_logged_value(trainer: L.Trainer, space: ParameterSpace, loaders: Any) -> str:
    """Write the advice, for a module whose outputs cannot be scored, to measure a value that the module logs in
    validation instead, with the names that it logs.
    """
    module = trainer.lightning_module
    try:
        with isolated_rngs(0, "utility"), torch.no_grad():
            first = [KeptBatches(islice(loader, 1)) for loader in keep_batches(trainer, loaders)]
            own = fresh_copy(module, space, space.read(module), {})
            logged = sorted(ValidationRun(trainer, own, first).logged())
    except Exception:  # any error of a validation: the caller raises the error of the outputs
        logged = []
    name = next((each for each in logged if not LESS.search(each)), logged[0] if logged else "val_loss")
    mode = "min" if LESS.search(name) else "max"
    what = f"what the module logs, {listed(logged, show=repr)}" if logged else "a value that validation_step logs"
    return (
        f" Or measure by {what}, of any batches and outputs: performance={name!r}, mode={mode!r} of a game; a loss is "
        "named by loss=... of GradientAgreement."
    )


def evaluator_on(
    evaluator: VectorEvaluator,
    trainer: L.Trainer,
    loader: Any,
    private: Callable[[], Mapping[str, Tensor]] | None = None,
) -> VectorEvaluator:
    """Return an evaluator of the same models as one of :func:`make_evaluators`, on other batches.

    Args:
        evaluator: of :func:`make_evaluators`.
        trainer: of the fit.
        loader: the other batches.
        private: returns the state of the module that no vector holds, by name; None: the module's own.
    """
    batches = keep_batches(trainer, loader)
    if isinstance(evaluator, ModelEvaluator):
        return evaluator.on(_pairs(trainer, batches, "what clients are asked for"), private)
    assert isinstance(evaluator, ValidatedModels)
    return evaluator.on(batches, private)


def _pairs(trainer: L.Trainer, loaders: list[KeptBatches], asking: str) -> Iterator[tuple[Any, Any]]:
    """Yield the batches ``(x, y)`` as the trainer's module would get them in validation."""
    try:
        for index, loader in enumerate(loaders):
            yield from on_device(trainer, loader, index)
    except ConfigurationError as error:
        raise ConfigurationError(f"{asking}: a torchmetrics metric is given forward(x) and y. {error}") from error
