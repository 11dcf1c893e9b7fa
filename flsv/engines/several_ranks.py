"""SeveralRanks: the engine that distributes the clients over processes."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.fit_loop import Phase
from flsv._lightning.rounding import MAX_ROUNDING
from flsv._lightning.several_processes import (
    LoggedValues,
    TrainingCounts,
    add_counts,
    counts_so_far,
)
from flsv.core import Channel, Client, ClientPlacement, ClientUpdate, LocalData, Round, ranks_of
from flsv.core.matrix import empty_rows
from flsv.data import FederatedDataModule
from flsv.engines.client_manager import ClientManager
from flsv.engines.engine import Engine, Instruct
from flsv.engines.ranks import share_weights
from flsv.training.client_batches import CohortLoader, LocalSteps
from flsv.training.client_values import ClientChanges
from flsv.utilities.seeding import global_rngs, restore_global_rngs, restore_torch_rngs, torch_rngs


class RankTraining(NamedTuple):
    """Results of one rank's training in a round, which are sent to all ranks."""

    #: The updates without their vectors, which are sent as rows of a matrix.
    updates: list[ClientUpdate]
    broken_clients: list[int]
    #: ``{client: model [P]}``, the trained models that differ from what the client has sent.
    unsent_models: dict[int, Tensor]
    changed_values: list[ClientChanges]
    counts: TrainingCounts
    #: States of Python's, NumPy's and torch's generators on the rank that has trained the last client, else None.
    generator_states: tuple[Any, ...] | None


