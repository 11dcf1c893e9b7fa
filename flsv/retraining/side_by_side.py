"""SideBySideUtility: trains the federations of many coalitions side by side.

The rounds are those of :mod:`flsv.retraining.coalition_rounds`. Up to rounding the models equal those of
:class:`flsv.retraining.RetrainedUtility`, which trains one coalition after the other; for small models all coalitions
of six clients take about as long as two fits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from flsv._lightning.patches import callbacks_of
from flsv._lightning.rounding import ROUNDINGS, Rounding, rounding_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core import find_loop
from flsv.core.parameter_space import ParameterSpace
from flsv.engines.client_manager import ClientManager
from flsv.engines.one_process import shared_space
from flsv.games.coalition_utility import utility_of
from flsv.retraining.coalition_rounds import CoalitionRounds, step_schedules
from flsv.retraining.coalition_servers import unlike_alone
from flsv.retraining.global_model_scoring import make_evaluator
from flsv.retraining.retrained_utility import TrainedGame
from flsv.sampling import FixedCohort
from flsv.training.client_turn import optimizer_slots
from flsv.training.rows.row_checks import not_batched, not_by_rounds, strange_hooks
from flsv.training.rows.row_trial import why_not_rows
from flsv.training.rows.step_watch import GENERATORS
from flsv.training.slots import Slots
from flsv.training.store import ClientStore
from flsv.utilities import progress
from flsv.utilities.errors import ConfigurationError

#: The three coalitions that are trained for :func:`check_same`; True stands for all clients, False for none: the full
#: coalition, the empty one, and the full one from a nudged initial model, which measures how rounding grows.
CHECKED = (True, False, True)


class NotSideBySide(ConfigurationError):
    """Error: coalitions cannot be trained side by side; the message gives the reason."""


class SideBySideUtility:
    """Utility ``utility(masks: bool [K, n]) -> float64 [K]`` that trains all K coalitions at once.

    Up to rounding, the utilities are those of :class:`flsv.retraining.RetrainedUtility`. The full coalition is trained
    both side by side and alone, and an error is raised if the two models differ.

    Args:
        alone: the utility that trains one coalition after the other. Its data, module and metric are used, and it
            trains the full coalition alone.
        seed: the run's seed.
        compare: whether to train the full coalition alone as well, and to compare the two models.

    Raises:
        NotSideBySide: in a call: the federation, the module or its optimizer cannot be trained side by side; the
            message gives the reason.
    """

    def __init__(self, alone: TrainedGame, seed: int, compare: bool = True) -> None:
        self._alone, self._seed, self._compare = alone, seed, compare
        self.num_players = alone.num_players

    def __call__(self, masks: Tensor) -> Tensor:
        return utility_of(self.train(masks).scores, self._alone.metric)

    def train(self, masks: Tensor) -> CoalitionTraining:
        """Train the coalitions ``masks [K, n]``, and return the callback that has trained them.

        Raises:
            NotSideBySide: they cannot be trained side by side.
        """
        try:
            return self._train(masks)
        except Exception as error:  # any error of a training_step on tensors with one more dimension
            named = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
            raise NotSideBySide(f"{named}{error}") from error

    def _train(self, masks: Tensor) -> CoalitionTraining:
        alone, everybody = self._alone, tuple(range(self.num_players))
        trainer, module = alone.made(everybody)
        if why := _why_not(find_loop(callbacks_of(trainer)).config):  # before anything is trained
            raise ConfigurationError(f"{why}.")
        if self._compare:
            alone(torch.ones(1, self.num_players, dtype=torch.bool))
            trainer, module = alone.made(everybody)
        loop = find_loop(callbacks_of(trainer))
        training = CoalitionTraining(loop, masks, self._seed, alone.initial, self._scores)
        callbacks_of(trainer)[:] = [training if each is loop else each for each in callbacks_of(trainer)]
        trainer.fit(module, alone.data)
        if self._compare and alone.model is not None:
            check_same(training.checked, alone.model[0], training.rounding)
        return training

    def _scores(self, trainer: L.Trainer, space: ParameterSpace, models: Tensor) -> Any:
        return make_evaluator(trainer, space, self._alone.data, self._alone.metric, self._seed)(models)


def check_same(models: Tensor, real: Tensor, rounding: Rounding = ROUNDINGS["float32"]) -> None:
    """Check that the full coalition's model, trained side by side, equals the model of its run alone.

    Args:
        models: ``[3, P]``: the full coalition's trained model, its initial model, and its model trained from the nudged
            initial model, as in :attr:`CoalitionTraining.checked`.
        real: ``[P]``, the model of the full coalition's run alone.
        rounding: the tolerances of the arithmetic in which the models were trained.

    Raises:
        ConfigurationError: the two models differ by more than rounding.
    """
    mine, start, nudged = models.to(real)
    apart = rounding.apart(mine, real, start, lambda: nudged - rounding.nudged(start))
    if apart is not None:
        raise ConfigurationError(
            "the coalition of all clients, trained side by side with others, has another model than the run itself "
            f"(they differ by {100 * apart:.1f} % of the distance that the model moved): the module, its optimizer or "
            "its schedule does something that training side by side does not, or its training amplifies rounding. Use "
            "flsv.retraining.RetrainedUtility."
        )


class CoalitionTraining(L.Callback):
    """Callback that replaces a FederatedLoop: it trains all coalitions at the start of training, then ends the fit.

    Args:
        loop: the federation's loop.
        masks: bool ``[K, n]``, the members of each coalition; the empty coalition's model is not trained.
        seed: the seed of the clients' batches.
        initial: the module's ``state_dict`` to start from; None: start from the module's present weights.
        evaluate: a function ``evaluate(trainer, space, models)`` that is called at the end of the fit and returns the
            ``scores``; ``space`` maps between the module and its vectors, ``models`` is ``[K, P]``.

    Attributes:
        models: ``[K, P]``, the models after the last round.
        checked: ``[3, P]``, the models that :func:`check_same` compares: the full coalition's model, its initial model,
            and the full coalition's model from the nudged initial model.
        scores: the scores of ``models``, from ``evaluate``.
        rounding: the tolerances of the trainer's arithmetic, for :func:`check_same`.

    Raises:
        ConfigurationError: in a fit: the module, the optimizer or the federation cannot be trained side by side.
    """

    def __init__(
        self,
        loop: Any,
        masks: Tensor,
        seed: int,
        initial: dict[str, Any] | None = None,
        evaluate: Callable[[L.Trainer, ParameterSpace, Tensor], Any] = lambda trainer, space, models: None,
    ) -> None:
        checked = torch.tensor(CHECKED)[:, None].expand(-1, masks.shape[1])
        self._loop, self._seed, self._initial = loop, seed, initial
        self._masks = torch.cat([checked, masks])
        self._evaluate = evaluate
        self.models, self.checked, self.scores = torch.empty(0), torch.empty(0), None  # type: Tensor, Tensor, Any
        self._trainer: Any = None
        self.rounding = ROUNDINGS["float32"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._initial is not None:
            pl_module.load_state_dict(self._initial)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop, trainer.fit_loop.min_epochs = True, 0
        config = self._loop.config
        drawn = not isinstance(config.sampler, FixedCohort)  # then a client's steps are not the same in all coalitions
        why = _why_not(config) or not_batched(trainer, None, config.optimizer_state, schedules=not drawn)
        if why := why or not_by_rounds(trainer) or _hooks_of_rounds(trainer):
            raise ConfigurationError(f"{why}.")
        self._trainer, (self._space, _) = trainer, shared_space(pl_module, config)
        if why := why_not_rows(trainer, self._space, self._seed, GENERATORS):
            raise ConfigurationError(f"{why}.")
        self.rounding = rounding_of(trainer)
        models = self._train()
        self.checked, self.models = models[: len(CHECKED)], models[len(CHECKED) :]
        self.scores = self._evaluate(trainer, self._space, self.models)

    def _train(self) -> Tensor:
        """Train all coalitions for all rounds, and return their models ``[3 + K, P]``: first those of the full, the
        empty and the nudged full coalition (:data:`CHECKED`), then those of the K coalitions."""
        trainer, space, loop = self._trainer, self._space, self._loop
        module, data, metrics = trainer.lightning_module, trainer.datamodule, loop.contribution_metrics
        for optimizer in trainer.optimizers:
            optimizer._opt_called = True  # torch warns of a schedule before a step
        store = ClientStore()
        slots = Slots(optimizer_slots(trainer, "reset"), store)
        models = space.read(module).expand(len(self._masks), -1).clone()
        models[len(CHECKED) - 1] = self.rounding.nudged(models[0])
        metrics.bind(data.num_clients, data.num_classes, data.class_names, data.known_class_counts, data.client_names)
        manager = ClientManager(trainer, data, space, store)
        self.clients = manager.clients
        limit = trainer.limit_train_batches
        rounds = CoalitionRounds(trainer, loop, space, self._masks, models, self._seed, limit, slots=slots)
        progress.start("rounds", trainer.max_epochs or 0)
        for index in range(trainer.max_epochs or 0):
            trainer.fit_loop.epoch_progress.current.completed = index  # current_epoch in a step
            models = rounds.train(index, models, manager.clients, manager.server)
            if not models.isfinite().all():
                raise ConfigurationError("some coalitions' models have NaN.")
            store.commit()
            step_schedules(trainer, "epoch", index + 1)
            progress.advance()
        progress.finish()
        trainer.fit_loop.epoch_progress.current.completed = 0
        return models


def _hooks_of_rounds(trainer: L.Trainer) -> str | None:
    """Return a text that names a hook at the start or end of a round, of the module or a callback, which side-by-side
    training would not call; None if there is no such hook.

    A module's hook at the end of a round is allowed, since most only log; if it does more, :func:`check_same` fails."""
    module, mine = trainer.lightning_module, ("on_train_start", "on_train_epoch_start")
    found: list[tuple[Any, str]] = [(module, hook) for hook in mine if is_overridden(hook, module, L.LightningModule)]
    found += [(each, hooks[0]) for each, hooks in strange_hooks(trainer, (*mine, "on_train_epoch_end"))]
    return f"{type(found[0][0]).__name__} defines {found[0][1]}, which would not be called" if found else None


def _why_not(config: FederationConfig) -> str | None:
    """Return why coalitions of a federation cannot be trained side by side; None if the configuration allows it."""
    if config.share != "all":
        return f"with share={config.share!r} a part of the model stays at the clients"
    if config.optimizer_state != "reset":
        return 'with optimizer_state="persist" optimizers go on'
    if callable(config.engine):
        return "the clients do not run in this process"
    return unlike_alone(config, config.client_algorithm, losses=True)
