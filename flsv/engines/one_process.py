"""OneProcess: the engine that trains the clients one after the other in this process; other engines are subclasses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv._lightning.evaluation import all_on_device
from flsv._lightning.several_processes import IdleLoader, idle_patches
from flsv.attacks import Collusion
from flsv.configuration.federation_config import FederationConfig
from flsv.core import ALONE, FederationState, Instruction, Ranks, Round, opened
from flsv.core.artifacts import client_folders, write_artifacts
from flsv.core.parameter_space import ParameterSpace
from flsv.core.sharing import Sharing, sharing
from flsv.data import FederatedDataModule
from flsv.games import CoalitionGames, ModelScore
from flsv.games.judges import ClientJudges
from flsv.games.make_evaluators import make_evaluators, suggest_logged_value
from flsv.training.client_manager import ClientManager, try_forward
from flsv.training.cohort import CohortLoader, CohortTraining
from flsv.training.local_steps import LocalSteps
from flsv.training.resumed_options import OptimizerOptions
from flsv.training.store import ClientStore
from flsv.training.turn import Turn
from flsv.utilities.errors import ConfigurationError

#: Function from client ids to the server's next instructions for these clients.
Instruct = Callable[[Sequence[int]], dict[int, Instruction]]


def shared_space(module: nn.Module, config: FederationConfig) -> tuple[ParameterSpace, Sharing]:
    """Return the map, the same on both sides of a federation, and what does not travel because of ``share``."""
    private = [pattern for strategy in config.strategies.values() for pattern in strategy.private]
    shared = sharing(config.share, module, config.head)
    return ParameterSpace(module, config.head, private, **shared._asdict()), shared


class OneProcess:
    """The engine that runs the clients in this process, one after the other. Other engines are subclasses.

    Args:
        trainer: the trainer, with its module on its device and its optimizers set up.
        data: the data module, with its samples assigned to clients.
        state: the federation's state between rounds, which the run updates.
        store: the state that clients keep between rounds.
        config: the federation's parts.
        steps: every client's number of optimizer steps in the fit.

    Attributes:
        space: the map between the module and vectors.
        shared: the entries that ``share`` excludes.
        manager: the clients' data.
        options: the options that ``configure_optimizers`` set.
        ranks: the processes; here one.
    """

    ranks: Ranks = ALONE

    #: Whether the clients' data can be read in this process.
    clients_here = True

    #: Whether the Trainer gets one idle batch per round, within which the cohort trains elsewhere.
    idle = False

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
        store.to(self.device)
        self.options = OptimizerOptions(trainer)
        self.manager = self._make_manager()
        self._cohort: CohortTraining | None = None
        self._loader: CohortLoader | None = None

    @property
    def cohort(self) -> CohortTraining:
        """Return the training of the cohorts.

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
    def device(self) -> torch.device:
        """Return the module's device."""
        return self.trainer.lightning_module.device

    def patches(self) -> list[tuple[Any, str, Any]]:
        """Return the attributes to replace during the fit, as owner (the trainer or its module), name and value."""
        return []

    # ---- before the first round

    def check(self, fields: Mapping[str, Mapping[str, Any]], evaluating: Mapping[str, Any]) -> None:
        """Refuse metrics that this engine cannot measure.

        Args:
            fields: the round's fields that each metric reads, by metric and argument.
            evaluating: the metrics for which clients evaluate models.
        """

    def games(self, measures: Mapping[str, Any], evaluating: Mapping[str, Any]) -> CoalitionGames | None:
        """Make the evaluation of coalitions' models, and try every evaluation that the run will do.

        Args:
            measures: metric name to the performance of coalitions' models that the metric reads.
            evaluating: the metrics for which clients evaluate models.

        Returns:
            The games; None where no metric evaluates coalitions.
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
            judges = ClientJudges(self.space, self.manager.clients, self.data, measure, self.device, self._state.note)
            judges.check(self._state.model())
            validated[key] = judges
        evaluator = None
        if classified:
            try:
                evaluator = self.manager.evaluator(all_on_device(trainer, val))
            except ConfigurationError as error:
                instead = suggest_logged_value(trainer, self.space, val)
                raise ConfigurationError(f"metrics {classified}: {error}{instead}") from error
        server_lr = self._config.aggregator.server_lr
        return CoalitionGames(evaluator, server_lr=server_lr, validated=validated, ranks=self.ranks)

    def _try_evaluations(self, asking: Sequence[Any]) -> None:
        """Try the evaluations that clients will do for ``ClientEvaluation``, and for these strategies and metrics."""
        if every := self._config.evaluation.every:
            test = self.data.client_loader(0, "test", shuffle=False)
            try_forward(self.trainer, test, self.data.num_classes, f"ClientEvaluation(every={every})")
        for asks in asking:
            performance = getattr(asks, "performance", None)
            if isinstance(performance, ModelScore):
                self.manager.any_task(0, "val", performance)
            elif asks.evaluates:
                self.manager.tried()

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        """Start the client side, once the optimizers are set up.

        Args:
            buffers: counters and masks of a checkpoint, which vectors do not hold; None: the module's own.
        """
        turn = Turn(self.trainer, self.space, self._config, self.store, self._state.num_clients, self._steps)
        if buffers is not None:
            turn.shared.restore(buffers)
        self._cohort = self._make_cohort(turn)

    # ---- a round

    def loader(self) -> Any:
        """Return the train dataloader of the current round's cohort; it may be asked for twice."""
        if self._loader is None or self._loader.round_index != self._state.round_index:
            self._loader = self._load(self._state.cohort)
        return self._loader

    def begin_round(self) -> Tensor:
        """Begin a round: return the global model ``[P]``, which the module holds."""
        self.cohort.turn.shared.begin_round()
        return self.cohort.global_vector

    def instruct(self, instructions: dict[int, Instruction], sent: Callable[[Mapping[int, Instruction]], None]) -> None:
        """Tell the cohort what to do.

        Args:
            instructions: the instructions by client id.
            sent: called with the instructions that have been sent.
        """
        sent(instructions)
        self.cohort.begin_round(self._batches(), instructions, self.data.num_samples)

    def end_training(self) -> CohortTraining:
        """End the cohort's training, and return what has come of it."""
        training = self.cohort
        training.turn.shared.end_turns()
        colluders = [each for each in self._config.uploads if isinstance(each, Collusion)]
        training.collude(colluders, self._state.num_clients, self._state.round_index)
        return training

    def agree(self, round: Round, contributions: Mapping[str, Tensor]) -> None:
        """Check, when the round is over, that all processes that are the server have come to the same."""

    def commit(self) -> None:
        """Keep what clients have staged in this round."""
        self.store.commit()

    def settle(self) -> None:
        """Do what can only be done once the next cohort is drawn."""

    def discard(self) -> bool:
        """Forget an unfinished round. Return whether there was one."""
        self.store.discard()
        return self._cohort is not None and self._cohort.discard()

    def within_round(self) -> dict[str, Tensor] | None:
        """Return the global model's ``state_dict`` at the round's start while the module is a client; else None."""
        return self.cohort.turn.shared.global_state_dict() if self.cohort.active else None

    # ---- between rounds

    def own_scores(self, instruct: Instruct) -> dict[str, Tensor]:
        """Score the clients' own models on their own test splits.

        Args:
            instruct: returns the server's next instructions for some clients.

        Returns:
            Scores ``[n]`` by name.
        """
        state = self._state
        trained = state.trained if self._config.evaluation.models == "trained" else {}
        models = {**self._received(instruct), **trained}
        return self.manager.own_scores(self._mine(), models, state.model())

    def received(self, instruct: Instruct) -> dict[int, Tensor]:
        """Return the model ``[P]`` that each client would start the next round from, where it is not the global one."""
        return self._received(instruct)

    def write_artifacts(self, cohort: Sequence[int], round_index: int, folder: Path) -> None:
        """Write the pictures that clients of the round keep, each into its own folder below this one."""
        names = client_folders(self.data.client_names)
        for client in set(self._mine()).intersection(cohort):
            with opened(self.manager.locals[client]) as local:
                write_artifacts(local, folder / names[client], round_index)

    def kept(self) -> dict[int, Any]:
        """Return what clients keep between two rounds, for a checkpoint."""
        return self.store.state_dict()

    # ---- the end

    def failed(self, exception: BaseException, place: str) -> None:
        """Take note that the fit has failed with this exception."""

    def close(self) -> None:
        """Restore the trainer as it was before the fit."""
        if self._cohort is not None:
            self._cohort.turn.remove()

    # ---- what another engine does otherwise

    def _make_manager(self) -> ClientManager:
        return ClientManager(self.trainer, self.data, self.space, self.store)

    def _make_cohort(self, turn: Turn) -> CohortTraining:
        return CohortTraining(turn, self.manager)

    def _mine(self) -> Sequence[int]:
        """Return the clients that are in this process."""
        return range(self._state.num_clients)

    def _received(self, instruct: Instruct) -> dict[int, Tensor]:
        return self.manager.received(self._strategies, instruct(self._mine()), self._state.model())

    def _batches(self) -> Any:
        """Return the batches that clients train on; in this engine those that the Trainer goes through."""
        return self.loader()

    def _load(self, clients: list[int]) -> CohortLoader:
        return CohortLoader(
            self.data,
            clients,
            seed=self._state.seed,
            round_index=self._state.round_index,
            local_epochs=self._config.local_epochs,
            limit=self._steps.limit,
        )


class IdleProcess(OneProcess):
    """Base class of engines whose cohort trains elsewhere, within the Trainer's one idle batch per round."""

    idle = True

    def patches(self) -> list[tuple[Any, str, Any]]:
        return idle_patches(self.trainer)

    def loader(self) -> Any:
        return IdleLoader(self._state.round_index)
