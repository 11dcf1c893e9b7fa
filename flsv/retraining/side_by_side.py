"""Trains the federations of many coalitions side by side.

A client sees the same batches in every coalition: what it sees depends on the seed, the round and the client only. So
the models of all coalitions that a client is in are trained on its batches at once, as rows of one batched model
(:mod:`flsv.training.rows.kernel`). To rounding it is what :class:`flsv.games.RetrainedUtility` comes to, which
trains them one after the other; for small models all coalitions of six clients take about as long as two fits.

The servers' part is in :mod:`flsv.retraining.coalition_servers`.
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
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import seed_global_rngs

#: How far the models may be apart relative to how far they went where every step rounds, and in the tolerances of one
#: model otherwise; and in terms of how far rounding puts them apart.
TOLERANCE, TOLERANCES, FACTOR = 0.01, 10.0, 3.0
#: All, nobody, and all from an initial model that is changed by so much, to see how far rounding grows.
CHECKED, NUDGE = (True, False, True), 1e-6
#: Bytes of the models that are trained at once, with their gradients, and how many there must be to be worth it.
BYTES, LEAST = 2**30, 8
#: Of each model: itself, before the round and after it, its gradient and what an optimizer keeps.
COPIES = 6


class NotSideBySide(ConfigurationError):
    """Coalitions cannot be trained side by side, and why."""


class SideBySideUtility:
    """``utility(masks: bool [K, n]) -> float64 [K]``: as :class:`flsv.games.RetrainedUtility`, all
    coalitions at once, or each rank's share of them.

    The coalition of all clients is trained in both ways. Where they come to different models, it is refused.

    Args:
        alone: the same game, one coalition after the other; it trains the coalition of all, and has the ranks.
        seed: of the run.
        compare: whether to train the coalition of all in both ways; otherwise only side by side.

    Raises:
        NotSideBySide: when it is asked: the federation, the module or its optimizer does something that training side
            by side does not, and what.
    """

    def __init__(self, alone: RetrainedUtility, seed: int, compare: bool = True) -> None:
        self._alone, self._seed, self._compare = alone, seed, compare
        self.num_players = alone.num_players

    def __call__(self, masks: Tensor) -> Tensor:
        found: Tensor | NotSideBySide
        try:
            found = self._play(masks)
        except Exception as error:  # somebody's training_step on tensors with one more dimension
            named = "" if isinstance(error, ConfigurationError) else f"{type(error).__name__}: "
            found = NotSideBySide(f"{named}{error}")
            found.__cause__ = error
        parts = self._alone.ranks.all_gather(found, "coalitions side by side")
        for part in parts:  # what goes wrong at one rank is a reason for all
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
        """This rank's share of the coalitions; the empty one, where there are fewer than ranks."""
        ranks = self._alone.ranks
        own = masks[ranks.rank :: ranks.size]
        masks = own if len(own) else masks[:1].new_zeros(1, self.num_players)
        alone, everybody = self._alone, range(self.num_players)
        trainer = alone.trainer(FixedCohort(everybody))
        loop = loop_of(trainer)
        if why := _why_not(loop.config):  # before anything is trained
            raise ConfigurationError(f"{why}.")
        if self._compare:
            alone(torch.ones(1, self.num_players, dtype=torch.bool))
            trainer = alone.trainer(FixedCohort(everybody))
            loop = loop_of(trainer)
        training = CoalitionTraining(loop, masks, self._seed, alone.initial, self._scores, ranks)
        trainer.callbacks = [training if each is loop else each for each in trainer.callbacks]  # type: ignore[attr-defined]
        trainer.fit(copy_module(alone.module), alone.data)
        return training

    def _scores(self, trainer: L.Trainer, space: ParameterSpace, models: Tensor) -> Any:
        return make_evaluator(trainer, space, self._alone.data, self._alone.metric)(models)


def check_same(models: Tensor, real: Tensor, allowed: float = TOLERANCE) -> None:
    """Compare two ways to the same model.

    Training amplifies rounding, of a network with convolutions and a large learning rate to a fifth of the way that it
    goes. So the allowance is by what becomes of a start that is changed by a millionth.

    Args:
        models: ``[3, P]``, :attr:`CoalitionTraining.checked`.
        real: ``[P]``, of the run itself.
        allowed: how far they may be apart, relative to how far they went, however small rounding is.

    Raises:
        ConfigurationError: they are further apart than rounding.
    """
    mine, start, nudged = models.to(real)
    way = (real - start).norm().clamp(min=1e-12)
    apart, rounding = float((mine - real).norm() / way), float((mine - nudged).norm() / way)
    if not apart <= max(allowed, FACTOR * rounding):
        raise ConfigurationError(
            "the coalition of all clients, trained side by side with others, comes to "
            f"another model than the run itself ({100 * apart:.1f} % of the way that it went lie between them): the "
            "module, its optimizer or its schedule does something that training side by side does not. Use "
            "flsv.games.RetrainedUtility."
        )


