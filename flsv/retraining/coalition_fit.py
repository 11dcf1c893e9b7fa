"""A fit of the members of one coalition: an unfitted Trainer prepared for it, and the scores that it delivers.

Nothing is shown or logged, and stand-ins take the place of callbacks that only watch a run or end it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv._lightning.rounding import Rounding, rounding_of
from flsv.configuration.federation_config import ClientEvaluation
from flsv.core import find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.engines.vmap import OF_THE_RUN
from flsv.games.coalition_utility import utility_of
from flsv.games.lent_module import lent
from flsv.games.members import Members
from flsv.games.performance import ModelScore
from flsv.games.vector_evaluator import Scores
from flsv.results.folder import Reporting
from flsv.retraining.global_model_scoring import GlobalModelScoring
from flsv.retraining.omitted_validation import OmittedValidation
from flsv.retraining.readings import ChangedFiles, Reading, become_stand_in
from flsv.retraining.train_fits import Fit
from flsv.sampling import ClientSampler
from flsv.server.round_server import NoModel
from flsv.utilities.digest import digest
from flsv.utilities.supervisor import ChildFailed


@dataclass(frozen=True, eq=False)
class FitOrder:
    """Request to train one coalition: members, seed, rounds to score and initial weights."""

    members: Members
    seed: int
    # After which the model is scored, ascending. The fit ends with the last.
    rounds: tuple[int, ...]
    # The state_dict with which the module starts. None: its own weights.
    initial: Mapping[str, Any] | None = None
    # Whether the weights are then nudged, see Rounding.nudged.
    nudged: bool = False
    # Whether callbacks that only watch the run or end it take part, since training reads them.
    watched: bool = False
    # Whether the module is scored after the rounds, and before the first.
    scores_rounds: bool = True
    scores_untrained: bool = False
    # Whether Lightning's own validations are run although nothing may read them.
    validates: bool = True
    # From when to when the run has trained. Files that were changed then are not to be read.
    run_time: tuple[float, float] | None = None


@dataclass(frozen=True, eq=False)
class FitResult:
    """Scores and models ``[P]`` from training one coalition."""

    # By performance, after each of the order's r rounds, [r], or by class [r, M].
    curves: dict[str, Tensor]
    # By performance, before the first round, or empty if it was not scored.
    untrained: dict[str, Tensor]
    initial_model: Tensor
    # The global model after the last round.
    global_model: Tensor
    # The model in the module after training, not the global one if, for example, a callback averages weights.
    delivered_model: Tensor
    rounding: Rounding
    # By performance, after each of the r rounds, [r, V, ...].
    outputs: dict[str, Tensor]

    def stored(self, rounds: Sequence[int], models: bool = False) -> Fit:
        """Convert this result to a Fit, the form in which it is stored."""
        utilities_by_round = {}
        for position, round_index in enumerate(rounds):
            utilities_by_round[round_index] = [
                _numbers(curve[position]) for curve in self.curves.values()
            ]
        untrained = None
        if self.untrained:
            untrained = [_numbers(utility) for utility in self.untrained.values()]
        start_and_end = None
        if models:
            start_and_end = torch.stack([self.delivered_model, self.initial_model])
        return Fit(
            rows=utilities_by_round,
            empty=untrained,
            start=digest(self.initial_model).hex(),
            model=start_and_end,
            rounding=self.rounding,
            outputs=self.outputs,
        )


def _numbers(utility: Tensor) -> list[float]:
    """Return a utility, one number or one for each class, as a list."""
    return utility.view(-1).tolist()  # type: ignore[no-any-return]


class CoalitionFits(Protocol):
    """Protocol of objects that train coalitions, each by a fit of its own."""

    def train(
        self, orders: Sequence[FitOrder]
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed | Reading]]:
        """Train the coalitions. Yield each order with its result or error, in any order. If a stand-in is read, others
        may be left out.
        """


def coalition_loop(loop: Any, cohort: ClientSampler, seed: int) -> Any:
    """Change a FederatedLoop in place to draw clients by the sampler ``cohort`` and to print nothing. Return it."""
    read = {strategy.metric for role, strategy in loop.strategies.items() if role != "sampler"}
    metrics = {name: metric for name, metric in loop.metrics.items() if name in read}
    silent = Reporting(table=False, figures=0, files=False)
    more = {"metrics": metrics, "reporting": silent, "evaluation": ClientEvaluation()}
    return become(loop, sampler=cohort, seed=seed, **more)


def become(loop: Any, **changes: Any) -> Any:
    """Change a FederatedLoop's arguments in place, since callbacks and modules may refer to it. Return the loop."""
    held, changed = vars(loop), vars(loop.replace(**changes))
    held.clear()
    held.update(changed)
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
        curves = {}
        untrained = {}
        for name in self._measures_by_name:
            curves[name] = torch.stack([self._utility(scores, name) for scores in scores_of_rounds])
            if self.untrained_scores:
                untrained[name] = self._utility(self.untrained_scores, name)

        scored_model, initial_model = self.models.cpu()
        global_model, delivered_model = scored_model, scored_model
        if self._global is not None:
            global_model = self._global.cpu()
        if self.delivered is not None:
            delivered_model = self.delivered.cpu()
        return FitResult(
            curves=curves,
            untrained=untrained,
            initial_model=initial_model,
            global_model=global_model,
            delivered_model=delivered_model,
            rounding=self._rounding,
            outputs=self._outputs(scores_of_rounds),
        )

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
    kinds = list(type(callback).__mro__)
    base: type[L.Callback] = next(
        kind
        for kind in kinds
        if issubclass(kind, OF_THE_RUN) and kind.__module__.startswith("lightning.")
    )
    if issubclass(base, (ModelSummary, ProgressBar)):  # what it shows is its own affair
        base = L.Callback
    known = {
        name for name in dir(base) if callable(getattr(base, name)) and not name.startswith("__")
    }
    own = [vars(kind) for kind in kinds if not kind.__module__.startswith(("lightning.", "flsv."))]
    return not any(
        name in known and callable(value)
        for each in (*own, vars(callback))
        for name, value in each.items()
    )
