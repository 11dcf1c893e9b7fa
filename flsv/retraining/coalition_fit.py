"""One coalition's fit: the changes that make a federation's fit the fit of a coalition, and the fit's result.

Forks of a fit (:mod:`flsv.retraining.forked_fits`) and fresh processes (:mod:`flsv.retraining.fresh_fits`) are changed
in the same way: only the coalition's members take part, nothing is shown, no checkpoint or log is written, and
callbacks that only watch a run or end it are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.profilers import PassThroughProfiler
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv._lightning.rounding import Rounding, rounding_of
from flsv.configuration.federation_config import ClientEvaluation
from flsv.core import find_loop, is_loop
from flsv.data import FederatedDataModule
from flsv.games.coalition_utility import utility_of
from flsv.games.members import Members
from flsv.games.performance import ModelScore
from flsv.games.scores import Scores
from flsv.results.folder import Reporting
from flsv.retraining.global_model_scoring import GlobalModelScoring
from flsv.retraining.train_fits import Fit
from flsv.sampling import ClientSampler
from flsv.training.rows.row_checks import OF_THE_RUN
from flsv.utilities.digest import digest
from flsv.utilities.supervisor import ChildFailed


@dataclass(frozen=True, eq=False)
class FitOrder:
    """Order for a coalition's fit.

    Args:
        members: the coalition's clients.
        seed: the seed of every random choice.
        rounds: the indices of the rounds after which the model is scored, ascending; the fit ends with the last.
        initial: the ``state_dict`` with which the module starts; None: the module keeps its weights.
        nudged: whether the weights are then nudged, see :meth:`flsv._lightning.rounding.Rounding.nudged`.
    """

    members: Members
    seed: int
    rounds: tuple[int, ...]
    initial: Mapping[str, Any] | None = None
    nudged: bool = False


@dataclass(frozen=True, eq=False)
class FitResult:
    """Result of a coalition's fit.

    Args:
        curves: ``{performance: utilities}`` after each of the order's r rounds, ``[r]``, or by class ``[r, M]``.
        before: ``{performance: utility}`` before the first round, one number or ``[M]``.
        start: ``[P]``, the model before the first round.
        last: ``[P]``, the global model after the last round.
        delivered: ``[P]``, the model in the module when training has ended. It differs from ``last`` if, for example, a
            callback averages weights.
        rounding: the tolerances for comparing this fit's models with those of another training of the same coalition.
        outputs: ``{performance: outputs}`` of the model after each of the r rounds, ``[r, V, ...]``, for performances
            whose evaluators keep outputs.
    """

    curves: dict[str, Tensor]
    before: dict[str, Tensor]
    start: Tensor
    last: Tensor
    delivered: Tensor
    rounding: Rounding
    outputs: dict[str, Tensor]

    def fit(self, rounds: Sequence[int], models: bool = False) -> Fit:
        """Convert this result to the form in which it is stored.

        Args:
            rounds: the indices of the rounds to which the entries of :attr:`curves` belong.
            models: whether the form contains the delivered model and the one before training.
        """
        by = [curve.view(len(curve), -1).tolist() for curve in self.curves.values()]
        empty = [before.view(-1).tolist() for before in self.before.values()]
        model = torch.stack([self.delivered, self.start]) if models else None
        return Fit(dict(zip(rounds, zip(*by))), empty, digest(self.start).hex(), model, self.rounding, self.outputs)


class CoalitionFits(Protocol):
    """Protocol of objects that train coalitions, each by a fit of its own."""

    def train(self, orders: Sequence[FitOrder]) -> Iterator[tuple[FitOrder, FitResult | ChildFailed]]:
        """Train the coalitions of ``orders``, and yield each order with its result, or with its error, in any order."""


class Nowhere(DummyLogger):
    """Logger that drops everything.

    Args:
        folder: the folder into which modules and callbacks may write files.
    """

    def __init__(self, folder: str | None = None) -> None:
        super().__init__()
        self.folder = folder

    @property
    def save_dir(self) -> str | None:
        return self.folder

    @property
    def log_dir(self) -> str | None:
        return self.folder


def coalition_loop(loop: Any, cohort: ClientSampler, seed: int) -> Any:
    """Return a copy of the federation's loop for one coalition: it draws clients by the coalition's sampler, keeps only
    the metrics that a strategy reads, and shows and writes nothing.

    Args:
        loop: the :class:`flsv.FederatedLoop` of the whole federation.
        cohort: the coalition's sampler, see :meth:`flsv.sampling.ClientSampler.among`.
        seed: the seed of every random choice.
    """
    read = {strategy.metric for role, strategy in loop.strategies.items() if role != "sampler"}
    metrics = {name: metric for name, metric in loop.metrics.items() if name in read}
    silent = Reporting(table=False, figures=0, files=False)
    return loop.replace(sampler=cohort, seed=seed, metrics=metrics, reporting=silent, evaluation=ClientEvaluation())


class CoalitionScoring(GlobalModelScoring):
    """Callback that scores a coalition's models after the rounds of an order, and the model that the fit delivers.

    Args:
        data: the federation's data module.
        measures: ``{name: performance measure}``.
        order: the coalition's order, with the rounds and the initial weights.
    """

    def __init__(self, data: FederatedDataModule, measures: Mapping[str, str | ModelScore], order: FitOrder) -> None:
        self._named = measures
        # A classifier's outputs are scored once for all performances.
        self._scored = {name: each if isinstance(each, ModelScore) else None for name, each in measures.items()}
        self._once = list(dict.fromkeys(self._scored.values()))
        super().__init__(data, [each or "accuracy" for each in self._once], dict(order.initial or {}), order.rounds)
        self._order = order
        self.delivered: Tensor | None = None
        self._global: Tensor | None = None

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._rounding = rounding_of(trainer)
        if self._order.nudged:
            with torch.no_grad():
                for parameter in filter(torch.is_floating_point, pl_module.parameters()):
                    parameter.copy_(self._rounding.nudged(parameter.flatten()).view_as(parameter))

    def deliver(self, trainer: L.Trainer) -> None:
        """Store the module's weights after training, and replace the last round's scores by those of the module after
        all hooks of the end."""
        module = trainer.lightning_module
        loop: Any = find_loop(callbacks_of(trainer))
        self.delivered, self._global = self.space.read(module).clone(), loop.state.model()
        if self.last != self._order.rounds[-1]:
            raise RuntimeError(
                f"the fit has ended after {trainer.current_epoch} of {self._order.rounds[-1] + 1} rounds: a callback "
                "or a hook stops it"
            )
        self._score(module, self.last, self.last if torch.equal(self.delivered, self.models[0]) else None)

    def result(self) -> FitResult:
        """Return the fit's result, after the end of training.

        Raises:
            RuntimeError: nothing was trained.
        """
        if not self.models.numel():
            raise RuntimeError("it trained nothing")
        scores = self.before
        rounds = [(scores := self.after.get(index, scores)) for index in self._order.rounds]
        curves = {name: torch.stack([self._of(found, name) for found in rounds]) for name in self._named}
        before = {name: self._of(self.before, name) for name in self._named}
        scored, start = self.models.cpu()[0], self.models.cpu()[1]
        last, delivered = (scored if each is None else each.cpu() for each in (self._global, self.delivered))
        return FitResult(curves, before, start, last, delivered, self._rounding, self._outputs(rounds))

    def _outputs(self, rounds: Sequence[list[Scores]]) -> dict[str, Tensor]:
        kept = [[scores.outputs for scores in of] for of in zip(*rounds)]
        stacked = [None if any(each is None for each in of) else torch.cat(of) for of in kept]
        named = {name: stacked[self._once.index(key)] for name, key in self._scored.items()}
        return {name: outputs for name, outputs in named.items() if outputs is not None}

    def _of(self, scores: list[Scores], name: str) -> Tensor:
        """Return the utility of one model by the performance ``name``, from the model's scores."""
        return utility_of(scores[self._once.index(self._scored[name])], self._named[name])[0].cpu()


