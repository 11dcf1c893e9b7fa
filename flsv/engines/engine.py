"""Engine: trains a round's cohort in one Trainer, one client after the other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn

from flsv._lightning.fit_loop import Phase
from flsv.configuration.federation_config import FederationConfig
from flsv.core import (
    ALONE,
    Channel,
    Client,
    ClientUpdate,
    FederationState,
    Instruction,
    LocalData,
    Ranks,
    Round,
    Traffic,
    opened,
)
from flsv.core.artifacts import client_folders, write_tables
from flsv.core.matrix import copied_rows, empty_rows
from flsv.core.parameter_space import ParameterSpace
from flsv.core.sharing import sharing
from flsv.data import FederatedDataModule
from flsv.data.groups import client_called
from flsv.engines.client_manager import ClientManager
from flsv.scores import OWN_SCORES
from flsv.scores.performance import measure_of
from flsv.training.algorithms.base import used_model
from flsv.training.client_batches import ClientBatches, CohortLoader, LocalSteps
from flsv.training.local_training import LocalTraining
from flsv.training.optimizers import OptimizerOptions
from flsv.training.store import ClientStore
from flsv.uploads.base import JointUpload

if TYPE_CHECKING:
    from flsv.games import CoalitionGames


#: Function that takes client ids and returns the server's next instructions for these clients, by client id.
Instruct = Callable[[Sequence[int]], dict[int, Instruction]]


def shared_space(
    module: nn.Module, config: FederationConfig, non_finite: Collection[str] = ()
) -> ParameterSpace:
    """Return the map between a module and its shared vectors ``[P]``."""
    private_patterns: list[str] = []
    for strategy in config.strategies.values():
        private_patterns += strategy.private
    kept_names, constant = sharing(config.share, module, config.head)
    return ParameterSpace(
        module,
        config.head,
        private_patterns,
        kept_names=kept_names,
        constant=constant,
        non_finite=non_finite,
    )


class Engine:
    """Engine that trains a cohort's clients one after the other, in this process."""

    ranks: Ranks = ALONE

    #: Whether the clients' data can be read in this process.
    clients_here = True

    local_training: LocalTraining

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        state: FederationState,
        store: ClientStore,
        config: FederationConfig,
        steps: LocalSteps,
    ) -> None:
        self.trainer = trainer
        self.data = data
        self.store = store
        self.state = state
        self.config = config
        self._steps = steps
        self._strategies: Mapping[str, Any] = config.strategies
        self._module: Any = trainer.lightning_module
        self.loop: Any = trainer.fit_loop  # a FederatedFitLoop
        self.space = shared_space(self._module, config, state.non_finite_names)
        state.non_finite_names = list(self.space.non_finite_names)
        store.to(self._module.device)
        self.options = OptimizerOptions(trainer)

        self.manager = self._make_manager()

        # State of the fit.
        self._undo = ExitStack()
        self.has_begun = False

        # State of the round.
        self._loader: CohortLoader | None = None
        self.updates: list[ClientUpdate] = []
        self.broken_clients: list[int] = []
        self._client_batches: Sequence[ClientBatches] = []
        self._instructions: dict[int, Instruction] = {}
        self._num_trained = 0
        self._matrix = torch.empty(0)
        # Clients whose collate_fn leaves samples out, of which a warning has told.
        self._clients_with_left_out: set[int] = set()

    # ---- before the first round

    def agree(self, round: Round, model: Tensor, contributions: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError unless all ranks have computed the same numbers, and replace ``model`` by rank 0's.

        Args:
            round: the completed round.
            model: the global model ``[P]``, which is overwritten.
            contributions: the metrics' values ``[n]`` by name.
        """

    def check(self, fields: Mapping[str, Mapping[str, Any]], evaluating: Mapping[str, Any]) -> None:
        """Raise ConfigurationError unless this engine can provide ``fields``, the round's attributes by metric and
        argument, and let clients evaluate models for the metrics ``evaluating``."""

    def games(
        self, measures: Mapping[str, Any], evaluating: Mapping[str, Any]
    ) -> CoalitionGames | None:
        """Make the object that scores coalitions' models by ``measures``, ``{metric: performance}``. Return None if no
        models are scored. Run each evaluation once that clients will run for the metrics ``evaluating``."""
        self.space.check(self._module)
        is_scored_by_strategy = any(map(_scores_models, self._strategies.values()))
        readers = (measures, evaluating, self.config.evaluation.every, is_scored_by_strategy)
        if not any(readers):
            return None

        # A run that scores no models does not load it.
        from flsv.engines.scoring import coalition_games

        return coalition_games(self, measures, evaluating)

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        """Prepare for clients' training, and restore the counters and masks ``buffers`` of a checkpoint."""
        self.local_training = LocalTraining(
            self.trainer,
            self.space,
            parts=self.config,
            store=self.store,
            steps=self._steps,
            # A coalition repeats the training of a run, which is checked.
            checks_shared_objects=self.data.counted_clients is None,
        )
        if buffers is not None:
            self.local_training.state.restore(buffers)
        self.has_begun = True
        self._prepare()
        self.loop.begin(self.local_training.client_steps)

    # ---- a round

    def loader(self) -> Any:
        """Return the train dataloader of the current round. Each call in a round returns the same one."""
        if self._loader is None or self._loader.round_index != self.state.round_index:
            self.data.warn_of_growth()
            self._loader = self._load(self.state.cohort)
        return self._loader

    def train(self, instructions: dict[int, Instruction]) -> bool:
        """Train the clients by their ``instructions``, and return whether all of them have trained."""
        batches = self._batches()
        self._client_batches = batches.batches_of_clients  # one for each client of the cohort
        self._instructions = instructions
        # A row for each client's model: [k, P].
        self._matrix = empty_rows(
            len(self._client_batches), self.state.model(), self.trainer.default_root_dir
        )
        self.updates = []
        self.broken_clients = []
        self._num_trained = 0

        self._train(batches)
        if not self.is_complete:
            return False
        self.local_training.state.end_clients()
        for attack in self.config.uploads:
            if isinstance(attack, JointUpload):
                self._replace_updates(attack)
        return True

    def _train(self, batches: Any) -> None:
        """Train the round's clients on ``batches``. Stop if the training of one ends early."""
        for client_batches in self._client_batches:
            self._begin(client_batches)
            self.loop.train_client(batches, client_batches.epochs)
            if not self.local_training.is_trained:
                return
            self._end()
        batches.warn_of_left_out(self._clients_with_left_out)

    def _begin(self, client_batches: ClientBatches) -> None:
        client = client_batches.client
        self.local_training.begin(
            self._instructions[client],
            self.manager.locals[client],
            num_samples=len(self.data.client_indices(client)),
            lengths=client_batches.lengths,
        )

    def _end(self) -> None:
        """Store a trained client's update, or discard it if its model is not finite."""
        client = self._client_batches[self._num_trained].client
        # If the model is not finite, the next client's model overwrites the row.
        next_free_row = self._matrix[len(self.updates)]
        update = self.local_training.end(out=next_free_row)
        if update is None:
            self.broken_clients.append(client)
            self.manager.forget(client)
        else:
            self.updates.append(update)
        self._num_trained += 1

    def _replace_updates(self, attack: JointUpload) -> None:
        """Replace the updates of the clients that collude, ``{client: update}`` by ``attack``."""
        num_parameters = self.space.num_parameters
        global_parameters = self.state.model()[:num_parameters]
        honest_updates = self.matrix[:, :num_parameters] - global_parameters  # [k, N]
        false_updates = attack.sent(
            [update.client_id for update in self.updates],
            honest_updates,
            num_clients=self.state.num_clients,
            round_index=self.state.round_index,
        )
        if not false_updates:
            return

        # The clients' own models are rows of the matrix, so they must not be overwritten.
        self._matrix = copied_rows(self.matrix)
        for row, update in enumerate(self.updates):
            vector = self._matrix[row]
            traffic = update.traffic
            if update.client_id in false_updates:
                vector[:num_parameters] = global_parameters + false_updates[update.client_id]
                num_bytes = float(vector.numel() * vector.element_size())
                traffic = Traffic(vector.numel(), num_bytes)
            self.updates[row] = replace(update, vector=vector, traffic=traffic)
            self._store_sent(vector, update.client_id)

    def _store_sent(self, vector: Tensor, client: int) -> None:
        """Store the model that a client has sent, if it has trained in this process."""
        # A client's data can be read only while they are opened.
        with opened(self.manager.locals[client]) as client_data:
            if client_data.model is not None:
                client_data.set_models(
                    client_data.start, client_data.model, sent=vector, tell=client_data.tell
                )

    # ---- what has been trained in the round

    @property
    def first_updates(self) -> dict[int, Tensor]:
        """Return the norm of each tensor of the clients' first updates, ``{client: [tensors]}``. Empty if resumed."""
        if not self.has_begun:
            return {}
        # The copies to the host are made here, since each of them waits for the device.
        return {client: norms.cpu() for client, norms in self.local_training.first_updates.items()}

    @property
    def is_complete(self) -> bool:
        """Return whether the cohort's last batch has been trained on."""
        return self._num_trained == len(self._client_batches)

    @property
    def clients_that_trained(self) -> set[int]:
        """Return the ids of the clients that have trained, finite model or not."""
        clients_with_updates = {update.client_id for update in self.updates}
        return clients_with_updates.union(self.broken_clients)

    @property
    def client(self) -> int | None:
        """Return the id of the client that is training, or None."""
        return self._steps.client

    @property
    def place(self) -> str:
        """Return the training client's position in the cohort, such as ``"3/10"``."""
        num_clients = len(self._client_batches)
        client_number = min(self._num_trained + 1, num_clients)
        return f"{client_number}/{num_clients}"

    @property
    def matrix(self) -> Tensor:
        """Return the clients' models ``[k, P]`` in the order of ``updates``."""
        return self._matrix[: len(self.updates)]

    def trained_models(self) -> dict[int, Tensor]:
        """Return ``{client id: model [P]}`` as trained, before attacks, noise and compression."""
        trained_models = {}
        for update in self.updates:
            # A client's data can be read only while they are opened.
            with opened(self.manager.locals[update.client_id]) as client_data:
                if client_data.model is not None:
                    trained_models[update.client_id] = client_data.model
        return trained_models

    # ---- the end of a round

    def exclude(self, clients: Collection[int]) -> None:
        """Undo all changes of the excluded clients' states, as if they had not been in the cohort."""
        self.local_training.state.values.exclude(clients)
        for client in clients:
            self.manager.forget(client)

    def end_round(self, vector: Tensor) -> None:
        """Write the next global model ``vector [P]`` into the module."""
        self.local_training.state.end_round(vector)
        self._forget_round()

    def finish_epoch(self) -> None:
        """End Lightning's epoch. The module has the next global model."""
        self.loop.end_round()

    def commit(self) -> None:
        """Store the changes of the clients' states in this round."""
        self.store.commit()

    def settle(self) -> None:
        """Complete a round after the next round's cohort is drawn. By default there is nothing to do."""

    def discard(self) -> bool:
        """Discard an unfinished round, and return whether there was one."""
        self.store.discard()
        if self.loop.phase is Phase.DISCARDED:
            return False
        self.local_training.discard()
        self._forget_round()
        if self.loop.phase is Phase.CLIENTS:
            self.loop.phase = Phase.DISCARDED
        return True

    def _forget_round(self) -> None:
        for client_batches in self._client_batches:
            self.manager.locals[client_batches.client].set_models(initial_model=None, model=None)
        self._matrix = self._matrix.new_empty(0)
        self.updates = []
        self._instructions = {}

    # ---- between rounds

    def own_scores(self, instruct: Instruct) -> dict[str, Tensor]:
        """Return the scores ``[n]`` of clients' own models on their test splits, by name. ``instruct`` returns the
        clients' instructions, on which these models depend."""
        # SeveralRanks overrides this method to collect the models of all processes, but only those of this process are
        # needed. Clients without a model of their own have the global model.
        own_models = Engine.received_models(self, instruct)
        if self.config.evaluation.models == "trained":
            own_models |= self.state.trained

        from flsv.engines.scoring import class_scores, copy_to_score

        module = copy_to_score(self._module, self.space)
        scores_of_clients = []
        for client in self._clients_of_process():
            model = own_models.get(client, self.state.model())
            self._write_own_model(module, client, model)
            test_loader = self.data.client_loader(client, "test")
            client_scores = class_scores(self.trainer, module, test_loader, self.data.num_classes)
            scores_of_clients.append(client_scores)

        scores_by_name = {}
        for name in OWN_SCORES:
            scores = [client_scores[name] for client_scores in scores_of_clients]
            scores_by_name[name] = torch.tensor(scores)  # [k], NaN without test samples
        return scores_by_name

    def _write_own_model(self, module: L.LightningModule, client: int, model: Tensor) -> None:
        """Write a client's model, and the tensors that it does not share, into a copy of the module."""
        self.space.write(module, model)
        private_entries = self.space.read_private(self._module)
        with opened(self.manager.locals[client]) as client_data:
            private_entries.update(client_data.private)
        self.space.write_private(module, private_entries)

    def received_models(self, instruct: Instruct) -> dict[int, Tensor]:
        """Return ``{client id: model [P]}`` of clients with an initial model other than the global one."""
        own_models = {}
        instructions = instruct(self._clients_of_process())
        for client, instruction in instructions.items():
            with opened(self.manager.locals[client]) as client_data:
                model = used_model(client_data, instruction, self._strategies)
            if model is not None and model is not self.state.model():
                own_models[client] = model
        return own_models

    def write_tables(self, cohort: Sequence[int], folder: Path) -> None:
        """Write the tables that the cohort's clients have stored in a round."""
        for client in sorted(set(self._clients_of_process()).intersection(cohort)):
            with opened(self.manager.locals[client]) as local:
                write_tables(local, folder / self._client_folders[client])

    @cached_property
    def _client_folders(self) -> list[str]:
        return client_folders(self.data.client_names)

    def client_states(self) -> dict[int, Any]:
        """Return ``{client id: state}``, the states that clients keep between rounds, for a checkpoint."""
        return self.store.state_dict()

    # ---- the end

    def close(self) -> None:
        """Restore the trainer's state before the fit."""
        self._undo.close()

    # ---- methods that other engines override

    def _make_manager(self) -> ClientManager:
        return ClientManager(
            self.trainer, self.data, self.space, self.store, make_client=self._make_client
        )

    def _make_client(self, client: int, data: LocalData, channel: Channel) -> Client:
        return Client(client, data, channel, is_private=self.config.is_private)

    def _prepare(self) -> None:
        """Prepare for training, before Lightning's hooks are patched."""

    def _clients_of_process(self) -> Sequence[int]:
        return range(self.state.num_clients)

    def _batches(self) -> Any:
        return self.loader()

    def _load(self, clients: list[int]) -> CohortLoader:
        return CohortLoader(
            self.data,
            clients,
            seed=self.state.seed,
            round_index=self.state.round_index,
            lengths=self._steps.lengths,
        )


def _scores_models(strategy: Any) -> bool:
    return strategy.evaluates or measure_of(strategy) is not None


def describe_place(client: int | None, round_index: int, names: Sequence[str] = ()) -> str:
    """Describe, for an error message, which client trained in which round.

    Example:
        >>> describe_place(None, 5)
        'at the server in round 6'
        >>> describe_place(1, 5, ("Boston", "Lyon"))
        "while client 1 ('Lyon') trained in round 6"
    """
    if client is None:
        occasion = "at the server"
    else:
        occasion = f"while {client_called(client, names)} trained"
    return f"{occasion} in round {round_index + 1}"


def _make_federated_strategy(**options: Any) -> Any:
    from flsv.engines.ranks import FederatedStrategy

    return FederatedStrategy(**options)


# With this name a Trainer finds the strategy.
StrategyRegistry.register(
    "federated", _make_federated_strategy, "the clients of a federation on several processes"
)