class SeveralRanks(Engine):
    """Engine of one rank (process), which trains a part of the cohort's clients.

    Each client is trained and tested on one rank, which stores its state. Coalitions are distributed over all ranks.
    Every rank does all other work on the same numbers, and the ranks compare these numbers after every round.

    Args:
        trainer: the trainer, with its module on its device and its optimizers set up.
        data: the data module, with its samples assigned to clients.
        options: the further arguments of :class:`flsv.engines.engine.Engine`.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        *options: Any,
    ) -> None:
        self._strategy: Any = trainer.strategy
        self.ranks = ranks_of(trainer)
        steps: LocalSteps = options[-1]  # the last argument of Engine
        training_costs = []
        for work, num_samples in zip(steps.work_by_client.values(), data.num_samples.tolist()):
            cost = work.steps or work.epochs * num_samples
            training_costs.append(cost)
        self.placement = ClientPlacement(self.ranks, training_costs)
        share_weights(trainer.lightning_module, self.ranks)
        super().__init__(trainer, data, *options)
        self._logged_values: LoggedValues | None = None
        self._clients: list[int] = []
        self._all_trained: dict[int, Tensor] | None = None

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        clients = self.store.clients()
        self.placement.bind(clients)
        clients_of_rank = self.placement.mine(clients)
        # Every rank has read all clients' states from the checkpoint. It discards those of other ranks' clients.
        self.store.keep(clients_of_rank)
        super().begin_training(buffers)
        self._logged_values = LoggedValues(
            self.trainer, self._position, self._exchange_logged, self._is_idle
        )
        self._gather_states()

    def _make_manager(self) -> ClientManager:
        return ClientManager(
            self.trainer,
            self.data,
            self.space,
            self.store,
            self.placement,
            make_client=self._make_client,
        )

    def _make_client(self, client: int, data: LocalData, channel: Channel) -> Client:
        return Client(client, data, channel, self.placement, self.config.is_private)

    def _load(self, clients: list[int]) -> CohortLoader:
        self.placement.assign(clients)
        clients_of_rank = self.placement.mine(clients)
        if clients_of_rank:
            return super()._load(clients_of_rank)
        # Lightning ends a fit whose loader is empty, so an idle rank gets one batch, whose training is discarded.
        return CohortLoader(
            self.data,
            clients[:1],
            seed=self.state.seed,
            round_index=self.state.round_index,
            lengths=lambda *_: [1],
            is_idle=True,
        )

    @property
    def client(self) -> int | None:
        return None if self._is_idle() else super().client

    def _is_idle(self) -> bool:
        return not self._client_batches

    def _position(self) -> int:
        """Return the position in the cohort of the client that is training on this rank, or of its last client."""
        if self._is_idle():
            return len(self._clients)
        last_index = min(self._num_trained, len(self._client_batches) - 1)
        return self._clients.index(self._client_batches[last_index].client)

    def _train(self, batches: Any) -> None:
        # It stays True until all clients have trained or, after an error, until the fit is closed.
        self._strategy.within_round = True
        self._clients = list(self._instructions)
        self._all_trained = None  # set by `_exchange`
        self._counts_at_start = counts_so_far(self.trainer)
        if self._is_idle():
            self._train_idle_batch()
        else:
            super()._train(batches)
        if self.is_complete:
            self._strategy.within_round = False
            self._exchange()

    def _train_idle_batch(self) -> None:
        """Run Lightning's loop on one idle batch, while the other ranks train."""
        state = self.local_training.state
        state.begin_clients()
        # It runs as a client's training, so that the federation's schedulers do not step on the idle batch.
        self._steps.client = self._clients[0]
        state.enter()
        self.loop.train_epoch()
        state.leave(keep=False)

    def trained_models(self) -> dict[int, Tensor]:
        return super().trained_models() if self._all_trained is None else self._all_trained

    def _exchange(self) -> None:
        """Exchange what the ranks have trained in the round, so that each rank has the updates of all clients."""
        exchange_name = f"the updates of round {self.state.round_index}"
        counts = self._counts_of_round()
        trainings = self.ranks.all_gather(self._rank_training(counts), exchange_name)
        self._gather_updates(trainings, exchange_name)
        if self.config.evaluation.keeps:
            self._all_trained = self._sent_vectors()
            for training in trainings:
                self._all_trained |= training.unsent_models
        for training in trainings:
            self._restore_generators(training.generator_states)
        # Lightning's counters must include the steps of all ranks. They include this rank's already.
        counts_of_ranks = torch.tensor([training.counts for training in trainings])  # [ranks, 3]
        total_counts = TrainingCounts(*counts_of_ranks.sum(0).tolist())
        add_counts(self.trainer, total_counts - counts)

    def _rank_training(self, counts: TrainingCounts) -> RankTraining:
        """Describe what this rank has trained in the round, for the other ranks."""
        unsent_models = self._models_unlike_sent() if self.config.evaluation.keeps else {}
        generator_states = None
        is_idle = self._is_idle()
        has_last_client = not is_idle and self._client_batches[-1].client == self._clients[-1]
        if has_last_client:
            python_and_numpy = global_rngs()[:2]
            generator_states = (*python_and_numpy, *torch_rngs(self._matrix.device))
        no_vector = self._matrix.new_empty(0)
        return RankTraining(
            [replace(update, vector=no_vector) for update in self.updates],
            self.broken_clients,
            unsent_models=unsent_models,
            changed_values=self.local_training.state.values.changes_to_send(),
            counts=TrainingCounts() if is_idle else counts,
            generator_states=generator_states,
        )

    def _restore_generators(self, states: Any) -> None:
        """Continue with the random states of the rank that has trained the last client. Other ranks have none."""
        if states is not None:
            restore_global_rngs((*states[:3], None))
            restore_torch_rngs(states[2:], self._matrix.device)

    def _counts_of_round(self) -> TrainingCounts:
        """Return this rank's batches and steps in the round."""
        counts = counts_so_far(self.trainer) - self._counts_at_start
        # Lightning counts the last batch only after its hooks.
        return counts._replace(batches_that_stepped=counts.batches_that_stepped + 1)

    def _models_unlike_sent(self) -> dict[int, Tensor]:
        """Return those trained models that differ from what the clients have sent."""
        sent_vectors = self._sent_vectors()
        trained_models = super().trained_models()
        return {
            client: model
            for client, model in trained_models.items()
            if model is not sent_vectors[client]
        }

    def _sent_vectors(self) -> dict[int, Tensor]:
        return {update.client_id: update.vector for update in self.updates}

    def _gather_updates(self, trainings: Sequence[RankTraining], exchange_name: str) -> None:
        """Store the updates, the broken clients and the changed values of all ranks."""
        update_by_client = {}
        rank_by_client = {}
        for rank, training in enumerate(trainings):
            for update in training.updates:
                update_by_client[update.client_id] = update
                rank_by_client[update.client_id] = rank
        # In the order of the cohort, those that have sent an update.
        clients = [client for client in self._clients if client in update_by_client]

        matrix = empty_rows(len(clients), self.state.model(), self.trainer.default_root_dir)
        row_by_client = dict(zip(clients, matrix))
        for client, vector in self._sent_vectors().items():  # of this rank's clients
            row_by_client[client].copy_(vector)
        owners_of_rows = [rank_by_client[client] for client in clients]
        self.ranks.broadcast_rows(matrix, owners_of_rows, exchange_name)
        self._matrix = matrix
        self.updates = []
        for client, row in row_by_client.items():
            self.updates.append(replace(update_by_client[client], vector=row))

        broken_clients = set(chain.from_iterable(training.broken_clients for training in trainings))
        self.broken_clients = [client for client in self._clients if client in broken_clients]
        changed_values = [training.changed_values for training in trainings]
        self.local_training.state.values.merge(changed_values, clients)

    def settle(self) -> None:
        # A client that has a state stays on its rank. All ranks exchange which clients these are.
        clients_of_ranks = self.ranks.all_gather(
            sorted(self.store.clients()), "clients that have a state"
        )
        self.placement.bind(chain.from_iterable(clients_of_ranks))
        self._gather_states()

    def discard(self) -> bool:
        # The other ranks would wait for this rank at the end of the round.
        self.ranks.abort(f"its round {self.state.round_index + 1} ended before the last batch")
        return super().discard()

    def received_models(self, instruct: Instruct) -> dict[int, Tensor]:
        models_of_rank = super().received_models(instruct)
        return _merge_by_client(self.ranks.all_gather(models_of_rank, "the clients' own models"))

    def client_states(self) -> dict[int, Any]:
        """Return the states of this rank's clients. Rank 0 returns those of all clients, for checkpoints."""
        return self._states

    def close(self) -> None:
        self._strategy.within_round = False
        if self._logged_values is not None:
            self._logged_values.remove()
        super().close()

    def own_scores(self, instruct: Instruct) -> dict[str, Tensor]:
        clients_of_rank = self._clients_of_process()
        scores_of_rank = super().own_scores(instruct)  # name: [clients of this rank]
        parts = self.ranks.all_gather((clients_of_rank, scores_of_rank), "the clients' tests")
        all_scores = {}  # name: [n]
        for name in scores_of_rank:
            all_scores[name] = torch.full((self.state.num_clients,), float("nan"))
        for clients, scores in parts:
            for name, scores_of_clients in scores.items():
                all_scores[name][clients] = scores_of_clients
        return all_scores

    def agree(self, round: Round, model: Tensor, contributions: Mapping[str, Tensor]) -> None:
        values = {
            "cohort": round.client_ids,
            "global model": model,
            "aggregation weights": round.aggregation_weights,
        }
        for metric_name, contribution in contributions.items():
            values[f"metric {metric_name}"] = contribution
        checksums = {}
        for name, value in values.items():
            if value is not None:
                checksums[name] = _checksum(value)
        checksums_by_rank = self.ranks.all_gather(checksums, "checksums")
        # A value may be missing on one of the ranks, so the names of all ranks are compared.
        names = dict.fromkeys(chain.from_iterable(checksums_by_rank))
        for name in names:
            different_checksums = {of_rank.get(name) for of_rank in checksums_by_rank}
            if len(different_checksums) > 1:
                self._compare(round, name, values.get(name))
        self._take_first_model(model)

    def _compare(
        self,
        round: Round,
        name: str,
        value: Tensor | None,
    ) -> None:
        """Raise RuntimeError if the ranks' values differ by more than the rounding of a device's kernels."""
        values = self.ranks.all_gather(value, f"the {name}")
        for rank, value_of_rank in enumerate(values):
            if not is_rounded(values[0], value_of_rank):
                raise RuntimeError(
                    f"round {round.round_index + 1}: ranks 0 and {rank} have computed different values of the {name}. "
                    "Every rank runs the whole server and must compute the same numbers. Strategies and metrics must "
                    "draw random numbers from round.generator(name) only, and all ranks need the same processor model."
                )

    def _take_first_model(self, model: Tensor) -> None:
        """Overwrite the global model by rank 0's on devices whose kernels may round differently."""
        if model.device.type != "cpu":
            model.copy_(self.ranks.broadcast(0, model, "the global model"))

    def _clients_of_process(self) -> list[int]:
        return self.placement.mine(range(self.state.num_clients))

    def _gather_states(self) -> None:
        self._states: dict[int, Any] = super().client_states()
        if self.placement.bound:
            parts = self.ranks.all_gather(self._states, "the clients' states")
            if self.ranks.rank == 0:
                self._states = _merge_by_client(parts)

    def _exchange_logged(self, value: Any, exchange_name: str) -> list[Any]:
        # If this rank's epoch has ended early, the other ranks do not take part.
        is_alone = self.loop.phase is Phase.DISCARDED
        return [value] if is_alone else self.ranks.all_gather(value, exchange_name)


