"""Functions that create the evaluators of performance measures, and run them once to find errors before training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn

from flsv._lightning.evaluation import all_on_device, on_device
from flsv._lightning.validation_run import StoredBatches, store_batches
from flsv.core.parameter_space import ParameterSpace
from flsv.games.copy_evaluator import CopyEvaluator
from flsv.games.model_evaluator import ModelEvaluator
from flsv.games.module_copies import ModuleCopies, ScoringEffects
from flsv.games.validated_models import ValidatedModels
from flsv.games.validation_batches import checked_logits, checked_pair, no_forward
from flsv.games.vector_evaluator import VectorEvaluator
from flsv.scores.performance import Measure, Measures
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import isolated_rngs

if TYPE_CHECKING:
    from flsv.games.client_evaluation import ClientEvaluator

#: Advice at the end of errors about modules whose outputs cannot be scored.
LOGGED_VALUE_ADVICE = (
    " Or choose a value that validation_step logs as the performance, such as performance='val_loss', mode='min', or "
    "as the loss (loss='val_loss'). This works with batches and outputs of any form."
)


def make_evaluators(
    trainer: L.Trainer,
    space: ParameterSpace,
    loaders: Any,
    measures: Measures,
    *,
    num_classes: int | None = None,
    seed: int = 0,
    effects: ScoringEffects | None = None,
    make_client_evaluator: Callable[[Measure], ClientEvaluator] | None = None,
) -> list[VectorEvaluator]:
    """Create the evaluators of all measures, and run each once to find errors.

    Args:
        trainer: the module's Trainer.
        space: the map between the module and vectors.
        loaders: the validation loaders.
        measures: ``{name of the metric that needs the measure: measure}``.
        num_classes: the number of classes. None: the number of logits.
        seed: seed of the random numbers that scoring draws.
        effects: the changes that scoring makes, if another evaluator has found them out. Then none is run here.
        make_client_evaluator: function that creates the evaluator by which clients score models.

    Returns:
        The evaluators, of which one :meth:`computes` each measure.
    """
    at_clients = []
    of_classifier = {}
    of_task = {}  # logged values and metrics
    for name, measure in measures.items():
        if measure.at_clients:
            at_clients.append(measure)
        elif measure.is_of_classifier:
            of_classifier[name] = measure.name
        else:
            of_task[name] = measure

    evaluators: list[VectorEvaluator] = []
    if of_task:
        evaluators += _evaluators_of_task(trainer, space, loaders, of_task, seed, effects)
    for measure in at_clients:
        if not any(evaluator.computes(measure) for evaluator in evaluators):
            assert make_client_evaluator is not None
            client_evaluator = make_client_evaluator(measure)
            client_evaluator.check(space.read(trainer.lightning_module))
            evaluators.append(client_evaluator)
    if of_classifier:
        evaluators.append(
            _evaluator_of_classifier(trainer, space, loaders, of_classifier, num_classes, effects)
        )
    return evaluators


def _evaluator_of_classifier(
    trainer: L.Trainer,
    space: ParameterSpace,
    loaders: Any,
    scores: Mapping[str, str],
    num_classes: int | None,
    effects: ScoringEffects | None,
) -> ModelEvaluator:
    """Create the evaluator of a classifier by ``scores``, ``{name of a metric: name of a score}``."""
    metric_names = ", ".join(scores)
    batches = all_on_device(trainer, loaders)
    try:
        evaluator = classifier_evaluator(trainer, space, batches, num_classes, effects)
    except ConfigurationError as error:
        raise ConfigurationError(f"{metric_names}: {error}{LOGGED_VALUE_ADVICE}") from error
    if effects is None and "negative_loss" in scores.values():
        evaluator.check_logits(metric_names)
    return evaluator


def _evaluators_of_task(
    trainer: L.Trainer,
    space: ParameterSpace,
    loaders: Any,
    measures: Measures,
    seed: int,
    effects: ScoringEffects | None,
) -> list[VectorEvaluator]:
    """Create one evaluator of all logged values, and one of each torchmetrics metric."""
    with isolated_rngs(seed, "utility batches"):
        batches = store_batches(trainer, loaders)
    evaluators: list[VectorEvaluator] = []
    if any(measure.is_logged for measure in measures.values()):
        evaluators.append(_validated_models(trainer, space, batches, measures, seed, effects))
    for name, measure in measures.items():
        if measure.is_logged:
            continue
        evaluator = _model_evaluator(
            trainer,
            space,
            _inputs_and_labels(trainer, batches, name),
            effects,
            metric=measure.of,
            logits=measure.logits,
            seed=seed,
            requester=name,
        )
        evaluators.append(evaluator)
    return evaluators


def _model_evaluator(
    trainer: L.Trainer,
    space: ParameterSpace,
    batches: Iterable[Any],
    effects: ScoringEffects | None,
    **options: Any,
) -> ModelEvaluator:
    return ModelEvaluator(
        trainer.lightning_module,
        space,
        batches,
        context=trainer.strategy.precision_plugin.forward_context,
        effects=effects,
        **options,
    )


def _validated_models(
    trainer: L.Trainer,
    space: ParameterSpace,
    batches: list[StoredBatches],
    measures: Measures,
    seed: int,
    effects: ScoringEffects | None,
) -> ValidatedModels:
    """Create the evaluator of the logged values among ``measures``, ``{name of a metric: measure}``."""
    # {name of a logged value: names of the metrics that score models by it}
    metrics_by_value: dict[str, list[str]] = {}
    for metric, measure in measures.items():
        if measure.is_logged:
            metrics_by_value.setdefault(measure.name, []).append(metric)
    evaluator = ValidatedModels(
        trainer,
        space,
        batches,
        names=list(metrics_by_value),
        derived=[measure.name for measure in measures.values() if measure.derived],
        requester={value: ", ".join(metrics) for value, metrics in metrics_by_value.items()},
        seed=seed,
        effects=effects,
    )
    if effects is None:
        evaluator.dry_run()
    return evaluator


def classifier_evaluator(
    trainer: L.Trainer,
    space: ParameterSpace,
    batches: Iterable[Any],
    num_classes: int | None,
    effects: ScoringEffects | None = None,
) -> ModelEvaluator:
    """Create the evaluator of a classifier of ``num_classes`` classes. None: the number of logits."""
    if num_classes is None:
        batches, num_classes = _with_counted_classes(trainer, batches)
    return _model_evaluator(trainer, space, batches, effects, num_classes=num_classes)


def _with_counted_classes(trainer: L.Trainer, batches: Iterable[Any]) -> tuple[Iterable[Any], int]:
    """Return all batches, and the number of logits for the first one."""
    remaining_batches = iter(batches)
    first_batches = list(islice(remaining_batches, 1))
    num_classes = 1  # if there is no batch, the evaluator raises an error
    for batch in first_batches:
        with dry_run(trainer) as module:
            num_classes = count_logits(module, batch, None)
    return chain(first_batches, remaining_batches), num_classes


@contextmanager
def dry_run(trainer: L.Trainer) -> Iterator[nn.Module]:
    """Yield a copy of a trainer's module for a dry run of its ``forward``, and restore the random generators
    afterwards.
    """
    precision = trainer.strategy.precision_plugin
    with torch.no_grad(), isolate_rng(), precision.forward_context():
        yield ModuleCopies(trainer.lightning_module).load().eval()


def count_logits(module: nn.Module, batch: Any, num_classes: int | None) -> int:
    """Return the number M of logits ``[B, M]`` that a module returns for a batch. Raise ConfigurationError if it
    returns something else.
    """
    x, y = checked_pair(batch, num_classes)
    try:
        logits = module(x)
    except Exception as error:
        raise no_forward(module, x, error) from error
    num_logits = checked_logits(logits, y, num_classes, allow_more_columns=True).shape[1]
    checked_pair(batch, num_logits)
    return num_logits


def evaluator_on(
    evaluator: VectorEvaluator,
    trainer: L.Trainer,
    loader: Any,
    private: Callable[[], Mapping[str, Tensor]] | None = None,
) -> VectorEvaluator:
    """Return an evaluator that computes the same scores as ``evaluator`` on the batches of ``loader``. ``private``
    returns the state-dict entries that model vectors do not contain.
    """
    assert isinstance(evaluator, CopyEvaluator)
    batches: Any = store_batches(trainer, loader)
    if isinstance(evaluator, ModelEvaluator):
        batches = _inputs_and_labels(
            trainer, batches, "a score that the server requests from clients"
        )
    return evaluator.with_batches(batches, private)


def _inputs_and_labels(
    trainer: L.Trainer, loaders: list[StoredBatches], requester: str
) -> Iterator[tuple[Any, Any]]:
    """Yield the loaders' batches as pairs ``(x, y)`` on the device, in the form that the module gets in validation."""
    try:
        for index, loader in enumerate(loaders):
            yield from on_device(trainer, loader, index)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"{requester}: a torchmetrics metric is updated with forward(x) and y. {error}"
        ) from error
