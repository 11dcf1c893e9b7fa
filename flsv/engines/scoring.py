"""The scoring of models during a run: coalition games are made, and evaluations have a dry run before the first
round.

A run that scores no models does not load this module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning as L
from torch import nn

from flsv._lightning.evaluation import count_responses, on_device
from flsv.configuration.federation_config import FederationConfig
from flsv.core import FederationState, Ranks
from flsv.core.parameter_space import ParameterSpace
from flsv.core.responses import MIN_HELD_OUT
from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.engines.client_manager import ClientManager
from flsv.games import CoalitionGames
from flsv.games.client_evaluation import ClientEvaluator
from flsv.games.make_evaluators import count_logits, dry_run, make_evaluators
from flsv.games.module_copies import ModuleCopies
from flsv.games.output_metric import check_two_classes, needs_two_classes
from flsv.games.own_validation import OwnValidation
from flsv.scores import ModelScore
from flsv.scores.class_scores import ClassScores, plain_scores
from flsv.utilities.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class ScoringOfARun:
    """Maker of the coalition games in which a run's metrics score models."""

    trainer: L.Trainer
    data: FederatedDataModule
    space: ParameterSpace
    manager: ClientManager
    config: FederationConfig
    state: FederationState
    ranks: Ranks
    # Whether the clients' data can be read in this process.
    clients_here: bool

    def games(
        self, measures: Mapping[str, Any], evaluating_metrics: Mapping[str, Any]
    ) -> CoalitionGames | None:
        """Make the object that scores coalitions' models by ``measures``, ``{metric: performance}``, if any. Try the
        evaluations that clients will run."""
        if self.clients_here:
            self._try_evaluations([*self.config.strategies.values(), *evaluating_metrics.values()])
        if not measures:
            return None
        evaluators = make_evaluators(
            self.trainer,
            self.space,
            self.data.val_dataloader(),
            measures={f"metric {name!r}": measure for name, measure in measures.items()},
            num_classes=self.data.known_num_classes,
            seed=self.state.seed,
            make_client_evaluator=self._make_client_evaluator,
        )
        return CoalitionGames(
            evaluators,
            server_lr=self.config.aggregator.server_lr,
            ranks=self.ranks,
            own_validation=self._own_validation(evaluators),
        )

    def _own_validation(self, evaluators: Mapping[Any, Any]) -> OwnValidation | None:
        if all(evaluator.requests_from_clients for evaluator in evaluators.values()):
            return None
        return OwnValidation(
            self.trainer,
            self.space,
            self.data.val_dataloader,
            scorer=evaluators.get("logged"),
            seed=self.state.seed,
        )

    def _make_client_evaluator(self, measure: ModelScore) -> ClientEvaluator:
        if self.clients_here:
            self._check_held_out_classes(measure, 'evaluators="clients"', min_samples=MIN_HELD_OUT)
        return ClientEvaluator(
            self.space,
            self.manager.clients,
            data=self.data,
            device=self.trainer.lightning_module.device,
            measure=measure,
        )

    def _try_evaluations(self, components: Sequence[Any]) -> None:
        """Try all evaluations of ``components``, metrics and strategies on the first client."""
        num_classes = self.data.known_num_classes
        every = self.config.evaluation.every
        if every:
            test_loader = self.data.client_loader(0, "test", shuffle=False)
            try_forward(self.trainer, test_loader, num_classes, f"ClientEvaluation(every={every})")

        for component in components:
            component_name = type(component).__name__
            performance = getattr(component, "performance", None)
            if isinstance(performance, ModelScore):
                is_evaluated_by_clients = getattr(component, "evaluators", "server") == "clients"
                if is_evaluated_by_clients:
                    continue  # ClientEvaluator.check sends requests to all clients
                self._check_held_out_classes(performance, component_name)
                # This raises an error if the evaluator cannot be made.
                self.manager.client_evaluator(0, "val", performance)
            elif component.evaluates:
                train_loader = self.data.client_loader(0, "train", shuffle=False)
                try_forward(self.trainer, train_loader, num_classes, component_name)

    def _check_held_out_classes(
        self, performance: ModelScore, needed_by: str, min_samples: int = 1
    ) -> None:
        """Check that clients hold out samples of two classes if ``performance`` compares classes."""
        if not needs_two_classes(performance.of):
            return
        for client in range(self.data.num_clients):
            num_samples = len(self.data.client_indices(client, "val"))
            if num_samples < min_samples:
                continue
            if self.data.no_classes is None:  # the data have classes
                owner = client_called(client, self.data.client_names)
                labels = self.data.client_labels(client, "val")
                check_two_classes(performance.of, labels, f"{needed_by}, {owner}")
            else:
                # Making the evaluator reads the labels of masks, and checks their classes.
                self.manager.client_evaluator(client, "val", performance)


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
