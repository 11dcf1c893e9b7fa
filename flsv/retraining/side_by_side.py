"""SideBySideUtility: trains the federations of many coalitions side by side.

A client has the same batches in every coalition, since batches depend on the seed, the round and the client only. So
the models of all coalitions that a client is in are trained on its batches at once, as rows of one batched model
(:mod:`flsv.training.rows.kernel`). Up to rounding the models equal the models of :class:`flsv.games.RetrainedUtility`,
which trains one coalition after the other; for small models all coalitions of six clients take about as long as two
fits. The coalitions' servers are in :mod:`flsv.retraining.coalition_servers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flsv._lightning.evaluation import as_given, tolerance
from flsv._lightning.patches import callbacks_of
from flsv.configuration.federation_config import FederationConfig
from flsv.core import ALONE, Ranks, State
from flsv.core.parameter_space import ParameterSpace
from flsv.engines.one_process import shared_space
from flsv.games.coalition_training import make_evaluator
from flsv.games.coalition_utility import utility_of
from flsv.games.copy_module import copy_module
from flsv.games.retrained_utility import RetrainedUtility
from flsv.retraining.coalition_servers import servers_of, unlike_alone
from flsv.sampling import FixedCohort
from flsv.training.client_manager import ClientManager
from flsv.training.cohort import CohortLoader
from flsv.training.rows.kernel import RowTraining, SharedBatches, clipping, models_of, states_of
from flsv.training.rows.row_checks import moves_batches, not_batched, not_by_rounds, strange_hooks
from flsv.training.rows.row_step import batched_steps
from flsv.training.rows.row_trial import why_not_rows
from flsv.training.rows.step_watch import GENERATORS
from flsv.training.slots import Slots
from flsv.training.store import ClientStore
from flsv.training.turn import optimizer_slots
from flsv.uploads import UploadContext, sanitize_report, upload
from flsv.utilities import progress
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs

#: Largest distance between two models that must be equal: relative to the distance that they have moved; as a multiple
#: of the precision's tolerance for one model; and as a multiple of the distance that rounding causes.
TOLERANCE, TOLERANCES, FACTOR = 0.01, 10.0, 3.0
#: Coalitions that are trained for a check: the full coalition, the empty one, and the full one from an initial model
#: that is changed by the relative amount NUDGE, to measure how rounding grows.
CHECKED, NUDGE = (True, False, True), 1e-6
#: Largest size in bytes of the models that are trained at once, with all copies; and the smallest number of models.
BYTES, LEAST = 2**30, 8
#: Number of copies of each model in memory: before the round, in training, after the round, gradient, optimizer state.
COPIES = 6


class NotSideBySide(ConfigurationError):
    """Error: coalitions cannot be trained side by side; the message gives the reason."""


class SideBySideUtility:
    """Utility of K coalitions, ``utility(masks: bool [K, n]) -> float64 [K]``, from training them all at once.

    The utilities are those of :class:`flsv.games.RetrainedUtility`. Each rank trains a part of the coalitions. The full
    coalition is trained both side by side and alone, and an error is raised if the two models differ.

    Args:
        alone: the utility that trains one coalition after the other; it trains the full coalition alone, and holds the
            data, the module, the metric and the ranks.
        seed: the run's seed.
        compare: whether to train the full coalition alone as well, and compare.

    Raises:
        NotSideBySide: in a call: the federation, the module or its optimizer cannot be trained side by side; the
            message gives the reason.
    """

    def __init__(self, alone: RetrainedUtility, seed: int, compare: bool = True) -> None:
        self._alone, self._seed, self._compare = alone, seed, compare
        self.num_players = alone.num_players

    def __call__(self, masks: Tensor) -> Tensor:
        found: Tensor | NotSideBySide
        try:
            found = self._play(masks)
        except Exception as error:  # any error of a training_step on tensors with one more dimension
            named = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
            found = NotSideBySide(f"{named}{error}")
            found.__cause__ = error
        parts = self._alone.ranks.all_gather(found, "coalitions side by side")
        for part in parts:  # an error on one rank is raised on all ranks
            if isinstance(part, NotSideBySide):
                raise part
        utilities = torch.empty(len(masks), *parts[0].shape[1:], dtype=parts[0].dtype)
        for rank, part in enumerate(parts):
            utilities[rank :: len(parts)] = part[: len(utilities[rank :: len(parts)])]
        return utilities

    def _play(self, masks: Tensor) -> Tensor:
        trained = self._train(masks)
        real = self._alone.model
        if self._compare and real is not None:  # this rank has trained the coalition of all
            check_same(trained.checked, real[0], trained.tolerance)
        return utility_of(trained.scores, self._alone.metric)

    def _train(self, masks: Tensor) -> CoalitionTraining:
        """Train this rank's part of the coalitions ``masks [K, n]``; the empty coalition if this part has none."""
        ranks = self._alone.ranks
        own = masks[ranks.rank :: ranks.size]
        masks = own if len(own) else masks[:1].new_zeros(1, self.num_players)
        alone, everybody = self._alone, range(self.num_players)
        trainer = alone.trainer(FixedCohort(everybody))
        loop = find_loop(trainer)
        if why := _why_not(loop.config):  # before anything is trained
            raise ConfigurationError(f"{why}.")
        if self._compare:
            alone(torch.ones(1, self.num_players, dtype=torch.bool))
            trainer = alone.trainer(FixedCohort(everybody))
            loop = find_loop(trainer)
        training = CoalitionTraining(loop, masks, self._seed, alone.initial, self._scores, ranks)
        callbacks_of(trainer)[:] = [training if each is loop else each for each in callbacks_of(trainer)]
        trainer.fit(copy_module(alone.module), alone.data)
        return training

    def _scores(self, trainer: L.Trainer, space: ParameterSpace, models: Tensor) -> Any:
        return make_evaluator(trainer, space, self._alone.data, self._alone.metric)(models)


