"""OneProcess: a federation in one process. The Trainer's module is each client in turn, and the global model between
rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from flsv._lightning.evaluation import all_on_device
from flsv._lightning.per_client import AccumulationWindows
from flsv._lightning.several_processes import IdleLoader, idle_patches
from flsv.attacks import Collusion
from flsv.clients.client_manager import ClientManager, try_evaluations
from flsv.clients.cohort import CohortLoader, CohortTraining
from flsv.clients.optimizers import ClientOptimizers, OptimizerOptions
from flsv.clients.schedules import LocalSteps
from flsv.clients.train_client import LocalTraining
from flsv.data import FederatedDataModule
from flsv.games import ModelScore
from flsv.games.metric_of_outputs import validated_models
from flsv.parameters import ParameterSpace
from flsv.participants import ALONE, ClientStates, Ranks, run_protocol
from flsv.participants.artifacts import client_folders, write_artifacts
from flsv.participants.sharing import Sharing, sharing, warn_of_sharing
from flsv.round import FederationState, Instruction, Round
from flsv.round.state import GLOBAL_MODEL
from flsv.sampling.base import chances_of, cohort_of
from flsv.seeding import generator_for
from flsv.server import ContributionMetrics, RoundServer
from flsv.server.checks import check_space
from flsv.server.config import FederationConfig
from flsv.server.description import federation


def shared_space(module: nn.Module, config: FederationConfig) -> tuple[ParameterSpace, Sharing]:
    """The map, the same on both sides of a federation, and what does not travel because of ``share``."""
    private = [pattern for strategy in config.strategies.values() for pattern in strategy.private]
    shared = sharing(config.share, module, config.head)
    return ParameterSpace(module, config.head, private, **shared._asdict()), shared


def local_training(
    trainer: L.Trainer,
    space: ParameterSpace,
    config: FederationConfig,
    num_clients: int,
    steps: LocalSteps | None,
    optimizer_state: dict[str, Any] | None,
    buffers: dict[str, Any] | None,
) -> LocalTraining:
    """How clients train in a trainer's module, with what a checkpoint holds of its optimizers and its buffers."""
    strategies: Mapping[str, Any] = config.strategies
    local = LocalTraining(
        trainer.lightning_module,
        space,
        ClientOptimizers(trainer, config.client_optimizer, optimizer_state, steps),
        AccumulationWindows(trainer),
        num_clients,
        strategies.get("client_algorithm"),
        strategies.get("personalizer"),
        list(strategies.values()),
        config.uploads,
        config.local_epochs,
    )
    if buffers is not None:
        local.restore(buffers)
    return local