def loop_of(trainer: L.Trainer) -> Any:
    """The loop among a trainer's callbacks."""
    return next(each for each in callbacks_of(trainer) if hasattr(each, "without_files"))


class CoalitionTraining(L.Callback):
    """Trains all coalitions before the first round, in the place of a loop, and ends the fit.

    Args:
        loop: the federation's.
        masks: bool ``[K, n]``, row by row who is in the coalition; a row without anybody is the untrained model.
        seed: of the clients' batches.
        initial: the module's ``state_dict`` to start from; None: as it is.
        evaluate: given the trainer, the map between models and vectors and the models ``[K, P]``, gives ``scores``;
            called within the fit.
        ranks: that train other coalitions; all start from what the first one does.

    Attributes:
        models: ``[K, P]``, after the last round.
        checked: ``[3, P]``, what :func:`check_same` compares: the model of all; what it started from; and the model of
            all from a start that is another by rounding.
        scores: of ``models``.
        tolerance: by the trainer's precision, for :func:`check_same`.

    Raises:
        ConfigurationError: in a fit: a module, optimizer or federation that cannot be trained so.
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
        self._left = False  # whether batches are left as they are on their way to the module

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
        trainer, space, config = self._trainer, self._space, self._loop.config
        module, data, metrics = trainer.lightning_module, trainer.datamodule, self._loop.contribution_metrics
        size = space.size * space.dtype.itemsize
        chunk = BYTES // (COPIES * size)
        if chunk < LEAST:
            raise ConfigurationError(
                f"{LEAST} models of {size / 2**20:.0f} MB and what their training takes are too large to train at once."
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
        for index in range(trainer.max_epochs or 0):
            trainer.fit_loop.epoch_progress.current.completed = index  # what current_epoch tells a step
            servers.begin_round(masks, models, index)
            for rows in torch.arange(len(masks), device=masks.device).split(chunk):
                self._train_clients(index, rows, masks[rows], models, servers)
            models = servers.end_round(models, manager.clients, manager.server)
            if not models.isfinite().all():
                raise ConfigurationError("some coalitions come to models with NaN.")
            self._store.commit()
            self._step_schedules("epoch", index + 1)
        trainer.fit_loop.epoch_progress.current.completed = 0
        return models

    def _train_clients(self, index: int, places: Tensor, masks: Tensor, models: Tensor, servers: Any) -> None:
        """The clients of the coalitions ``masks [R, n]``, which are at these places among all ``models [K, P]``."""
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
        """What a client's uploads make of its models ``[R, P]`` and losses ``[R]``, in place."""
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
        """By rounds they are the federation's, by batches a client's, which continues them in its next round."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == interval and count % config.frequency == 0:
                config.scheduler.step()

    def _begun(self, batches: Iterator[Any], round_index: int, client: int) -> Iterator[Any]:
        """Batches as they are needed, from the second on out of the random numbers that the client's steps draw from:
        so it is where it trains alone."""
        first = self._given(next(batches))
        seed_global_rngs(self._seed, "train", round_index, client)
        yield first
        for batch in batches:
            yield self._given(batch)

    def _given(self, batch: Any) -> Any:
        """As the module gets it. Where nothing happened to one on its way, nothing happens to the others."""
        if self._left:
            return batch
        given = as_given(self._trainer, batch)
        same = all(a is b for a, b in zip(tree_leaves(given), tree_leaves(batch)))
        self._left = same and not moves_batches(self._trainer)
        return given


def _hooks_of_rounds(trainer: L.Trainer) -> str | None:
    """Say whose hooks between rounds would not be called; None: nobody's. What a module does at the end of a round is
    most often to log: whether it does more, the coalition of all shows."""
    module, mine = trainer.lightning_module, ("on_train_start", "on_train_epoch_start")
    found: list[tuple[Any, str]] = [(module, hook) for hook in mine if is_overridden(hook, module, L.LightningModule)]
    found += [(each, hooks[0]) for each, hooks in strange_hooks(trainer, (*mine, "on_train_epoch_end"))]
    return f"{type(found[0][0]).__name__} defines {found[0][1]}, which would not be called" if found else None


def _why_not(config: FederationConfig) -> str | None:
    """Why coalitions of this federation cannot be trained side by side; None: as far as it can be seen, they can."""
    if config.share != "all":
        return f"with share={config.share!r} a part of the model stays at the clients"
    if config.optimizer_state != "reset":
        return 'with optimizer_state="persist" optimizers go on'
    if callable(config.engine):
        return "the clients run elsewhere"
    return unlike_alone(config, config.client_algorithm, losses=True)