def check_same(models: Tensor, real: Tensor, allowed: float = TOLERANCE) -> None:
    """Check that the full coalition's model, trained side by side, equals the model of its run alone.

    Training amplifies rounding: for a convolutional network with a large learning rate, to a fifth of the distance that
    the model moves. The allowed difference is therefore measured: the full coalition is trained once more from an
    initial model that is changed by a millionth.

    Args:
        models: ``[3, P]``, the models of :attr:`CoalitionTraining.checked`.
        real: ``[P]``, the model of the full coalition's run alone.
        allowed: the difference that is always allowed, relative to the distance that the model has moved.

    Raises:
        ConfigurationError: the two models differ by more than rounding.
    """
    mine, start, nudged = models.to(real)
    way = (real - start).norm().clamp(min=1e-12)
    apart, rounding = float((mine - real).norm() / way), float((mine - nudged).norm() / way)
    if not apart <= max(allowed, FACTOR * rounding):
        raise ConfigurationError(
            "the coalition of all clients, trained side by side with others, has "
            f"another model than the run itself (they differ by {100 * apart:.1f} % of the distance "
            "that the model moved): "
            "the module, its optimizer or its schedule does something that training side by side does not. Use "
            "flsv.games.RetrainedUtility."
        )


def find_loop(trainer: L.Trainer) -> Any:
    """Return the FederatedLoop among a trainer's callbacks."""
    return next(each for each in callbacks_of(trainer) if hasattr(each, "without_files"))


