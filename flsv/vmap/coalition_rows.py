"""CoalitionRows: the engine that trains a run and coalitions of its clients at once, as rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchmetrics import Metric

from flsv.core import Instruction
from flsv.core.parameter_space import ParameterSpace
from flsv.isolation.program_state import present_state
from flsv.isolation.reachable import GENERATORS, attributes_of
from flsv.server.coalition_server import AveragedCoalitions, ServedCoalitions
from flsv.training.client_batches import ClientBatches, CohortLoader
from flsv.training.module_snapshot import DATA_PATH, ModuleSnapshot
from flsv.training.shared_objects import (
    SHARED_TYPES,
    content_of,
    swapped_ids,
    unswapped_objects,
)
from flsv.training.swapped_optimizer import options_of
from flsv.utilities.errors import NotBatched
from flsv.utilities.plain_values import are_equal, copied, is_large, is_plain
from flsv.vmap.dry_run_of_rows import DryRunOfRows, dry_run_of_rows
from flsv.vmap.engine import find_obstacle
from flsv.vmap.guarded_hooks import HOOKS_AT_START, HOOKS_BETWEEN_ROUNDS, Guard
from flsv.vmap.row_engine import BegunClient, RowEngine
from flsv.vmap.row_step import State, has_linear_layers_only
from flsv.vmap.row_training import RowTraining, SharedBatchTraining

#: The largest number of elements of the rows that take a step together.
MAX_ELEMENTS_OF_CHUNK = 2**24
#: The largest step of one model, in millions of multiplications and additions, that rows of several clients take
#: together on a CPU although the model has convolutions.
MAX_MEGAFLOPS_TO_JOIN = 6.0

#: Clients of a run may share a namespace on purpose, and metrics do nothing in steps of rows.
_UNCHANGED_TYPES = (SimpleNamespace, Metric)
_SHARED_TYPES = (
    *(kind for kind in SHARED_TYPES if kind not in _UNCHANGED_TYPES),
    *GENERATORS,  # which are seeded for each client
)

CoalitionServers = AveragedCoalitions | ServedCoalitions

# The proofs after training, with witnesses, consider what training makes of rounding errors, too.
_dry_run = partial(dry_run_of_rows, may_enlarge_rounding=True)


class CoalitionRows(RowEngine):
    """Engine that trains the run's cohort, and the cohorts of coalitions beside it.

    A row is a coalition's model at one client. A client's batches are loaded once, and all its rows take their steps
    on them together, with the same random numbers. So each row is the training of the client in a fit of this
    coalition, up to rounding.

    Args:
        options: the arguments of :class:`flsv.engines.engine.Engine`.
        joins_clients: whether the rows of all clients take their steps together, as :meth:`trial` has found out.

    Raises:
        NotBatched: the module cannot be trained so, or training changes what the coalitions do not have for themselves.
    """

    # The coalitions that train beside the run.
    _coalitions: CoalitionServers

    def __init__(self, *options: Any, joins_clients: bool) -> None:
        super().__init__(*options, kind=RowTraining if joins_clients else SharedBatchTraining)
        if self.space.private_names:
            raise NotBatched(f"{self.space.private_names[0]!r} stays at the clients.")
        self.joins_clients = joins_clients
        self._constants: Mapping[str, Tensor] = {}
        # The names of parameters without a gradient. None before the first round.
        self._unused_names: Collection[str] | None = None
        # The run's model after its last round. None before the first round.
        self._last_model: Tensor | None = None

    @staticmethod
    def trial(trainer: L.Trainer, loop: Any) -> DryRunOfRows:
        """Try rows in a copy of a run before its first round. Return what the dry run has found out.

        Raises:
            ConfigurationError: models cannot be trained as rows.
        """
        # Proximal gradients are those of single models. The comparison with the run is of them, too.
        obstacle = find_obstacle(trainer, loop.config, allows_proximal=True)
        if obstacle is not None:
            raise NotBatched(f"{obstacle.reason}.")
        return _try_kinds(trainer, loop.space, loop.state.seed)

    @staticmethod
    def guard_first_hooks(module: L.LightningModule, data: Any) -> None:
        """Guard the hooks that a copied run's module has before its first round."""
        Guard(module, data).hooks(HOOKS_AT_START, denies_model=False)

    def train_for(self, coalitions: CoalitionServers, constants: Mapping[str, Tensor]) -> None:
        """Train the cohorts of ``coalitions`` beside the run from the first round on.

        Args:
            coalitions: the servers of K coalitions.
            constants: tensors of the module that training does not change and that differ between the coalitions,
                ``[K, ...]`` by name, such as class weights.
        """
        self._coalitions = coalitions
        self._constants = constants

    def _prepare(self) -> None:
        self._guard = Guard(self._module, self.data)
        guarded_hooks = self._guard.hooks(HOOKS_BETWEEN_ROUNDS, denies_model=True)
        self._undo.callback(guarded_hooks.restore)
        self._has_batch_hooks = self.data.changes_transfer(self.trainer)
        self._counters = _counters(self._module)
        if self._steps.length_was_read:
            raise NotBatched("each client has a schedule of its own.")

    def _try_rows(self) -> Collection[str]:
        if self._unused_names is None:
            found = _dry_run(self.trainer, self.space, self.state.seed, kind=self._kind)
            self._unused_names = found.unused_names
        return self._unused_names

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
        self._check_start_of_round()
        self._coalitions.begin_round(self.state.round_index, self.manager.clients)
        super()._train(batches)
        self._coalitions.end_round()

    def _check_start_of_round(self) -> None:
        """Raise NotBatched if a hook has changed the model since the last round."""
        if self._last_model is None:
            self._last_model = self.state.model().clone()
        if not torch.equal(self.state.model(), self._last_model):
            raise NotBatched("a hook changes the model before a round.")

    def _train_clients(self, loader: CohortLoader) -> None:
        content = _Content(self._module, self.trainer)
        further_instructions = self._further_instructions()
        if further_instructions:
            self._instructions = {**self._instructions, **further_instructions}
            loader = self._load([*self.state.cohort, *further_instructions])
        super()._train_clients(loader)
        content.check_unchanged()

    def _further_instructions(self) -> dict[int, Instruction]:
        """Return instructions for the clients that coalitions have drawn, but not the run."""
        models = self._coalitions.models
        drawn_clients = self._coalitions.cohorts.any(0).nonzero().flatten().tolist()
        instructions = {}
        for client in drawn_clients:
            if client not in self.state.cohort:
                model = models[self._coalitions.rows_of(client)[0]]
                instructions[client] = Instruction(
                    self.state.round_index, client, self.state.seed, start=model
                )
        return instructions

    def _parts(self, clients: Sequence[ClientBatches]) -> Iterator[Sequence[ClientBatches]]:
        part: list[ClientBatches] = []
        num_rows = 0
        for client_batches in clients:
            num_rows_of_client = len(self._coalitions.rows_of(client_batches.client)) + 1
            num_rows += num_rows_of_client
            is_full = num_rows * self.space.size > MAX_ELEMENTS_OF_CHUNK
            if part and (is_full or not self.joins_clients):
                yield part
                part = []
                num_rows = num_rows_of_client
            part.append(client_batches)
        if part:
            yield part

    def _transfer(self, batch: Any) -> Any:
        guard = self._guard.of_hook() if self._has_batch_hooks else nullcontext()
        with guard:
            return super()._transfer(batch)

    def _initial_states(self, client: int) -> State:
        rows = self._coalitions.rows_of(client)
        models = self.space.unflatten(self._coalitions.models[rows])
        states = super()._initial_states(client)
        for name, of_run in states.items():
            if name in self._constants:
                of_coalitions = self._constants[name][rows]
            elif name in models:
                of_coalitions = models[name]
            else:  # such as a counter: each round begins with the run's
                of_coalitions = of_run.expand(len(rows), *of_run.shape[1:])
            tensors = [of_coalitions.to(of_run)]
            if client in self.state.cohort:
                tensors.insert(0, of_run)
            states[name] = torch.cat(tensors)
        return states

    @contextmanager
    def _steps_of(self, clients: Sequence[BegunClient]) -> Iterator[None]:
        with super()._steps_of(clients), self._guard.of_step():
            yield

    def _train_rows(self, states: State, clients: Sequence[BegunClient]) -> tuple[State, Tensor]:
        if not isinstance(self._training, SharedBatchTraining):
            return super()._train_rows(states, clients)
        (client,) = clients
        return self._training.train(
            states,
            [client.batches] * client.num_rows,
            context=partial(self._steps_of, clients),
            chunk=max(1, MAX_ELEMENTS_OF_CHUNK // self.space.size),
            indices=chain.from_iterable(map(range, client.context.lengths)),
        )

    def _end_client(self, client: BegunClient, states: State, losses: Tensor) -> None:
        self._check_others(client.states, states)
        models = self.space.flatten(states)
        if client.id in self.state.cohort:
            super()._end_client(client, states, losses)
            models = models[1:]
            losses = losses[1:]
        else:
            self.manager.locals[client.id].set_models(initial_model=None, model=None)
            self.manager.forget(client.id)
        rows = self._coalitions.rows_of(client.id)
        self._coalitions.add(client.id, rows, models, losses, client.context.batches)

    def _check_others(self, initial_states: State, states: State) -> None:
        """Raise NotBatched if training changes a tensor that is not part of a coalition's model."""
        for name in set(states).difference(self.space.names, self._counters):
            if not torch.equal(states[name], initial_states[name]):
                raise NotBatched(f"training changes {name!r}, which is not shared.")


def _try_kinds(trainer: L.Trainer, space: ParameterSpace, seed: int) -> DryRunOfRows:
    """Return what the dry run of the kind of training that rows get has found out.

    Rows of several clients take a step together if steps draw no random numbers, and if these rows are no dearer
    than those of one client, whose convolutions share their inputs.
    """
    module = trainer.lightning_module
    is_cheap_on_all = module.device.type != "cpu" or has_linear_layers_only(module)
    with suppress(NotBatched):
        found = _dry_run(trainer, space, seed)
        if is_cheap_on_all or found.megaflops <= MAX_MEGAFLOPS_TO_JOIN:
            return found
    return _dry_run(trainer, space, seed, kind=SharedBatchTraining)


class _Content:
    """Record of all that the coalitions share in a round: the module's attributes and flags, the optimizer's options,
    and objects that the program keeps elsewhere.
    """

    def __init__(self, module: L.LightningModule, trainer: L.Trainer) -> None:
        self._module = module
        self._trainer = trainer
        self._parts = self._read()
        self._program = present_state()

    def check_unchanged(self) -> None:
        """Raise NotBatched if training has changed a part, since it would be another in each coalition."""
        if not self._program.is_present():
            raise NotBatched("training changes a global, a class or an object to which they refer.")
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
        data = getattr(self._trainer, "datamodule", None)
        for name, value in attributes_of(data).items():
            if is_plain(value) and not is_large(value):
                parts[f"{DATA_PATH}.{name}"] = copied(value)
        # Such as a closure or a namespace.
        other_objects = unswapped_objects(snapshot)
        compiled_paths = set()
        for name, layer in self._module.named_modules():
            if isinstance(layer, Metric):
                other_objects[f"module.{name}"] = layer
            elif isinstance(layer, OptimizedModule):
                compiled_paths.add(f"module.{name}")
        ids = swapped_ids(snapshot, self._module)
        for path, value in other_objects.items():
            if path.rpartition(".")[0] in compiled_paths:
                continue  # what it has compiled so far
            parts[path.removeprefix("module.")] = content_of(value, ids, _SHARED_TYPES)
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
