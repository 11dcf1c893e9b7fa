"""CoalitionRounds: trains the federations of many coalitions, round by round, all models of a client at once.

A client has the same batches in every coalition, since batches depend on the seed, the round and the client only. So
the models of all coalitions that have drawn a client are trained on its batches at once, as rows of one batched model
(:mod:`flsv.training.rows.kernel`). Each coalition draws its own cohorts among its members
(:meth:`flsv.sampling.ClientSampler.among`); the models of coalitions that have not drawn the client stay as they are.
The coalitions' servers are in :mod:`flsv.retraining.coalition_servers`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from flsv._lightning.evaluation import as_given
from flsv.configuration.federation_config import FederationConfig
from flsv.core import ALONE, Client, LocalData, Ranks, State
from flsv.core.parameter_space import ParameterSpace
from flsv.retraining.coalition_servers import servers_of
from flsv.sampling import ClientSampler, FullParticipation
from flsv.sampling.base import cohort_of
from flsv.training.cohort_loader import CohortLoader
from flsv.training.rows.kernel import RowTraining, SharedBatches, clipping, models_of, states_of
from flsv.training.rows.row_checks import moves_batches
from flsv.training.rows.row_step import batched_steps
from flsv.training.slots import Slots
from flsv.uploads import UploadContext, sanitize_report, upload
from flsv.utilities.choices import Participation
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for, seed_global_rngs

#: Largest size in bytes of the models that are trained at once, with all copies; and the smallest number of models.
BYTES, LEAST = 2**30, 8
#: Number of copies of each model in memory: before the round, in training, after the round, gradient, optimizer state.
COPIES = 6
#: A client's training in a round, see :meth:`CoalitionRounds._train_clients`.
Training = tuple[int, Tensor, Tensor, int, Tensor]


def sampler_of(loop: Any, participation: Participation = "drawn") -> ClientSampler:
    """Return the sampler from which each coalition's own sampler is made by :meth:`flsv.sampling.ClientSampler.among`.

    Args:
        loop: the :class:`flsv.FederatedLoop` of the whole federation.
        participation: ``"drawn"``: each coalition draws its own cohorts among its members, as many clients as the run
            draws; ``"all"``: all members of a coalition train in every round.
    """
    return loop.config.sampler if participation == "drawn" else FullParticipation()


def samplers_among(sampler: ClientSampler, masks: Tensor) -> list[ClientSampler | None]:
    """Return K samplers, each of which draws among a coalition's members; None in the place of the empty coalition.

    Args:
        sampler: the sampler of the whole federation.
        masks: bool ``[K, n]``, the members of each coalition.

    Raises:
        ConfigurationError: the sampler cannot draw among the members of a coalition.
    """
    coalitions: list[list[int]] = [mask.nonzero().flatten().tolist() for mask in masks.cpu()]
    return [sampler.among(members) if members else None for members in coalitions]


class CoalitionRounds:
    """Training of the federations of K coalitions side by side, one round after the other.

    Args:
        trainer: the trainer, with its module on its device and its optimizers set up.
        loop: the :class:`flsv.FederatedLoop` of the whole federation, with its metrics bound to the clients.
        space: the map between the module and its vectors ``[P]``.
        masks: bool ``[K, n]``, the members of each coalition; the empty coalition's model is not trained.
        models: ``[K, P]``, the models that the coalitions start from.
        seed: the seed of the clients' batches and of the draws.
        limit: Lightning's ``limit_train_batches``, per client and local epoch.
        saved: the ``state_dict`` of a checkpoint; None: a new run begins.
        slots: the parts of the trainer's state that are kept per client; None: clients keep no such state.
        ranks: the processes among which the clients' trainings are divided; each process gets all results.

    Raises:
        ConfigurationError: models are too large to be trained at once, or the sampler cannot draw among some clients.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        loop: Any,
        space: ParameterSpace,
        masks: Tensor,
        models: Tensor,
        seed: int,
        limit: float,
        saved: Mapping[str, Any] | None = None,
        slots: Slots | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        module, config = trainer.lightning_module, loop.config
        size = space.size * space.dtype.itemsize
        self._chunk = BYTES // (COPIES * size)
        if self._chunk < LEAST:
            raise ConfigurationError(
                f"{LEAST} models of {size / 2**20:.0f} MB and what their training takes are too large to train at once."
            )
        algorithm: Any = config.client_algorithm
        change, clip = None if algorithm is None else algorithm.change, clipping(trainer)
        self._trainer: Any = trainer
        self._kernel = RowTraining(module, trainer.optimizers[0], clip, shared=True, change=change)
        self._config: FederationConfig = config
        self._space, self._seed, self._limit, self._slots = space, seed, limit, slots
        self._masks = masks.to(module.device)
        # What uploads keep is with the process that trains the client: then each process trains all clients.
        self._ranks = ALONE if config.uploads else ranks
        held: Any = trainer  # Lightning does not declare its data module
        data, metrics = held.datamodule, loop.contribution_metrics.metrics
        info = config.federation_info(models[0], space, data, seed, trainer.optimizers, metrics)
        self._samplers = samplers_among(config.sampler, masks)
        self._servers = servers_of(info, masks, models, None if saved is None else saved["servers"], self._samplers)
        self._kept: dict[int, dict[int, State]] = {} if saved is None else saved["kept"]
        self._drawn(0)  # a sampler that draws others than members says so before anything is trained
        self._left = False  # whether batches reach the module unchanged

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the next round needs, beside the models."""
        return {"servers": self._servers.state_dict(), "kept": self._kept}

    def train(
        self,
        index: int,
        models: Tensor,
        clients: Sequence[Client],
        server_data: LocalData | None,
        lenient: bool = False,
    ) -> Tensor:
        """Train a round of all coalitions, and return their next models ``[K, P]``.

        Args:
            index: the round's index, from 0.
            models: ``[K, P]``, the coalitions' models at the start of the round.
            clients: all n clients, for metrics that need their answers.
            server_data: the server's validation set.
            lenient: whether a coalition keeps its model if all its updates, or its next model, are not finite.
        """
        drawn = self._drawn(index)
        servers, trainings = self._servers, list[Training]()
        servers.begin_round(drawn, models, index)
        for rows in torch.arange(len(drawn), device=drawn.device).split(self._chunk):
            cohort: list[int] = drawn[rows].any(0).nonzero().flatten().tolist()
            own = self._train_clients(index, cohort[self._ranks.rank :: self._ranks.size], rows, drawn[rows], models)
            if self._ranks.size == 1:
                for training in own:
                    servers.receive(*training)
            else:
                trainings += [part for parts in self._ranks.all_gather([*own], "coalitions' rows") for part in parts]
        for client, places, sent, steps, losses in sorted(trainings, key=lambda training: training[0]):
            servers.receive(client, places.to(drawn.device), sent.to(models), steps, losses.to(models))
        return servers.end_round(models, clients, server_data, lenient)

    def _drawn(self, index: int) -> Tensor:
        """Draw the coalitions' cohorts for a round, bool ``[K, n]``."""
        drawn, n = torch.zeros_like(self._masks), self._masks.shape[1]
        clients: Any = range(n)  # samplers that ask clients do not draw among some of them
        for row, sampler in zip(drawn, self._samplers):
            if sampler is not None:
                draw = generator_for(self._seed, "cohort", index)
                row[cohort_of(sampler, n, {}, draw, index, clients, torch.empty(0))] = True
        return drawn

    def _train_clients(
        self, index: int, clients: list[int], places: Tensor, drawn: Tensor, models: Tensor
    ) -> Iterator[Training]:
        """Train clients in the coalitions that have drawn them.

        Args:
            index: the round's index, from 0.
            clients: the ids of the clients to train.
            places: int64 ``[R]``, the coalitions' rows in ``models``.
            drawn: bool ``[R, n]``, the cohorts of these coalitions.
            models: the models of all coalitions, at the start of the round.

        Yields:
            For each client its id; the int64 rows in ``models`` of the r coalitions that have drawn it; the models
            ``[r, P]`` that it sends; the number of steps; and the mean training losses ``[r]``.
        """
        trainer, config, module = self._trainer, self._config, self._trainer.lightning_module
        loader = CohortLoader(
            trainer.datamodule,
            clients,
            seed=self._seed,
            round_index=index,
            local_epochs=config.local_epochs,
            limit=self._limit,
        )
        batches = iter(loader)
        for visit in loader.visits:
            rows = places[drawn[:, visit.client]]
            begun = self._begun(islice(batches, visit.batches), index, visit.client)
            shared = SharedBatches(begun, visit.batches, len(rows))
            self._steps, self._batches = 0, visit.batches
            if self._slots is not None:
                self._slots.enter(visit.client)
                self._slots.begin_batch(0, visit.batches)
            states = states_of(self._space, module, models[rows])
            with batched_steps(trainer):
                trained, losses = self._kernel.train(states, shared, self._after_step)
            if self._slots is not None:
                self._slots.leave(stage=True)
            sent = models_of(self._space, trained, models)
            self._upload(index, visit.client, rows, models, sent, losses)
            yield visit.client, rows, sent, visit.batches, losses

    def _upload(self, index: int, client: int, rows: Tensor, models: Tensor, sent: Tensor, losses: Tensor) -> None:
        """Apply a client's uploads to the models and losses of the R coalitions that have drawn it, in place.

        Args:
            index: the round's index, from 0.
            client: the client's number.
            rows: int64 ``[R]``, these coalitions' rows in ``models``.
            models: the models of all coalitions, at the start of the round.
            sent: ``[R, P]``, the trained models, which are overwritten.
            losses: ``[R]``, their training losses, which are overwritten.
        """
        uploads, clients, cut = self._config.uploads, self._masks.shape[1], self._space.num_parameters
        for place, row in enumerate(rows.tolist() if uploads else ()):
            kept = self._kept.setdefault(row, {}).setdefault(client, {})
            context = UploadContext(client, clients, cut, index, self._seed, kept)
            sent[place], _ = upload(uploads, sent[place], models[row], models[row], context)
            losses[place] = sanitize_report(uploads, context, "loss", float(losses[place]))

    def _after_step(self) -> None:
        self._steps += 1
        if self._slots is not None:
            epoch = self._batches // self._config.local_epochs
            step_schedules(self._trainer, "step", (self._steps - 1) % epoch + 1)
            self._slots.begin_batch(self._steps, self._batches)

    def _begun(self, batches: Iterator[Any], round_index: int, client: int) -> Iterator[Any]:
        """Yield a client's batches as ``training_step`` gets them; seed the global generators after the first batch.

        A federation of one coalition seeds them at the same point, so that later batches and all steps draw the same
        random numbers."""
        first = self._given(next(batches))
        seed_global_rngs(self._seed, "train", round_index, client)
        yield first
        for batch in batches:
            yield self._given(batch)

    def _given(self, batch: Any) -> Any:
        """Convert a batch's precision and move it to the device, as before ``training_step``.

        If that changes no tensor of a batch and no transfer hook is overridden, later batches are returned unchanged.
        """
        if self._left:
            return batch
        given = as_given(self._trainer, batch)
        same = all(a is b for a, b in zip(tree_leaves(given), tree_leaves(batch)))
        self._left = same and not moves_batches(self._trainer)
        return given


def step_schedules(trainer: Any, interval: str, count: int) -> None:
    """Step the schedulers of one interval.

    Args:
        trainer: the trainer.
        interval: ``"epoch"`` after a round, ``"step"`` after a client's batch.
        count: the number of rounds, or of the batches of the client's local epoch, so far.
    """
    for config in trainer.lr_scheduler_configs:
        if config.interval == interval and count % config.frequency == 0:
            config.scheduler.step()