def _merge_by_client(parts: Sequence[dict[int, Any]]) -> dict[int, Any]:
    merged = {}
    for part in parts:
        merged.update(part)
    return dict(sorted(merged.items()))


def _checksum(value: Tensor) -> int:
    flat = value.detach().cpu().contiguous().reshape(-1)
    raw_bytes = flat.view(torch.uint8).numpy()
    return zlib.crc32(raw_bytes.data)


def is_rounded(value: Tensor | None, value_of_rank: Tensor | None) -> bool:
    """Return whether two ranks' values are equal up to the rounding of a device's kernels.

    On CPUs, and for integers, the values must be bitwise equal.

    Args:
        value: the value of rank 0, of any shape, or None if it has none.
        value_of_rank: the value of another rank.

    Example:
        >>> is_rounded(torch.ones(2), torch.ones(2) + 1e-6)
        False
    """
    if value is None or value_of_rank is None:
        return value is None and value_of_rank is None
    may_be_rounded = value.device.type != "cpu" and value.is_floating_point()
    if not may_be_rounded:
        return torch.equal(value, value_of_rank)
    largest = value.nan_to_num().abs().max()
    return torch.allclose(
        value_of_rank,
        value,
        rtol=0.0,
        atol=MAX_ROUNDING * float(largest),
        equal_nan=True,
    )
