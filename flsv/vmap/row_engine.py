"""RowEngine: base class of engines that train many models at once, each as a row of stacked tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flsv._lightning.evaluation import as_module_input
from flsv._lightning.several_processes import TrainingCounts, add_counts
from flsv.engines.idle_engine import IdleEngine
from flsv.games.module_copies import named_tensors
from flsv.training.algorithms import ClientContext
from flsv.training.client_batches import ClientBatches, CohortLoader
from flsv.vmap.dry_run_of_rows import check_shared_are_frozen, names_without_rows
from flsv.vmap.row_step import State, batched_steps
from flsv.vmap.row_training import RowTraining


class BegunClient(NamedTuple):
    """A client whose training has begun, and is suspended while its models are trained as rows."""

    context: ClientContext
    #: The tensors of its m models before training, ``[m, ...]`` by name.
    states: State
    batches: Iterable[Any]

    @property
    def id(self) -> int:
        return self.context.instruction.client_id

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.states.values())))


class RowEngine(IdleEngine):
    """Base class of engines that train many models at once, each as a row of stacked tensors.

    The first row of a client is its model in the run.

    Args:
        options: the arguments of :class:`flsv.engines.engine.Engine`.
        kind: the class that trains the rows.
    """

    # The training of this round's rows.
    _training: RowTraining

    def __init__(self, *options: Any, kind: type[RowTraining] = RowTraining) -> None:
        super().__init__(*options)
        self._kind = kind
        self._current_client: int | None = None
        # The tensors of the module that each row has for itself.
        self._stacked_tensors: State = {}
        self._remaining_batches: Iterator[Any] = iter(())

    @property
    def client(self) -> int | None:
        """Return the client whose training begins or ends now, None while many train."""
        return self._current_client

    @property
    def place(self) -> str:
        return f"{len(self._client_batches)} at once"

    def _batches(self) -> CohortLoader:
        return self._load(self.state.cohort)

    def _train(self, batches: Any) -> None:
        # The other entries are the same at all clients, so the module's own values are used.
        shared_names = names_without_rows(self.space)
        self._stacked_tensors = {
            name: tensor.detach()
            for name, tensor in named_tensors(self._module).items()
            if name not in shared_names
        }
        self._training = self._make_training()
        self._train_clients(batches)
        num_steps = sum(client_batches.num_batches for client_batches in self._client_batches)
        add_counts(self.trainer, TrainingCounts(steps=num_steps))

    def _make_training(self) -> RowTraining:
        """Return the training of this round's rows. Raise an error if rows cannot be trained."""
        check_shared_are_frozen(self.trainer, self.space)
        # The round's hooks may have frozen parameters, or let others join the loss.
        unused_names = self._try_rows()
        return self._kind.of(self.trainer, unused_names, self.config.client_algorithm)

    def _train_clients(self, loader: CohortLoader) -> None:
        """Train the clients of a loader."""
        self._remaining_batches = iter(loader)
        for part in self._parts(loader.batches_of_clients):
            self._train_at_once(part)
        loader.warn_of_left_out(self._clients_with_left_out)

    def _train_at_once(self, part: Sequence[ClientBatches]) -> None:
        """Train the rows of some clients together."""
        clients = [self._begin_client(client_batches) for client_batches in part]
        states = {
            name: torch.cat([client.states[name] for client in clients])
            for name in self._stacked_tensors
        }
        states, losses = self._train_rows(states, clients)

        num_rows = [client.num_rows for client in clients]
        rows_by_name = {name: tensor.split(num_rows) for name, tensor in states.items()}
        for number, losses_of_client in enumerate(losses.split(num_rows)):
            trained_states = {name: rows[number] for name, rows in rows_by_name.items()}
            self._end_client(clients[number], trained_states, losses_of_client)

    def _begin_client(self, client_batches: ClientBatches) -> BegunClient:
        """Begin a client's training outside of the Trainer's loop, and suspend it."""
        client = client_batches.client
        self._current_client = client
        self._begin(client_batches)
        # As in a Trainer, the first batch is transferred before the client's random numbers begin, the others after it.
        batches_of_client = islice(self._remaining_batches, client_batches.num_batches)
        further_batches = map(self._transfer, batches_of_client)
        first_batch = next(further_batches)
        self.local_training.client_steps.seed(self._instructions[client])
        batches: Iterable[Any] = chain([first_batch], further_batches)
        if not self._kind.shares_batch:
            # Other clients draw random numbers next, so all batches are read now.
            batches = list(batches)
        # The module now holds this client's initial model.
        states = self._initial_states(client)
        context = self.local_training.suspend()
        self._current_client = None
        return BegunClient(context, states, batches)

    def _train_rows(self, states: State, clients: Sequence[BegunClient]) -> tuple[State, Tensor]:
        """Train the rows ``states`` of clients, those of one after the other. Return the trained rows and their mean
        losses.
        """
        batches_of_rows: list[Any] = []
        for client in clients:
            batches_of_rows += [client.batches] * client.num_rows
        with self._steps_of(clients):
            return self._training.train(states, batches_of_rows)

    def _end_client(self, client: BegunClient, states: State, losses: Tensor) -> None:
        """Let a client's training end with its model of the run in the module, as if the Trainer had trained it."""
        self._current_client = client.id
        trained_tensors = [states[name][0] for name in self._stacked_tensors]
        torch._foreach_copy_(list(self._stacked_tensors.values()), trained_tensors)
        self.local_training.resume(client.context, losses[0])
        self._end()
        self._current_client = None

    # ---- methods that subclasses override

    def _try_rows(self) -> Collection[str]:
        """Raise an error unless rows can be trained in this round, after its hooks. Return the names of parameters
        without a gradient.
        """
        raise NotImplementedError

    def _parts(self, clients: Sequence[ClientBatches]) -> Iterator[Sequence[ClientBatches]]:
        """Yield the clients of the round, those together whose rows take their steps together."""
        raise NotImplementedError

    def _initial_states(self, client: int) -> State:
        """Return the tensors of a client's models, ``[m, ...]`` by name. The module holds its initial model."""
        return {name: tensor.clone()[None] for name, tensor in self._stacked_tensors.items()}

    def _transfer(self, batch: Any) -> Any:
        return as_module_input(self.trainer, batch)

    @contextmanager
    def _steps_of(self, clients: Sequence[BegunClient]) -> Iterator[None]:
        """Context of the steps of clients' rows."""
        with batched_steps(self.trainer):
            yield
