"""A fit of the members of one coalition: an unfitted Trainer prepared for it, and the scores that it delivers.

Nothing is shown or logged, and stand-ins take the place of callbacks that only watch a run or end it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv._lightning.rounding import rounding_of
from flsv.configuration.federation_config import ClientEvaluation
from flsv.core import find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.engines.vmap import OF_THE_RUN
from flsv.games.coalition_utility import utility_of
from flsv.games.lent_module import lent
from flsv.games.performance import ModelScore
from flsv.games.vector_evaluator import Scores
from flsv.results.folder import Reporting
from flsv.retraining.fit_order import FitModels, FitOrder, FitResult
from flsv.retraining.global_model_scoring import GlobalModelScoring
from flsv.retraining.omitted_validation import OmittedValidation
from flsv.retraining.readings import ChangedFiles, become_stand_in
from flsv.retraining.utility_store import LAST
from flsv.sampling import ClientSampler
from flsv.server.round_server import NoModel
from flsv.utilities.digest import digest


def coalition_loop(loop: Any, cohort: ClientSampler, seed: int) -> Any:
    """Change a FederatedLoop in place to draw clients by the sampler ``cohort`` and to print nothing. Return it."""
    metrics_in_use = set()
    for role, strategy in loop.strategies.items():
        if role != "sampler":
            metrics_in_use.add(strategy.metric)
    metrics = {name: metric for name, metric in loop.metrics.items() if name in metrics_in_use}
    return become(
        loop,
        sampler=cohort,
        seed=seed,
        metrics=metrics,
        reporting=Reporting(table=False, figures=0, files=False),
        evaluation=ClientEvaluation(),
    )


def become(loop: Any, **changes: Any) -> Any:
    """Change a FederatedLoop's arguments in place, since callbacks and modules may refer to it. Return the loop."""
    attributes = vars(loop)
    changed_attributes = vars(loop.replace(**changes))
    attributes.clear()
    attributes.update(changed_attributes)
    return loop


class CoalitionScoring(GlobalModelScoring):
    """Callback that scores a coalition's model after the rounds that its order lists, and after training."""

    def __init__(
        self, data: FederatedDataModule, measures: Mapping[str, str | ModelScore], order: FitOrder
    ) -> None:
        if not order.scores_rounds:
            measures = {}
        self._measures_by_name = measures
        # A classifier's outputs are scored once for all performances.
        self._scored: dict[str, ModelScore | None] = {}
        for name, measure in measures.items():
            self._scored[name] = measure if isinstance(measure, ModelScore) else None
        self._scored_measures = list(dict.fromkeys(self._scored.values()))
        super().__init__(
            data,
            [measure or "accuracy" for measure in self._scored_measures],
            dict(order.initial or {}),
            order.rounds,
            scores_untrained=order.scores_untrained,
        )
        self._order = order
        self._omission = OmittedValidation()
        self.delivered: Tensor | None = None
        self._global: Tensor | None = None
        # The scores of the last finite model, if training ended without another one.
        self._last_scores: list[Scores] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._rounding = rounding_of(trainer)
        if not self._order.validates:
            self._omission.begin(trainer, pl_module)
        if self._order.nudged:
            with torch.no_grad():
                for parameter in filter(torch.is_floating_point, pl_module.parameters()):
                    parameter.copy_(self._rounding.nudged(parameter.flatten()).view_as(parameter))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._omission.end_if_scheduled(trainer)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        """Score the last finite model if a round has none, unless it was scored after its round."""
        if not isinstance(exception, NoModel) or self.scored_round == trainer.current_epoch - 1:
            return
        loop: Any = find_loop(callbacks_of(trainer))
        with lent(pl_module, self.space):
            self.space.write(pl_module, loop.state.model())
            self._last_scores = self._evaluated(pl_module)

    def deliver(self, trainer: L.Trainer) -> None:
        """Store and score the module's weights after all hooks at the end of training."""
        module = trainer.lightning_module
        loop: Any = find_loop(callbacks_of(trainer))
        self.delivered = self.space.read(module).clone()
        self._global = loop.state.model()
        last_round = self._order.rounds[-1]
        if not self.has_ended:
            raise RuntimeError(
                f"the fit has ended after {trainer.current_epoch} of {last_round + 1} rounds: a callback "
                "or a hook stops it"
            )
        self._score(module, last_round)

    def result(self) -> FitResult:
        """Return the fit's result, after the end of training."""
        if not self.models.numel():
            raise RuntimeError("it trained nothing")
        scores_of_rounds = self._scores_of_rounds()
        utilities = {}
        untrained = {}
        for name in self._measures_by_name:
            utilities_of_rounds = [self._utility(scores, name) for scores in scores_of_rounds]
            utilities[name] = torch.stack(utilities_of_rounds)
            if self.untrained_scores:
                untrained[name] = self._utility(self.untrained_scores, name)

        models = None
        if self._order.returns_models:
            models = self._models()
        return FitResult(
            utilities=utilities,
            untrained=untrained,
            start_hash=digest(self.models[1].cpu()).hex(),
            outputs=self._outputs(scores_of_rounds),
            models=models,
            rounding=self._rounding,
        )

    def _models(self) -> FitModels:
        """Return the models before and after training. Without a finite one, that which was scored last."""
        scored_model, initial_model = self.models.cpu()
        trained_model = self._global
        if self._order.checkpoint is not None:
            trained_model = self.delivered
        if trained_model is None:
            trained_model = scored_model
        return FitModels(initial=initial_model, trained=trained_model.cpu())

    def _scores_of_rounds(self) -> list[list[Scores]]:
        """Return the scores after each of the order's rounds. The last finite model stays if a later round has none."""
        scores_of_rounds: list[list[Scores]] = []
        for round_index in self._order.rounds:
            scores = self.scores_by_round.get(round_index, self._last_scores)
            if not scores and scores_of_rounds:
                scores = scores_of_rounds[-1]
            scores_of_rounds.append(scores)
        return scores_of_rounds

    def _outputs(self, scores_of_rounds: Sequence[list[Scores]]) -> dict[str, Tensor]:
        """Return the models' outputs ``[r, V, ...]`` by performance, of those that are computed from outputs."""
        outputs = {}
        for name, measure in self._scored.items():
            position = self._scored_measures.index(measure)
            outputs_of_rounds = [scores[position].outputs for scores in scores_of_rounds]
            known_outputs = [output for output in outputs_of_rounds if output is not None]
            if len(known_outputs) == len(outputs_of_rounds):
                outputs[name] = torch.cat(known_outputs)
        return outputs

    def _utility(self, scores: list[Scores], name: str) -> Tensor:
        """Return a model's utility by the performance ``name``, selected from its ``scores``."""
        position = self._scored_measures.index(self._scored[name])
        return utility_of(scores[position], self._measures_by_name[name])[0].cpu()


