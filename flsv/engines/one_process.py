"""OneProcess: the engine that trains the clients one after the other in this process; other engines are subclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv._lightning.epoch import LocalEpochs
from flsv._lightning.evaluation import all_on_device
from flsv._lightning.patches import PatchedAttributes
from flsv._lightning.several_processes import IdleBatch, idle_patches
from flsv.attacks import Collusion
from flsv.configuration.federation_config import FederationConfig
from flsv.core import ALONE, FederationState, Instruction, Ranks, opened
from flsv.core.artifacts import client_folders, write_artifacts
from flsv.core.parameter_space import ParameterSpace
from flsv.core.sharing import Sharing, sharing
from flsv.data import FederatedDataModule
from flsv.engines.client_manager import ClientManager, try_forward
from flsv.engines.cohort import CohortTraining
from flsv.games import CoalitionGames, ModelScore
from flsv.games.judges import ClientJudges
from flsv.games.make_evaluators import BY_A_LOGGED_VALUE, make_evaluators
from flsv.training.client_turn import Turn
from flsv.training.cohort_loader import CohortLoader
from flsv.training.optimizers import OptimizerOptions
from flsv.training.step_counts import LocalSteps
from flsv.training.store import ClientStore
from flsv.utilities.errors import ConfigurationError

#: Function that takes client ids and returns the server's next instructions for these clients, by client id.
Instruct = Callable[[Sequence[int]], dict[int, Instruction]]


def shared_space(module: nn.Module, config: FederationConfig) -> tuple[ParameterSpace, Sharing]:
    """Return the map between a module and its vectors, and the module's entries that the loop's argument ``share``
    excludes from vectors. Server and clients of a federation compute the same map.

    Args:
        module: the module.
        config: the federation's configuration.
    """
    private = [pattern for strategy in config.strategies.values() for pattern in strategy.private]
    shared = sharing(config.share, module, config.head)
    return ParameterSpace(module, config.head, private, **shared._asdict()), shared


class OneProcess:
    """The engine that trains the clients in this process, one after the other; other engines are subclasses.

    Args:
        trainer: the trainer, with its module on its device and its optimizers set up.
        data: the data module, with its samples assigned to clients.
        state: the federation's state between rounds, which the run updates.
        store: the state that clients keep between rounds.
        config: the federation's configuration.
        steps: every client's number of optimizer steps in the fit.

    Attributes:
        space: the map between the module and its vectors ``[P]``.
        shared: the loop's argument ``share``, applied to the module: which entries are in the vectors, and which stay
            private.
        manager: the clients' data.
        options: the options of optimizers and schedulers that ``configure_optimizers`` has set.
        ranks: the processes that the federation runs on; in this engine a single one.
    """

    ranks: Ranks = ALONE

    #: Whether the clients' data can be read in this process.
    clients_here = True

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        state: FederationState,
        store: ClientStore,
        config: FederationConfig,
        steps: LocalSteps,
    ) -> None:
        self.trainer, self.data = trainer, data
        self._state, self.store, self._config, self._steps = state, store, config, steps
        self._strategies: Mapping[str, Any] = config.strategies
        self.space, self.shared = shared_space(trainer.lightning_module, config)
        store.to(self._device)
        self.options = OptimizerOptions(trainer)
        self.manager = self._make_manager()
        self._undo = ExitStack()
        self._cohort: CohortTraining | None = None
        self._loader: CohortLoader | None = None

    @property
    def cohort(self) -> CohortTraining:
        """Return the object that trains the cohorts.

        Raises:
            RuntimeError: training has not started.
        """
        if self._cohort is None:
            raise RuntimeError("clients are there from the start of training on.")
        return self._cohort

    @property
    def begun(self) -> bool:
        """Return whether training has started."""
        return self._cohort is not None

    @property
    def _device(self) -> torch.device:
        return self.trainer.lightning_module.device

    # ---- before the first round

    def check(self, fields: Mapping[str, Mapping[str, Any]], evaluating: Mapping[str, Any]) -> None:
        """Raise an error if this engine cannot compute a metric; here it can compute all.

        Args:
            fields: ``{metric: {argument: field}}``, the field of the round that each argument of a metric reads.
            evaluating: the metrics, by name, for which clients evaluate models.

        Raises:
            ConfigurationError: a metric cannot be computed (in other engines).
        """

    def games(self, measures: Mapping[str, Any], evaluating: Mapping[str, Any]) -> CoalitionGames | None:
        """Make the evaluator of coalitions' models, and try every kind of evaluation that the run needs.

        Args:
            measures: ``{metric: performance}``, the performance of coalitions' models that each metric reads.
            evaluating: the metrics, by name, for which clients evaluate models.

        Returns:
            The evaluator of coalitions; None if no metric evaluates coalitions.

        Raises:
            ConfigurationError: a performance is not available for this module or data.
        """
        trainer, val = self.trainer, self.data.val_dataloader()
        self.space.check(trainer.lightning_module)
        judged = {each.evaluator: each for each in measures.values() if isinstance(each, ModelScore) and each.judged}
        measures = {name: measure for name, measure in measures.items() if getattr(measure, "judged", False) is False}
        classified = [name for name, measure in measures.items() if not isinstance(measure, ModelScore)]
        if self.clients_here:
            self._try_evaluations([*self._strategies.values(), *evaluating.values()])
        if not measures and not judged:
            return None
        asking = {f"metric {name!r}": measure for name, measure in measures.items()}
        validated = make_evaluators(trainer, self.space, val, asking, seed=self._state.seed)
        for key, measure in judged.items():
            judges = ClientJudges(self.space, self.manager.clients, self.data, measure, self._device, self._state.note)
            judges.check(self._state.model())
            validated[key] = judges
        evaluator = None
        if classified:
            try:
                evaluator = self.manager.evaluator(all_on_device(trainer, val))
            except ConfigurationError as error:
                raise ConfigurationError(f"metrics {classified}: {error}{BY_A_LOGGED_VALUE}") from error
        server_lr = self._config.aggregator.server_lr
        return CoalitionGames(evaluator, server_lr=server_lr, validated=validated, ranks=self.ranks)

    def _try_evaluations(self, asking: Sequence[Any]) -> None:
        """Try out the evaluations that clients will do for ``ClientEvaluation``, and for the strategies and metrics in
        ``asking``, on the first client."""
        if every := self._config.evaluation.every:
            test = self.data.client_loader(0, "test", shuffle=False)
            try_forward(self.trainer, test, self.data.num_classes, f"ClientEvaluation(every={every})")
        for asks in asking:
            performance = getattr(asks, "performance", None)
            if isinstance(performance, ModelScore):
                self.manager.any_task(0, "val", performance)
            elif asks.evaluates:
                train = self.data.client_loader(0, "train", shuffle=False)
                try_forward(self.trainer, train, self.data.num_classes, type(asks).__name__)

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        """Prepare for the training of clients, after the optimizers are set up.

        Args:
            buffers: the buffers from a checkpoint that vectors do not hold, such as counters and masks; None to keep
                the module's.
        """
        turn = Turn(self.trainer, self.space, self._config, self.store, self._state.num_clients, self._steps)
        if buffers is not None:
            turn.state.restore(buffers)
        self._cohort = self._make_cohort(turn)
        self._epochs = LocalEpochs(self.trainer, turn.begin_batch, turn.end_batch)
        self._undo.callback(self._epochs.remove)

    # ---- a round

    def loader(self) -> Any:
        """Return the Trainer's train dataloader of the current round; a second call in the round returns the same."""
        if self._loader is None or self._loader.round_index != self._state.round_index:
            self._loader = self._load(self._state.cohort)
        return self._loader

    def train(self, instructions: dict[int, Instruction]) -> CohortTraining | None:
        """Train a cohort, whose clients start from the global model that the module holds.

        Args:
            instructions: the server's message to every client of the cohort, by client id.

        Returns:
            The cohort's training, which holds the clients' updates; None if the fit was told to stop before the
            cohort's last batch.
        """
        cohort = self.cohort
        cohort.begin_round(self._batches(), instructions, self.data.num_samples)
        self._epochs.begin_round()
        self._train(cohort)
        if not cohort.complete:
            return None
        cohort.turn.state.end_turns()
        colluders = [each for each in self._config.uploads if isinstance(each, Collusion)]
        cohort.collude(colluders, self._state.num_clients, self._state.round_index)
        return cohort

    def finish_epoch(self) -> None:
        """Let Lightning end its epoch: it then validates and saves the module, which already holds the next global
        model."""
        self._epochs.finish()

    def commit(self) -> None:
        """Store the state that clients have changed in this round."""
        self.store.commit()

    def settle(self) -> None:
        """End a round, after the next round's cohort is drawn; this engine has nothing to do then."""

    def discard(self) -> bool:
        """Forget an unfinished round.

        Returns:
            True if there was an unfinished round; False if there was none, or if it was discarded before.
        """
        self.store.discard()
        return self._cohort is not None and self._cohort.discard()

    # ---- between rounds

    def own_scores(self, instruct: Instruct) -> dict[str, Tensor]:
        """Score each client's own model on the client's own test split.

        Args:
            instruct: a function that returns the instructions of the server's next round for given clients. A client's
                own model may depend on them, as with personalization.

        Returns:
            ``{name of the score: scores [n]}`` of the federation's n clients.
        """
        state = self._state
        trained = state.trained if self._config.evaluation.models == "trained" else {}
        models = {**self._received(instruct), **trained}
        return self.manager.own_scores(self._mine(), models, state.model())

    def received(self, instruct: Instruct) -> dict[int, Tensor]:
        """Return the models ``[P]`` that clients would use after the server's next instructions.

        Args:
            instruct: a function that returns the server's next instructions for some clients.

        Returns:
            ``{client id: model}`` for the clients that would use another model than the global one.
        """
        return self._received(instruct)

    def write_artifacts(self, cohort: Sequence[int], round_index: int, folder: Path) -> None:
        """Write the files (pictures, tables) that clients have stored in a round.

        Args:
            cohort: ids of the round's clients.
            round_index: the round's index, from 0.
            folder: the run's folder; each client has its own folder in it.
        """
        names = client_folders(self.data.client_names)
        for client in set(self._mine()).intersection(cohort):
            with opened(self.manager.locals[client]) as local:
                write_artifacts(local, folder / names[client], round_index)

    def kept(self) -> dict[int, Any]:
        """Return ``{client id: state}``, the states that clients keep between rounds, for a checkpoint."""
        return self.store.state_dict()

    # ---- the end

    def close(self) -> None:
        """Restore the trainer as it was before the fit."""
        self._undo.close()

    # ---- methods that other engines override

    def _make_manager(self) -> ClientManager:
        return ClientManager(self.trainer, self.data, self.space, self.store)

    def _make_cohort(self, turn: Turn) -> CohortTraining:
        return CohortTraining(turn, self.manager)

    def _train(self, cohort: CohortTraining) -> None:
        """Train the clients of a cohort that has begun."""
        cohort.train(self._epochs.run)

    def _mine(self) -> Sequence[int]:
        """Return the ids of the clients whose data are in this process."""
        return range(self._state.num_clients)

    def _received(self, instruct: Instruct) -> dict[int, Tensor]:
        return self.manager.received(self._strategies, instruct(self._mine()), self._state.model())

    def _batches(self) -> Any:
        """Return the loader of the batches on which clients train; in this engine it is the Trainer's train
        dataloader."""
        return self.loader()

    def _load(self, clients: list[int]) -> CohortLoader:
        """Make the loader of the batches that the given clients train on in the current round."""
        return CohortLoader(
            self.data,
            clients,
            seed=self._state.seed,
            round_index=self._state.round_index,
            local_epochs=self._config.local_epochs,
            limit=self._steps.limit,
        )


class IdleProcess(OneProcess):
    """Base class of engines that do not train the cohort by Lightning's training loop; the loop gets one idle batch per
    round, which trains nothing."""

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        super().begin_training(buffers)
        # This comes after all checks, which look at the module's own hooks.
        self._undo.callback(PatchedAttributes(idle_patches(self.trainer)).restore)

    def loader(self) -> Any:
        return IdleBatch()

    def finish_epoch(self) -> None:
        self._epochs.run(True, idle=True)
        self._epochs.finish()