class OneProcess:
    """The running federation, from the start of a fit on.

    Args:
        trainer: with its module on its device and its optimizers set up.
        data: dealt out.
        state: what stands between two rounds; it is updated.
        states: what the clients keep between rounds.
        board: the metrics.
        config: what the federation is put together from.
        steps: how many optimizer steps every client takes in the fit.

    Attributes:
        space: the map between the module and vectors.
        manager: the clients as holders of data.
        server: the server side.
        training: the client side; None before training starts.
        options: what ``configure_optimizers`` gave.
        evaluated: whether the last round ended with an evaluation of the clients' own models.
        ranks: the processes; here one.
    """

    ranks: Ranks = ALONE

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        state: FederationState,
        states: ClientStates,
        board: ContributionMetrics,
        config: FederationConfig,
        steps: LocalSteps | None = None,
    ) -> None:
        module = trainer.lightning_module
        self._trainer, self._data, self._state, self._states = trainer, data, state, states
        self._config, self._steps = config, steps
        self._strategies: Mapping[str, Any] = config.strategies
        self.space, shared = shared_space(module, config)
        kept = [name for name in self.space.private_names if name in shared.kept]
        num_classes = data.num_classes if data.no_classes is None else None
        check_space(self.space, board, config.uploads, config.head, num_classes, kept)
        warn_of_sharing(kept, self.space, module, bool(config.evaluation.every))
        for movable in (board, state, states):
            movable.to(module.device)
        self.options = OptimizerOptions(trainer)
        self.manager = self._make_manager()
        self.manager.chunk = state.chunk
        known = board, config.aggregator, config.personalizer, list(self._strategies.values()), self.space
        self.server = RoundServer(*known, self.manager.channel, filters=config.filters)
        self.training: CohortTraining | None = None
        self.evaluated = False
        self._loader: CohortLoader | None = None
        self._instructions: dict[int, Instruction] = {}
        state.global_vector = self.space.read(module)

    # ---- what another engine does otherwise

    #: Whether the clients' data can be read in this process.
    clients_here = True

    #: Whether the Trainer's own batches are idle ones: the cohort trains elsewhere, all within the one of a round.
    idle = False

    def patches(self) -> list[tuple[Any, str, Any]]:
        """Attributes of the trainer and its module that are others for the length of the fit: owner, name, value."""
        return []

    def write_artifacts(self, round: Round, folder: Path) -> None:
        """Let the round's clients write their pictures, each into its own folder below this one."""
        index, names = round.round_index, client_folders(self._data.client_names)
        run_protocol(round.clients or (), lambda client: client.ask(write_artifacts, folder / names[client.id], index))

    def _send(self) -> None:
        """The round's instructions go down, and count."""
        self._sent(self._instructions)

    def _sent(self, instructions: Mapping[int, Instruction]) -> None:
        """These have gone down, after what was asked to draw the cohort."""
        self.server.send(instructions)
        self.manager.channel.put_first(self._state.crossed)

    def _make_manager(self) -> ClientManager:
        return ClientManager(self._trainer, self._data, self.space, self._states)

    def _make_training(self, local: LocalTraining) -> CohortTraining:
        return CohortTraining(local, self.manager)

    def _own_scores(self) -> dict[str, Tensor]:
        """Name to ``[n]``, of the clients' own models on their own test splits."""
        state = self._state
        trained = state.trained if self._config.evaluation.models == "trained" else {}
        models = {**self._received(), **trained}
        return self.manager.own_scores(self._mine(), models, state.model())

    def _mine(self) -> Sequence[int]:
        """The clients that are in this process."""
        return range(self._state.num_clients)

    def _received(self) -> dict[int, Tensor]:
        instructions = self.server.instruct(self._mine(), self._state)
        return self.manager.received(self._strategies, instructions, self._state.model())

    # ---- before the first round

    def begin_strategies(self, resumed: bool) -> None:
        """Tell the strategies of the federation, before the first cohort is drawn."""
        state = self._state
        optimizers = self._trainer.optimizers
        epochs = self._config.local_epochs
        known = federation(
            state.model(),
            self.space,
            self._data,
            state.seed,
            optimizers,
            self._strategies,
            epochs,
            self._config.uploads,
            self.server.board.metrics,
        )
        for part in (*self._strategies.values(), *self.server.filters):
            (part.resume if resumed else part.begin)(known)
        if (algorithm := self._strategies.get("client_algorithm")) is not None:
            algorithm.check_fit(self._trainer, self._config)
        self._know_chances()
        # A checkpoint holds the one that was drawn; clients are asked when everything is ready.
        if not state.cohort and not self._strategies["sampler"].asks:
            self.draw_cohort()

    def begin_training(self, optimizer_state: dict[str, Any] | None, buffers: dict[str, Any] | None) -> None:
        """The optimizers are as they will be used.

        Args:
            optimizer_state: the clients', of a checkpoint.
            buffers: those that no vector holds, of a checkpoint.
        """
        trainer, board, config = self._trainer, self.server.board, self._config
        self.space.check(trainer.lightning_module)
        measures, val = board.performances, self._data.val_dataloader()
        games = [name for name, measure in measures.items() if not isinstance(measure, ModelScore)]
        every = config.evaluation.every if self.clients_here else 0
        try_evaluations(trainer, self._data, every, games)
        asking_clients = [*self._strategies.values(), *board.evaluating.values()]
        for asks in asking_clients if self.clients_here else ():
            performance = getattr(asks, "performance", None)
            if isinstance(performance, ModelScore):
                self.manager.any_task(0, "val", performance)
            elif asks.evaluates:
                self.manager.tried()
        if measures:
            asking = {f"metric {name!r}": measure for name, measure in measures.items()}
            validated = validated_models(trainer, self.space, val, asking, seed=self._state.seed)
            self.server.bind_evaluator(
                self.manager.evaluator(all_on_device(trainer, val)) if games else None, validated, self.ranks
            )
        clients = self._state.num_clients
        local = local_training(trainer, self.space, config, clients, self._steps, optimizer_state, buffers)
        self.training = self._make_training(local)

    def draw_cohort(self) -> None:
        """Draw the cohort of the next round, before its batches are made."""
        state = self._state
        self._know_chances()
        sampler, draw = self._strategies["sampler"], generator_for(state.seed, "cohort", state.round_index)
        before = len(self.manager.channel.messages)
        told = state.num_clients, self._known, draw, state.round_index
        state.cohort = cohort_of(sampler, *told, self.manager.clients, state.model())
        # What has crossed for it is the coming round's, and lies in the checkpoint before it.
        state.crossed = self.manager.channel.taken_out(before)

    def _know_chances(self) -> None:
        # As they are now: the metrics are updated before an aggregator asks.
        known, state, index = self.server.board.with_priors(), self._state, self._state.round_index
        self._known = known
        self._chances: Callable[[], Tensor] = lambda: chances_of(
            self._strategies["sampler"], state.num_clients, known, index, state.cohort
        )

    def loader(self, limit: float) -> CohortLoader:
        """The train dataloader of the current round; it may be asked for twice."""
        state = self._state
        if self._loader is None or self._loader.round_index != state.round_index:
            self._loader = self._load(self._cohort(), limit)
        return self._loader

    def _cohort(self) -> list[int]:
        """Of the current round, drawn where it has not been."""
        if not self._state.cohort:
            self.draw_cohort()
        return self._state.cohort

    def _load(self, clients: list[int], limit: float) -> CohortLoader:
        return CohortLoader(
            self._data,
            clients,
            seed=self._state.seed,
            round_index=self._state.round_index,
            local_epochs=self._config.local_epochs,
            limit=limit,
        )

    # ---- a round

    @property
    def clients(self) -> CohortTraining:
        """The client side.

        Raises:
            RuntimeError: training has not started.
        """
        if self.training is None:
            raise RuntimeError("no client trains before the fit's first round.")
        return self.training

    def begin_round(self, loader: CohortLoader) -> None:
        """The module holds the global model."""
        state, local = self._state, self.clients.local
        local.begin_round()
        state.global_vector = local.global_vector
        self._instructions = self.server.instruct(state.cohort, state)
        if any(upload.reference == "global" for upload in self._config.uploads):
            for client, told in self._instructions.items():
                if told.start is not state.global_vector:
                    tensors = {**told.tensors, GLOBAL_MODEL: state.global_vector}
                    self._instructions[client] = replace(told, tensors=tensors)
        self._send()
        self.clients.begin_round(loader, self._instructions, self._data.num_samples)

    def end_round(self, evaluate: Callable[[], bool]) -> Round:
        """The cohort has trained: the server's part, and the module becomes the next global model.

        Args:
            evaluate: whether to evaluate the clients' own models, asked once the metrics are updated.
        """
        state, training = self._state, self.clients
        training.local.end_visits()
        colluders = [each for each in self._config.uploads if isinstance(each, Collusion)]
        training.collude(colluders, state.num_clients, state.round_index)
        round = self.server.collect(
            training.updates,
            training.matrix,
            self._instructions,
            state,
            self.manager.clients,
            self.manager.server,
            self._chances,
            training.broken,
        )
        training.leave_out({update.client_id for update in training.updates} - set(round.client_ids.tolist()))
        round = self.server.finish(round, state)
        assert round.server_vector is not None
        assert round.aggregation_weights is not None
        ids = round.client_ids.cpu()
        state.weights = torch.full((state.num_clients,), float("nan"))
        state.weights[ids] = round.aggregation_weights.detach().float().cpu()
        state.participations[ids] += 1
        if self._config.evaluation.keeps:
            state.trained.update({client: model.clone() for client, model in training.trained().items()})
        state.global_vector = round.server_vector
        state.heard[[*training.broken, *(update.client_id for update in training.updates)]] += 1
        self.evaluated = evaluate()
        if self.evaluated:
            state.client_scores = self._own_scores()
        state.chunk = self.manager.chunk
        self._instructions = {}  # they hold the model of the round before
        training.end_round(round.server_vector)
        return round

    def advance(self, last: bool) -> None:
        """Complete the round: commit what its clients keep, and move on to the next.

        Args:
            last: whether there is no next one: then nobody is drawn.
        """
        self._states.commit()
        self._state.round_index += 1
        self._state.cohort = []
        if not last:
            self.draw_cohort()

    def discard(self) -> bool:
        """Forget an unfinished round. Whether there was one."""
        self._states.discard()
        return self.clients.discard()

    def within_round(self) -> dict[str, Tensor] | None:
        """The global model's ``state_dict`` at the start of the round while the module is a client; else None."""
        return self.clients.local.global_state_dict() if self.clients.active else None

    def received(self) -> dict[int, Tensor]:
        """Client id to the model ``[P]`` that it would start the next round from, where that is not the global one."""
        return self._received()

    # ---- around the rounds

    def kept(self) -> tuple[dict[int, Any], dict[str, Any]]:
        """The state of clients and their optimizers between two rounds, for a checkpoint."""
        return self._states.state_dict(), self.clients.local.optimizers.state_dict()

    def failed(self, exception: BaseException, place: str) -> None:
        """The fit ends with this."""

    def close(self) -> None:
        """Leave the trainer as it was found."""
        if self.training is not None:
            self.training.local.windows.remove()


class IdleProcess(OneProcess):
    """An engine whose cohort trains elsewhere than in the Trainer's own batches."""

    idle = True

    def patches(self) -> list[tuple[Any, str, Any]]:
        return idle_patches(self._trainer)

    def loader(self, limit: float) -> Any:
        self._cohort()
        return IdleLoader(self._state.round_index)
