"""The scoring of models during a run: coalition games are made, and evaluations have a dry run before the first
round.

A run that scores no models does not load this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import lightning as L
from torch import nn

from flsv._lightning.evaluation import count_responses, on_device
from flsv.core.parameter_space import ParameterSpace
from flsv.core.responses import MIN_HELD_OUT
from flsv.data.groups import client_called
from flsv.games import CoalitionGames, ValidatedModels, VectorEvaluator
from flsv.games.client_evaluation import ClientEvaluator
from flsv.games.make_evaluators import count_logits, dry_run, make_evaluators
from flsv.games.module_copies import ModuleCopies
from flsv.games.output_metric import check_two_classes, needs_two_classes
from flsv.games.own_validation import OwnValidation
from flsv.scores import Measure
from flsv.scores.class_scores import ClassScores, plain_scores
from flsv.utilities.errors import ConfigurationError

if TYPE_CHECKING:
    from flsv.engines.engine import Engine


def coalition_games(
    engine: Engine, measures: Mapping[str, Any], evaluating: Mapping[str, Any]
) -> CoalitionGames | None:
    """Make the object that scores coalitions' models by ``measures``, ``{metric: measure}``, if any. Try the evaluations
    that clients will run for strategies and for the metrics ``evaluating``.
    """
    if engine.clients_here:
        every = engine.config.evaluation.every
        if every:
            test_loader = engine.data.client_loader(0, "test", shuffle=False)
            needed_by = f"ClientEvaluation(every={every})"
            try_forward(engine.trainer, test_loader, engine.data.known_num_classes, needed_by)
        for component in (*engine.config.strategies.values(), *evaluating.values()):
            _try_evaluation(engine, component)
    if not measures:
        return None

    evaluators = make_evaluators(
        engine.trainer,
        engine.space,
        engine.data.val_dataloader(),
        measures={f"metric {name!r}": measure for name, measure in measures.items()},
        num_classes=engine.data.known_num_classes,
        seed=engine.state.seed,
        make_client_evaluator=partial(_client_evaluator, engine),
    )
    return CoalitionGames(
        evaluators,
        server_lr=engine.config.aggregator.server_lr,
        ranks=engine.ranks,
        own_validation=_own_validation(engine, evaluators),
    )


def _own_validation(engine: Engine, evaluators: Sequence[VectorEvaluator]) -> OwnValidation | None:
    if all(evaluator.requests_from_clients for evaluator in evaluators):
        return None
    scorers = [evaluator for evaluator in evaluators if isinstance(evaluator, ValidatedModels)]
    return OwnValidation(
        engine.trainer,
        engine.space,
        engine.data.val_dataloader,
        scorer=scorers[0] if scorers else None,
        seed=engine.state.seed,
    )


def _client_evaluator(engine: Engine, measure: Measure) -> ClientEvaluator:
    if engine.clients_here:
        _check_held_out_classes(engine, measure, 'evaluators="clients"', min_samples=MIN_HELD_OUT)
    return ClientEvaluator(
        engine.space,
        engine.manager.clients,
        data=engine.data,
        device=engine.trainer.lightning_module.device,
        measure=measure,
    )


def _try_evaluation(engine: Engine, component: Any) -> None:
    """Try the evaluation of a metric or a strategy on the first client."""
    component_name = type(component).__name__
    measure = component.measure
    if measure is not None and not measure.is_of_classifier:
        if measure.at_clients:
            return  # ClientEvaluator.check sends requests to all clients
        _check_held_out_classes(engine, measure, component_name)
        # This raises an error if the evaluator cannot be made.
        engine.manager.client_evaluator(0, "val", measure)
    elif component.evaluates:
        train_loader = engine.data.client_loader(0, "train", shuffle=False)
        try_forward(engine.trainer, train_loader, engine.data.known_num_classes, component_name)


def _check_held_out_classes(
    engine: Engine, measure: Measure, needed_by: str, min_samples: int = 1
) -> None:
    """Check that clients hold out samples of two classes if ``measure`` compares classes."""
    if not needs_two_classes(measure.of):
        return
    data = engine.data
    for client in range(data.num_clients):
        if len(data.client_indices(client, "val")) < min_samples:
            continue
        if data.no_classes is None:  # the data have classes
            owner = client_called(client, data.client_names)
            labels = data.client_labels(client, "val")
            check_two_classes(measure.of, labels, f"{needed_by}, {owner}")
        else:
            # Making the evaluator reads the labels of masks, and checks their classes.
            engine.manager.client_evaluator(client, "val", measure)


def copy_to_score(module: nn.Module, space: ParameterSpace) -> Any:
    """Return a copy of a module in evaluation mode."""
    return ModuleCopies(module, space).load().eval()


def class_scores(
    trainer: L.Trainer, module: nn.Module, loader: Any, num_classes: int
) -> dict[str, float]:
    """Return the scores of a module in evaluation mode on a loader's samples, by name."""
    # Other processes have other clients.
    counts = ClassScores(num_classes, sync_on_compute=False)
    count_responses(trainer, module, loader, counts)
    return plain_scores(counts)


def try_forward(
    trainer: L.Trainer, batches: Iterable[Any], num_classes: int | None, needed_by: str
) -> int | None:
    """Check on one batch that a trainer's module returns logits ``[B, M]``, and return M. Error messages begin with
    ``needed_by``.
    """
    num_logits = None
    at_most_one_batch = islice(on_device(trainer, batches), 1)
    with dry_run(trainer) as module:
        try:
            for batch in at_most_one_batch:
                num_logits = count_logits(module, batch, num_classes)
        except ConfigurationError as error:
            raise ConfigurationError(f"{needed_by}: {error}") from error
    return num_logits