def prepare_coalition_fit(
    trainer: L.Trainer,
    data: FederatedDataModule,
    measures: Mapping[str, str | ModelScore],
    order: FitOrder,
    folder: str | None,
    end: Callable[[], Any] = lambda: None,
) -> CoalitionScoring:
    """Prepare an unfitted Trainer to train the coalition in ``order``. Return the callback with the result. Callbacks
    write into ``folder`` if it is set. ``end`` is called when the result is complete.
    """
    unfitted: Any = trainer
    data.counted_clients = order.members
    if order.rounds == (LAST,):
        planned_rounds = int(trainer.max_epochs or 0)
        order = replace(order, rounds=(planned_rounds - 1,))
    scoring = CoalitionScoring(data, measures, order)
    callbacks: list[Any] = callbacks_of(trainer)
    for callback in callbacks:
        if is_loop(callback):
            sampler = callback.config.sampler.among(order.members)
            coalition_loop(callback, sampler, order.seed)
        elif of_the_run(callback) and not order.watched:
            become_stand_in(callback)
    for logger in trainer.loggers:
        become_stand_in(logger, folder)

    if order.run_time is not None:
        ChangedFiles(*order.run_time).watch()

    unfitted.callbacks = [scoring, *callbacks]
    unfitted._default_root_dir = folder or trainer.default_root_dir
    unfitted.profiler = PassThroughProfiler()

    def delivered() -> None:
        scoring.deliver(trainer)
        end()

    unfitted.strategy.on_train_end = delivered
    return scoring


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a method."""


def of_the_run(callback: L.Callback) -> bool:
    """Return whether a callback only watches or ends a run: one of :data:`OF_THE_RUN` with unchanged hooks.

    Example:
        >>> from lightning.pytorch.callbacks import EarlyStopping
        >>> class Stops(EarlyStopping):
        ...     __module__ = "project"
        ...     def on_validation_end(self, trainer, pl_module):
        ...         pl_module.weight = 0.0
        >>> of_the_run(EarlyStopping("val_loss")), of_the_run(Stops("val_loss"))
        (True, False)
    """
    if not isinstance(callback, OF_THE_RUN):
        return False
    base = _class_of_lightning(callback)
    if issubclass(base, (ModelSummary, ProgressBar)):  # what it shows is its own affair
        base = L.Callback

    classes = []
    for kind in type(callback).__mro__:
        if not kind.__module__.startswith(("lightning.", "flsv.")):
            classes.append(kind)
    for owner in (*classes, callback):
        for name, value in vars(owner).items():
            is_special = name.startswith("__")
            if callable(value) and not is_special and callable(getattr(base, name, None)):
                return False
    return True


def _class_of_lightning(callback: L.Callback) -> type:
    """Return the first class of Lightning, among :data:`OF_THE_RUN`, from which a callback inherits."""
    for kind in type(callback).__mro__:
        if issubclass(kind, OF_THE_RUN) and kind.__module__.startswith("lightning."):
            return kind
    raise TypeError(f"{callback!r} is none of {OF_THE_RUN}")
