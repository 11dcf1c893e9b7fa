"""CoalitionRows: the engine that trains a run and coalitions of its clients at once, as rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv._lightning.evaluation import as_module_input
from flsv._lightning.several_processes import TrainingCounts, add_counts
from flsv.core import ClientUpdate, Instruction
from flsv.games.module_copies import named_tensors
from flsv.server.coalition_server import CoalitionServer
from flsv.training.module_snapshot import ModuleSnapshot
from flsv.training.swapped_optimizer import options_of
from flsv.utilities.errors import ConfigurationError, NotBatched
from flsv.utilities.plain_values import are_equal
from flsv.vmap.batched import (
    SharedBatchTraining,
    State,
    batched_steps,
    clip_function,
)
from flsv.vmap.engine import VmapProcess, _PreparedClient, dry_run_of_rows
from flsv.vmap.guarded_hooks import guard_hooks, guarded

#: The largest number of elements of the rows that take a step together.
MAX_ELEMENTS_OF_CHUNK = 2**24


class CoalitionRows(VmapProcess):
    """Engine that trains the run's cohort, and the cohorts of :attr:`coalitions` beside it.

    A row is a coalition's model at one client. A client's batches are loaded once, and all its rows take their steps
    on them together, with the same random numbers. So each row is the training of the client in a fit of this
    coalition, up to rounding.

    Raises:
        NotBatched: the module cannot be trained so, or training changes what the coalitions do not have for themselves.
    """

    def __init__(self, *options: Any) -> None:
        try:
            super().__init__(*options)
        except ConfigurationError as error:
            raise NotBatched(f"{error}") from error
        if self.space.private_names:
            raise NotBatched(f"{self.space.private_names[0]!r} stays at the clients.")
        self.coalitions: Sequence[CoalitionServer] = ()
        # The run's model after its last round. None before the first round.
        self._last_model: Tensor | None = None

    def _prepare(self) -> None:
        self._shared_names = {*self.space.constant_names, *self.space.non_finite_names}
        self._names_without_gradient = dry_run_of_rows(
            self.trainer,
            self.space,
            self.state.seed,
            self._shared_names,
            kind=SharedBatchTraining,
        )
        self._undo.callback(guard_hooks(self._module).restore)
        if self._steps.length_was_read:
            raise NotBatched("each client has a schedule of its own.")

    def end_round(self, vector: Tensor) -> None:
        super().end_round(vector)
        self._last_model = vector.clone()

    def check_model(self) -> None:
        """Raise NotBatched if the module's model is not the aggregate of the last round."""
        if self._last_model is None:
            return
        if not torch.equal(self.space.read(self._module), self._last_model):
            raise NotBatched("a hook changes the model between rounds.")

    def _train(self, batches: Any) -> None:
        if self._last_model is None:
            self._last_model = self.coalitions[0].state.model() if self.coalitions else None
        if self._last_model is not None and not torch.equal(self.global_vector, self._last_model):
            raise NotBatched("a hook changes the model before a round.")
        round_index = self.state.round_index
        trained = [coalition for coalition in self.coalitions if not coalition.is_over]
        for coalition in trained:
            coalition.begin_round(round_index, self.manager.clients)
        self._stacked_tensors = {
            name: tensor.detach()
            for name, tensor in named_tensors(self._module).items()
            if name not in self._shared_names
        }
        self._training = SharedBatchTraining(
            self._module,
            self.trainer.optimizers[0],
            clip_function(self.trainer),
            self._names_without_gradient,
        )
        cohort_of_run = [client_batches.client for client_batches in self._client_batches]
        drawn: set[int] = set()
        for coalition in trained:
            drawn.update(coalition.instructions)
        updates: dict[int, dict[int, ClientUpdate | None]] = {id(item): {} for item in trained}
        num_steps = 0
        content = _Content(self._module, self.trainer)
        for client in [*cohort_of_run, *sorted(drawn.difference(cohort_of_run))]:
            rows = [coalition for coalition in trained if client in coalition.instructions]
            instructions = [coalition.instructions[client] for coalition in rows]
            is_of_run = client in cohort_of_run
            if is_of_run:
                instructions.insert(0, self._instructions[client])
            updates_of_rows, steps_of_client = self._train_client(client, instructions, is_of_run)
            num_steps += steps_of_client if is_of_run else 0
            for coalition, update in zip(rows, updates_of_rows):
                updates[id(coalition)][client] = update
        content.check_unchanged()
        add_counts(self.trainer, TrainingCounts(steps=num_steps))
        for coalition in trained:
            self._end_coalition(coalition, updates[id(coalition)])

    def _train_client(
        self, client: int, instructions: Sequence[Instruction], is_of_run: bool
    ) -> tuple[list[ClientUpdate | None], int]:
        """Train a client from the start of each instruction, the run's first. Return the updates of coalitions (None if
        not finite), and the number of steps.
        """
        loader = self._load([client])
        (client_batches,) = loader.batches_of_clients
        local = self.manager.locals[client]
        num_samples = len(self.data.client_indices(client))
        self._current_client = client
        self.local_training.begin(
            instructions[0], local, num_samples=num_samples, lengths=client_batches.lengths
        )
        remaining_batches = iter(loader)
        # As in a Trainer, the first batch is transferred before the client's random numbers begin, the others after it.
        first_batch = self._transfer(next(remaining_batches))
        self.local_training.client_steps.seed(instructions[0])
        context = self.local_training.suspend()
        self._current_client = None

        states = self._rows([instruction.start for instruction in instructions])
        states, losses = self._training.train_shared(
            states,
            self._transferred(first_batch, remaining_batches, client_batches.num_batches),
            context=partial(batched_steps, self.trainer),
            chunk=max(1, MAX_ELEMENTS_OF_CHUNK // self.space.size),
        )
        self._check_others(states)
        first = 0
        if is_of_run:
            model = {name: tensor[0] for name, tensor in states.items()}
            self._end_client(_PreparedClient(client, context, {}, []), model, losses[0])
            first = 1
        else:
            local.set_models(initial_model=None, model=None)
            self.manager.forget(client)
        updates = self._updates_of(
            client, states, losses, first, num_samples, client_batches.num_batches
        )
        return updates, client_batches.num_batches

    def _transferred(self, first: Any, remaining: Iterator[Any], count: int) -> Iterator[Any]:
        yield first
        for _ in range(count - 1):
            yield self._transfer(next(remaining))

    def _transfer(self, batch: Any) -> Any:
        with guarded(self._module):
            return as_module_input(self.trainer, batch)

    def _rows(self, starts: Sequence[Tensor | None]) -> State:
        """Return the stacked tensors of the models ``starts``, each ``[P]``."""
        vectors = torch.stack([start for start in starts if start is not None])
        tensors_by_name = self.space.unflatten(vectors)
        states = {}
        for name, tensor in self._stacked_tensors.items():
            if name in tensors_by_name:
                states[name] = (
                    tensors_by_name[name]
                    .to(tensor.dtype)
                    .clone(memory_format=torch.contiguous_format)
                )
            else:  # such as a counter: each round begins with the run's
                states[name] = tensor.expand(len(vectors), *tensor.shape).clone()
        return states

    def _check_others(self, states: State) -> None:
        """Raise NotBatched if training changes a tensor that is not part of a coalition's model."""
        counters = _counters(self._module)
        for name in states.keys() - set(self.space.names) - counters:
            if not torch.equal(states[name][0], self._stacked_tensors[name]):
                raise NotBatched(f"training changes {name!r}, which is not shared.")

    def _updates_of(
        self,
        client: int,
        states: State,
        losses: Tensor,
        first: int,
        num_samples: int,
        num_steps: int,
    ) -> list[ClientUpdate | None]:
        parts = [
            states[name][first:].flatten(1).to(self.space.dtype)
            if states[name].ndim > 1
            else states[name][first:, None].to(self.space.dtype)
            for name in self.space.names
        ]
        matrix = torch.cat(parts, dim=1)  # [m, P]
        sums = matrix.sum(1).tolist()
        losses_of_rows = losses[first:].tolist()
        updates: list[ClientUpdate | None] = []
        for row, (total, loss) in enumerate(zip(sums, losses_of_rows)):
            vector = matrix[row]
            is_finite = abs(total) < float("inf") or bool(vector.isfinite().all())
            update = ClientUpdate(client, num_samples, vector, loss, num_steps)
            updates.append(update if is_finite else None)
        return updates

    def _end_coalition(
        self, coalition: CoalitionServer, updates: dict[int, ClientUpdate | None]
    ) -> None:
        in_order = [updates[client] for client in coalition.instructions]
        usable = [update for update in in_order if update is not None]
        broken = [client for client in coalition.instructions if updates[client] is None]
        coalition.end_round(usable, broken, self.manager.server)


class _Content:
    """What the coalitions share in a round: the module's attributes and flags, and the optimizer's options."""

    def __init__(self, module: L.LightningModule, trainer: L.Trainer) -> None:
        self._module = module
        self._trainer = trainer
        self._parts = self._read()

    def check_unchanged(self) -> None:
        """Raise NotBatched if training has changed a part, since it would be another in each coalition."""
        for name, (before, after) in _pairs(self._parts, self._read()).items():
            if not are_equal(before, after):
                raise NotBatched(f"training changes {name} of the module.")

    def _read(self) -> dict[str, Any]:
        snapshot = ModuleSnapshot(self._module)
        parts = {path: value for path, value in snapshot.values.items() if not _is_counter(path)}
        for path, flag_and_description in snapshot.structure.items():
            parts[f"{path} (its flag)"] = list(flag_and_description)
        for number, optimizer in enumerate(self._trainer.optimizers):
            parts[f"optimizer {number}"] = options_of(optimizer.param_groups)
        return parts


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    names = [*first, *(name for name in second if name not in first)]
    return {name: (first.get(name), second.get(name)) for name in names}


def _is_counter(path: str) -> bool:
    return path.endswith("num_batches_tracked")


def _counters(module: nn.Module) -> Collection[str]:
    """Return the names of counters on which training does not depend."""
    names = set()
    for prefix, layer in module.named_modules():
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.momentum is not None:
            names.add(f"{prefix}.num_batches_tracked")
    return names
