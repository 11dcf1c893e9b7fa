"""CoalitionRows: the engine that trains a run and coalitions of its clients at once, as rows of stacked tensors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, islice
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torchmetrics import Metric

from flsv._lightning.evaluation import as_module_input
from flsv._lightning.several_processes import TrainingCounts, add_counts
from flsv.configuration.federation_config import FederationConfig
from flsv.core import Instruction
from flsv.core.parameter_space import ParameterSpace
from flsv.games.module_copies import named_tensors
from flsv.isolation.program_state import present_state
from flsv.isolation.reachable import GENERATORS, attributes_of
from flsv.server.coalition_server import AveragedCoalitions, ServedCoalitions
from flsv.training.algorithms import ClientAlgorithm, ClientContext
from flsv.training.algorithms.base import is_proximal
from flsv.training.client_batches import ClientBatches
from flsv.training.module_snapshot import DATA_PATH, ModuleSnapshot
from flsv.training.shared_objects import (
    SHARED_TYPES,
    content_of,
    swapped_ids,
    unswapped_objects,
)
from flsv.training.swapped_optimizer import options_of
from flsv.utilities.errors import ConfigurationError, NotBatched
from flsv.utilities.plain_values import are_equal, copied, is_large, is_plain
from flsv.vmap.dry_run_of_rows import DryRunOfRows, check_shared_are_frozen, dry_run_of_rows
from flsv.vmap.engine import VmapProcess, _PreparedClient, not_batched_without_callbacks
from flsv.vmap.guarded_hooks import HOOKS_AT_START, HOOKS_BETWEEN_ROUNDS, Guard
from flsv.vmap.row_step import State, batched_steps, has_linear_layers_only
from flsv.vmap.row_training import RowTraining, SharedBatchTraining, clip_function

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

Coalitions = AveragedCoalitions | ServedCoalitions

# The proofs after training, with witnesses, consider what training makes of rounding errors, too.
_dry_run = partial(dry_run_of_rows, may_enlarge_rounding=True)


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
        #: The coalitions that train beside the run. They are set before the first round.
        self.coalitions: Coalitions | None = None
        #: Tensors of the module that training does not change and that differ between the coalitions, ``[K, ...]`` by
        #: name, such as class weights.
        self.constants: Mapping[str, Tensor] = {}
        # The run's model after its last round. None before the first round.
        self._last_model: Tensor | None = None

    @staticmethod
    def _refused_algorithm(config: FederationConfig) -> ClientAlgorithm | None:
        algorithm = config.client_algorithm
        if algorithm is not None and is_proximal(algorithm):
            return None
        return algorithm

    @classmethod
    def trial(cls, trainer: L.Trainer, loop: Any) -> tuple[type[RowTraining], DryRunOfRows]:
        """Try rows in a copy of a run before its first round. Return the kind of training that rows get, and what its
        dry run has found out.

        Raises:
            ConfigurationError: models cannot be trained as rows.
        """
        config = loop.config
        algorithm = cls._refused_algorithm(config)
        obstacle = not_batched_without_callbacks(trainer, algorithm, config.optimizer_state)
        if obstacle is not None:
            raise NotBatched(f"{obstacle.reason}.")
        space = loop.space
        shared_names = {*space.constant_names, *space.non_finite_names}
        # Proximal gradients are those of single models. The comparison with the run is of them, too.
        return _try_kinds(trainer, space, loop.state.seed, shared_names)

    @staticmethod
    def guard_first_hooks(module: L.LightningModule, data: Any) -> None:
        """Guard the hooks that a copied run's module has before its first round."""
        Guard(module, data).hooks(HOOKS_AT_START, denies_model=False)

    def _prepare(self) -> None:
        super()._prepare()
        self._guard = Guard(self._module, self.data)
        guarded_hooks = self._guard.hooks(HOOKS_BETWEEN_ROUNDS, denies_model=True)
        self._undo.callback(guarded_hooks.restore)
        self._has_batch_hooks = self.data.changes_transfer(self.trainer)
        if self._steps.length_was_read:
            raise NotBatched("each client has a schedule of its own.")

    def _make_training(self) -> RowTraining:
        """Return the training of this round's rows. Before the first round, raise NotBatched if a trial fails."""
        check_shared_are_frozen(self.trainer, self._shared_names)
        if not self._has_dry_run:
            self._kind, found = _try_kinds(
                self.trainer, self.space, self.state.seed, self._shared_names
            )
            self._unused_names = found.unused_names
            self._has_dry_run = True
        return self._kind(
            self._module,
            self.trainer.optimizers[0],
            clip_function(self.trainer),
            self._unused_names,
            self.config.client_algorithm,
        )

    @property
    def joins_clients(self) -> bool:
        """Return whether the rows of all clients take their steps together. It is known from the first round on."""
        return not self._kind.shares_batch

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
        coalitions = self.coalitions
        assert coalitions is not None
        coalitions.begin_round(self.state.round_index, self.manager.clients)
        self._stacked_tensors = {
            name: tensor.detach()
            for name, tensor in named_tensors(self._module).items()
            if name not in self._shared_names
        }
        self._training = self._make_training()
        content = _Content(self._module, self.trainer)
        num_steps = 0
        for clients in self._parts(coalitions):
            self._train_part_of_rows(clients, coalitions)
        for client_batches in self._client_batches:
            num_steps += client_batches.num_batches
        content.check_unchanged()
        add_counts(self.trainer, TrainingCounts(steps=num_steps))
        coalitions.end_round()

    def _parts(self, coalitions: Coalitions) -> Iterator[list[int]]:
        """Yield the clients of the round, those together whose rows take their steps together."""
        cohort_of_run = [client_batches.client for client_batches in self._client_batches]
        drawn = coalitions.cohorts.any(0).nonzero().flatten().tolist()
        part: list[int] = []
        num_rows = 0
        for client in dict.fromkeys([*cohort_of_run, *drawn]):
            num_rows += len(coalitions.rows_of(client)) + 1
            is_full = num_rows * self.space.size > MAX_ELEMENTS_OF_CHUNK
            if part and (is_full or not self.joins_clients):
                yield part
                part = []
                num_rows = len(coalitions.rows_of(client)) + 1
            part.append(client)
        if part:
            yield part

    def _check_start_of_round(self) -> None:
        """Raise NotBatched if a hook has changed the model since the last round."""
        if self._last_model is None:
            self._last_model = self.state.model().clone()
        if not torch.equal(self.state.model(), self._last_model):
            raise NotBatched("a hook changes the model before a round.")

    def _train_part_of_rows(self, clients: Sequence[int], coalitions: Coalitions) -> None:
        """Train the models of clients in all coalitions that have drawn them, and add them to these coalitions."""
        begun_clients = [self._begin_rows(client, coalitions) for client in clients]
        states = self._rows(torch.cat([client.starts for client in begun_clients]))
        constants = self._constants_of_rows(begun_clients)
        for name, tensor in constants.items():
            states[name] = tensor.clone()
        states, losses = self._train_rows(states, begun_clients)
        self._check_others(states, constants)
        first = 0
        for client in begun_clients:
            rows = slice(first, first + len(client.starts))
            first = rows.stop
            states_of_client = {name: tensor[rows] for name, tensor in states.items()}
            self._end_rows(client, states_of_client, losses[rows], coalitions)

    def _begin_rows(self, client: int, coalitions: Coalitions) -> _Rows:
        (client_batches,) = self._load([client]).batches_of_clients
        rows = coalitions.rows_of(client)
        starts = coalitions.models[rows]
        instruction = self._instructions.get(client)
        is_of_run = instruction is not None
        if instruction is None:  # the run has not drawn it
            state = self.state
            instruction = Instruction(state.round_index, client, state.seed, start=starts[0])
        else:
            assert instruction.start is not None
            starts = torch.cat([instruction.start[None], starts])
        context, batches = self._begin_client(instruction, client_batches)
        return _Rows(client, rows, starts, is_of_run, context, batches, client_batches.lengths)

    def _train_rows(self, states: State, clients: Sequence[_Rows]) -> tuple[State, Tensor]:
        """Train the rows of clients, those of one after the other. Return them and their mean losses."""
        if isinstance(self._training, SharedBatchTraining):
            (client,) = clients
            return self._training.train_shared(
                states,
                client.batches,
                context=self._steps_of_rows,
                chunk=max(1, MAX_ELEMENTS_OF_CHUNK // self.space.size),
                indices=chain.from_iterable(map(range, client.lengths)),
            )
        batches_of_rows: list[Any] = []
        for client in clients:
            batches_of_rows += [client.batches] * len(client.starts)
        with self._steps_of_rows():
            return self._training.train(states, batches_of_rows)

    @contextmanager
    def _steps_of_rows(self) -> Iterator[None]:
        with batched_steps(self.trainer), self._guard.of_step():
            yield

    def _end_rows(
        self, client: _Rows, states: State, losses: Tensor, coalitions: Coalitions
    ) -> None:
        first_row = 0
        if client.is_of_run:
            model = {name: tensor[0] for name, tensor in states.items()}
            prepared_client = _PreparedClient(client.id, client.context, {}, [])
            self._end_client(prepared_client, model, losses[0])
            first_row = 1
        else:
            self.manager.locals[client.id].set_models(initial_model=None, model=None)
            self.manager.forget(client.id)
        trained_models = self._vectors(states)[first_row:]
        coalitions.add(
            client.id, client.rows, trained_models, losses[first_row:], sum(client.lengths)
        )

    def _begin_client(
        self, instruction: Instruction, client_batches: ClientBatches
    ) -> tuple[ClientContext, Iterable[Any]]:
        """Begin a client's training outside of the Trainer's loop. Return its context, and its batches, which are read
        one after the other."""
        client = client_batches.client
        loader = self._load([client])
        self._current_client = client
        self.local_training.begin(
            instruction,
            self.manager.locals[client],
            num_samples=len(self.data.client_indices(client)),
            lengths=client_batches.lengths,
        )
        remaining_batches = iter(loader)
        # As in a Trainer, the first batch is transferred before the client's random numbers begin, the others after it.
        first_batch = self._transfer(next(remaining_batches))
        self.local_training.client_steps.seed(instruction)
        num_further = client_batches.num_batches - 1
        further_batches = map(self._transfer, islice(remaining_batches, num_further))
        batches: Iterable[Any] = chain([first_batch], further_batches)
        if self.joins_clients:
            # Other clients draw random numbers next, so all batches are read now.
            batches = list(batches)
        context = self.local_training.suspend()
        self._current_client = None
        return context, batches

    def _transfer(self, batch: Any) -> Any:
        guard = self._guard.of_hook() if self._has_batch_hooks else nullcontext()
        with guard:
            return as_module_input(self.trainer, batch)

    def _rows(self, starts: Tensor) -> State:
        """Return the stacked tensors of the models ``starts [m, P]``."""
        tensors_by_name = self.space.unflatten(starts)
        states = {}
        for name, tensor in self._stacked_tensors.items():
            if name in tensors_by_name:
                states[name] = (
                    tensors_by_name[name]
                    .to(tensor.dtype)
                    .clone(memory_format=torch.contiguous_format)
                )
            else:  # such as a counter: each round begins with the run's
                states[name] = tensor.expand(len(starts), *tensor.shape).clone()
        return states

    def _constants_of_rows(self, clients: Sequence[_Rows]) -> State:
        """Return the stacked constants of clients' rows, where the run has those of the module."""
        constants = {}
        for name, of_coalitions in self.constants.items():
            of_run = self._stacked_tensors[name][None]
            parts = []
            for client in clients:
                if client.is_of_run:
                    parts.append(of_run)
                parts.append(of_coalitions[client.rows].to(of_run))
            constants[name] = torch.cat(parts)
        return constants

    def _vectors(self, states: State) -> Tensor:
        """Return the models ``[m, P]`` of stacked tensors."""
        parts = [
            states[name].flatten(1) if states[name].ndim > 1 else states[name][:, None]
            for name in self.space.names
        ]
        return torch.cat([part.to(self.space.dtype) for part in parts], dim=1)

    def _check_others(self, states: State, constants: State) -> None:
        """Raise NotBatched if training changes a tensor that is not part of a coalition's model."""
        counters = _counters(self._module)
        for name in set(states).difference(self.space.names, counters):
            if name in constants:
                is_unchanged = torch.equal(states[name], constants[name])
            else:
                is_unchanged = torch.equal(states[name][0], self._stacked_tensors[name])
            if not is_unchanged:
                raise NotBatched(f"training changes {name!r}, which is not shared.")


def _try_kinds(
    trainer: L.Trainer, space: ParameterSpace, seed: int, shared_names: Collection[str]
) -> tuple[type[RowTraining], DryRunOfRows]:
    """Return the kind of training that rows get, and what its dry run has found out.

    Rows of several clients take a step together if steps draw no random numbers, and if these rows are no dearer
    than those of one client, whose convolutions share their inputs.
    """
    module = trainer.lightning_module
    is_cheap_on_all = module.device.type != "cpu" or has_linear_layers_only(module)
    with suppress(NotBatched):
        found = _dry_run(trainer, space, seed, shared_names)
        if is_cheap_on_all or found.megaflops <= MAX_MEGAFLOPS_TO_JOIN:
            return RowTraining, found
    return SharedBatchTraining, _dry_run(
        trainer, space, seed, shared_names, kind=SharedBatchTraining
    )


class _Rows(NamedTuple):
    """A client's rows in a round, the run's first if it is in the run's cohort."""

    id: int
    #: Indices of the coalitions ``[m]``.
    rows: Tensor
    #: The models ``[m, P]`` or ``[m + 1, P]`` from which they train.
    starts: Tensor
    is_of_run: bool
    context: ClientContext
    batches: Iterable[Any]
    #: The number of batches of each local epoch.
    lengths: Sequence[int]


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