class CoalitionTraining(L.Callback):
    """Callback that replaces a FederatedLoop: it trains all coalitions at the start of training, then ends the fit.

    Args:
        loop: the federation's loop.
        masks: bool ``[K, n]``, the members of each coalition; the empty coalition's model is not trained.
        seed: the seed of the clients' batches.
        initial: the module's ``state_dict`` to start from; None: the module's present weights.
        evaluate: a function that is called within the fit with the trainer, the map between the module and its vectors,
            and the models ``[K, P]``, and returns the ``scores``.
        ranks: all processes that train coalitions; all start from the first process's weights.

    Attributes:
        models: ``[K, P]``, the models after the last round.
        checked: ``[3, P]``, the models that :func:`check_same` compares: the full coalition's model, its initial model,
            and the full coalition's model from an initial model that is changed by a millionth.
        scores: the scores of ``models``, from ``evaluate``.
        tolerance: the allowed difference in the trainer's precision, for :func:`check_same`.

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
        ranks: Ranks = ALONE,
    ) -> None:
        checked = torch.tensor(CHECKED)[:, None].expand(-1, masks.shape[1])
        self._loop, self._seed, self._initial = loop, seed, initial
        self._masks = torch.cat([checked, masks])
        self._evaluate, self._ranks = evaluate, ranks
        self.models, self.checked, self.scores = torch.empty(0), torch.empty(0), None  # type: Tensor, Tensor, Any
        self._trainer: Any = None
        self.tolerance = TOLERANCE
        self._left = False  # whether batches reach the module unchanged

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._initial is not None or self._ranks.size > 1:
            initial = pl_module.state_dict() if self._initial is None else self._initial
            pl_module.load_state_dict(self._ranks.broadcast(0, initial, "the weights that coalitions start from"))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.should_stop, trainer.fit_loop.min_epochs = True, 0
        config = self._loop.config
        why = _why_not(config) or not_batched(trainer, None, config.optimizer_state, schedules=True)
        if why := why or not_by_rounds(trainer) or _hooks_of_rounds(trainer):
            raise ConfigurationError(f"{why}.")
        self._trainer, (self._space, _) = trainer, shared_space(pl_module, config)
        if why := why_not_rows(trainer, self._space, self._seed, GENERATORS):
            raise ConfigurationError(f"{why}.")
        self.tolerance = min(TOLERANCE, TOLERANCES * tolerance(trainer))
        models = self._train()
        self.checked, self.models = models[: len(CHECKED)], models[len(CHECKED) :]
        self.scores = self._evaluate(trainer, self._space, self.models)

    def _train(self) -> Tensor:
        """Train all coalitions for all rounds, and return their models ``[3 + K, P]``, the checked ones first."""
        trainer, space, config = self._trainer, self._space, self._loop.config
        module, data, metrics = trainer.lightning_module, trainer.datamodule, self._loop.contribution_metrics
        size = space.size * space.dtype.itemsize
        chunk = BYTES // (COPIES * size)
        if chunk < LEAST:
            raise ConfigurationError(
                f"{LEAST} models of {size / 2**20:.0f} MB, with the memory that their training takes, "
                "are too large to train at once."
            )
        for optimizer in trainer.optimizers:
            optimizer._opt_called = True  # torch warns of a schedule before a step
        self._store = ClientStore()
        self._slots = Slots(optimizer_slots(trainer, "reset"), self._store)
        algorithm: Any = config.client_algorithm
        change, clip = None if algorithm is None else algorithm.change, clipping(trainer)
        self._kernel = RowTraining(module, trainer.optimizers[0], clip, shared=True, change=change)
        models = space.read(module).expand(len(self._masks), -1).clone()
        noise = torch.randn(space.size, generator=torch.Generator().manual_seed(0), dtype=models.dtype)
        models[len(CHECKED) - 1] *= 1 + NUDGE * noise.to(models.device)
        masks = self._masks.to(module.device)
        metrics.bind(data.num_clients, data.num_classes, data.class_names, data.known_class_counts, data.client_names)
        info = config.federation_info(models[0], space, data, self._seed, trainer.optimizers, metrics.metrics)
        servers = servers_of(info, masks, models)
        manager = ClientManager(trainer, data, space, self._store)
        self.clients = manager.clients
        self._kept: dict[tuple[int, int], State] = {}
        progress.start("rounds", trainer.max_epochs or 0)
        for index in range(trainer.max_epochs or 0):
            trainer.fit_loop.epoch_progress.current.completed = index  # current_epoch in a step
            servers.begin_round(masks, models, index)
            for rows in torch.arange(len(masks), device=masks.device).split(chunk):
                self._train_clients(index, rows, masks[rows], models, servers)
            models = servers.end_round(models, manager.clients, manager.server)
            if not models.isfinite().all():
                raise ConfigurationError("some coalitions' models have NaN.")
            self._store.commit()
            self._step_schedules("epoch", index + 1)
            progress.advance()
        progress.finish()
        trainer.fit_loop.epoch_progress.current.completed = 0
        return models

    def _train_clients(self, index: int, places: Tensor, masks: Tensor, models: Tensor, servers: Any) -> None:
        """Train the clients of R coalitions in a round, and hand the trained models to the coalitions' servers.

        Args:
            index: the round's index, from 0.
            places: int64 ``[R]``, the coalitions' rows in ``models``.
            masks: bool ``[R, n]``, the members of these coalitions.
            models: the models of all coalitions, at the start of the round.
            servers: the servers of all coalitions.
        """
        trainer, config, module = self._trainer, self._loop.config, self._trainer.lightning_module
        loader = CohortLoader(
            trainer.datamodule,
            masks.any(0).nonzero().flatten().tolist(),
            seed=self._seed,
            round_index=index,
            local_epochs=config.local_epochs,
            limit=trainer.limit_train_batches,
        )
        batches = iter(loader)
        for visit in loader.visits:
            rows = places[masks[:, visit.client]]
            drawn = self._begun(islice(batches, visit.batches), index, visit.client)
            shared = SharedBatches(drawn, visit.batches, len(rows))
            self._slots.enter(visit.client)
            self._slots.begin_batch(0, visit.batches)
            self._steps, self._batches = 0, visit.batches
            states = states_of(self._space, module, models[rows])
            with batched_steps(trainer):
                trained, losses = self._kernel.train(states, shared, self._after_step)
            self._slots.leave(stage=True)
            sent = models_of(self._space, trained, models)
            self._upload(index, visit.client, rows, models, sent, losses)
            servers.receive(visit.client, rows, sent, visit.batches, losses)

    def _upload(self, index: int, client: int, rows: Tensor, models: Tensor, sent: Tensor, losses: Tensor) -> None:
        """Apply a client's uploads to the models and losses of the R coalitions that it is in, in place.

        Args:
            index: the round's index, from 0.
            client: the client's number.
            rows: int64 ``[R]``, these coalitions' rows in ``models``.
            models: the models of all coalitions, at the start of the round.
            sent: ``[R, P]``, the trained models, which are overwritten.
            losses: ``[R]``, their training losses, which are overwritten.
        """
        uploads, clients, cut = self._loop.config.uploads, self._masks.shape[1], self._space.num_parameters
        for place, row in enumerate(rows.tolist() if uploads else ()):
            kept = self._kept.setdefault((row, client), {})
            context = UploadContext(client, clients, cut, index, self._seed, kept)
            sent[place], _ = upload(uploads, sent[place], models[row], models[row], context)
            losses[place] = sanitize_report(uploads, context, "loss", float(losses[place]))

    def _after_step(self) -> None:
        self._steps += 1
        self._step_schedules("step", self._steps)
        self._slots.begin_batch(self._steps, self._batches)

    def _step_schedules(self, interval: str, count: int) -> None:
        """Step the schedulers of one interval.

        Args:
            interval: ``"epoch"`` after a round, ``"step"`` after a client's batch.
            count: the number of rounds or of the client's batches so far.
        """
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == interval and count % config.frequency == 0:
                config.scheduler.step()

    def _begun(self, batches: Iterator[Any], round_index: int, client: int) -> Iterator[Any]:
        """Yield a client's batches as ``training_step`` gets them; seed the random numbers after the first batch.

        The random numbers of the later batches and of the steps are then the same as in a federation of one
        coalition."""
        first = self._given(next(batches))
        seed_global_rngs(self._seed, "train", round_index, client)
        yield first
        for batch in batches:
            yield self._given(batch)

    def _given(self, batch: Any) -> Any:
        """Return a batch as ``training_step`` gets it; after a first batch that needs no change, batches are returned
        as they are."""
        if self._left:
            return batch
        given = as_given(self._trainer, batch)
        same = all(a is b for a, b in zip(tree_leaves(given), tree_leaves(batch)))
        self._left = same and not moves_batches(self._trainer)
        return given


def _hooks_of_rounds(trainer: L.Trainer) -> str | None:
    """Explain that the module or a callback has a hook between rounds, which would not be called; None: there is none.

    A module's hook at the end of a round is allowed, since most only log; if it does more, :func:`check_same` fails."""
    module, mine = trainer.lightning_module, ("on_train_start", "on_train_epoch_start")
    found: list[tuple[Any, str]] = [(module, hook) for hook in mine if is_overridden(hook, module, L.LightningModule)]
    found += [(each, hooks[0]) for each, hooks in strange_hooks(trainer, (*mine, "on_train_epoch_end"))]
    return f"{type(found[0][0]).__name__} defines {found[0][1]}, which would not be called" if found else None


def _why_not(config: FederationConfig) -> str | None:
    """Explain why coalitions of a federation cannot be trained side by side; None: the configuration allows it."""
    if config.share != "all":
        return f"with share={config.share!r} a part of the model stays at the clients"
    if config.optimizer_state != "reset":
        return 'with optimizer_state="persist" optimizers go on'
    if callable(config.engine):
        return "the clients do not run in this process"
    return unlike_alone(config, config.client_algorithm, losses=True)