def into_a_coalitions_fit(
    trainer: L.Trainer,
    data: FederatedDataModule,
    measures: Mapping[str, str | ModelScore],
    order: FitOrder,
    folder: str | None,
    end: Callable[[], Any] = lambda: None,
) -> CoalitionScoring:
    """Change a federation's Trainer in place into one that trains a coalition and writes no checkpoints or logs.

    Args:
        trainer: the Trainer, before its fit has changed anything.
        data: the federation's data module.
        measures: ``{name: performance measure}``.
        order: the coalition's order.
        folder: a folder into which callbacks may write; None: they may write into the run's own folders.
        end: a function that is called when training has ended, after all hooks.

    Returns:
        The callback that scores the coalition's models, and has the fit's result after training.
    """
    held: Any = trainer
    scoring = CoalitionScoring(data, measures, order)
    callbacks: list[Any] = callbacks_of(trainer)
    own = [coalition_loop(c, c.config.sampler.among(order.members), order.seed) if is_loop(c) else c for c in callbacks]
    held.callbacks = [scoring, *(each for each in own if not of_the_run(each))]
    held.loggers = [Nowhere(folder or each.log_dir or each.save_dir) for each in trainer.loggers]
    held._default_root_dir = folder or trainer.default_root_dir
    held.profiler = PassThroughProfiler()
    held.save_checkpoint = nothing

    def delivered() -> None:
        scoring.deliver(trainer)
        end()

    strategy: Any = trainer.strategy
    strategy.on_train_end, strategy.save_checkpoint, strategy.remove_checkpoint = delivered, nothing, nothing
    return scoring


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, in place of a method that must not act in a coalition's fit, such as ``save_checkpoint``."""


def of_the_run(callback: L.Callback) -> bool:
    """Return whether a callback only watches or ends the run; it is left out when a coalition is trained alone.

    Its class is one of :data:`OF_THE_RUN`, or a subclass that overrides no hook.

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
        kind for kind in kinds if issubclass(kind, OF_THE_RUN) and kind.__module__.startswith("lightning.")
    )
    if issubclass(base, (ModelSummary, ProgressBar)):  # what it shows is its own affair
        base = L.Callback
    known = {name for name in dir(base) if callable(getattr(base, name)) and not name.startswith("__")}
    own = [vars(kind) for kind in kinds if not kind.__module__.startswith(("lightning.", "flsv."))]
    return not any(name in known and callable(value) for each in (*own, vars(callback)) for name, value in each.items())
