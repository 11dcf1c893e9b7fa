"""OneProcess: a federation in one process. The Trainer's module is every client in turn, and the global model between
the rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv._lightning.accumulation import AccumulationWindows
from flsv._lightning.evaluation import on_device
from flsv.clients.cohort import CohortLoader
from flsv.clients.optimizer_options import OptimizerOptions
from flsv.clients.optimizers import ClientOptimizers
from flsv.clients.own_models import own_accuracy, received_models
from flsv.clients.roster import Roster
from flsv.clients.train_client import LocalTraining
from flsv.clients.training import CohortTraining
from flsv.clients.trial import try_evaluations
from flsv.data import FederatedDataModule
from flsv.parameters import ParameterSpace
from flsv.participants import ALONE, ClientStates, Owners, Ranks
from flsv.round import FederationState, Instruction, Round
from flsv.seeding import generator_for
from flsv.server import ContributionBoard, RoundServer
from flsv.server.checks import check_space
from flsv.server.description import federation
from flsv.server.update_watch import UpdateWatch
from flsv.strategy import Strategy
from flsv.uploads import Upload


class OneProcess:
    """What exists of a federation from the start of a fit on, and what happens in its rounds.

    Args:
        trainer: with its module on its device and its optimizers set up.
        data: dealt out.
        state: what stands between two rounds; it is updated.
        states: what the clients keep between rounds.
        board: the metrics.
        strategies: by role.
        uploads: what happens to the clients' updates before they leave.
        arguments: of :class:`flsv.FederatedLoop`, by name.

    Attributes:
        space: the map between the module and vectors.
        roster: the clients as holders of data.
        server: the server side.
        training: the client side; None before training starts.
        watch: judges the clients' updates.
        options: what ``configure_optimizers`` gave.
        evaluated: whether the last round ended with an evaluation of the clients' own models.
        ranks: the processes; here one.
        owners: which of several processes has which client; None: there is one.
    """

    ranks: Ranks = ALONE
    owners: Owners | None = None

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        state: FederationState,
        states: ClientStates,
        board: ContributionBoard,
        strategies: Mapping[str, Strategy],
        uploads: list[Upload],
        arguments: Mapping[str, Any],
    ) -> None:
        module = trainer.lightning_module
        self._trainer, self._data, self._state, self._states = trainer, data, state, states
        self._strategies: dict[str, Any] = dict(strategies)
        self._uploads, self._arguments = uploads, arguments
        private = [pattern for strategy in strategies.values() for pattern in strategy.private]
        self.space = ParameterSpace(module, arguments["head"], private)
        check_space(self.space, board, uploads, arguments["head"], data.num_classes)
        for movable in (board, state, states):
            movable.to(module.device)
        self.options = OptimizerOptions(trainer)
        self.roster = Roster(trainer, data, self.space, states, self.owners)
        self.watch = UpdateWatch(arguments["outlier_threshold"], arguments["exclude_outliers"])
        self.server = RoundServer(
            board,
            self._strategies["aggregator"],
            self._strategies.get("personalizer"),
            list(strategies.values()),
            self.space,
            self.roster.channel,
            server_lr=arguments["server_lr"],
            watch=self.watch,
        )
        self.training: CohortTraining | None = None
        self.evaluated = False
        self._loader: CohortLoader | None = None
        self._instructions: dict[int, Instruction] = {}
        state.global_vector = self.space.read(module)

    # ---- before the first round

    def begin_strategies(self, resumed: bool) -> None:
        """Tell the strategies of the federation, before the first cohort is drawn."""
        state = self._state
        optimizers = self._trainer.optimizers
        known = federation(state.model(), self.space, self._data, state.seed, optimizers, self._strategies)
        for strategy in self._strategies.values():
            (strategy.resume if resumed else strategy.begin)(known)
        self._know_chances()
        if not state.cohort:  # a checkpoint holds the one that was drawn
            self.draw_cohort()

    def begin_training(self, optimizer_state: dict[str, Any] | None, buffers: list[Tensor | None] | None) -> None:
        """The optimizers are as they will be used.

        Args:
            optimizer_state: the clients', of a checkpoint.
            buffers: those that no vector holds, of a checkpoint.
        """
        trainer, board, arguments = self._trainer, self.server.board, self._arguments
        try_evaluations(trainer, self._data, arguments["evaluate_clients_every"], board.game_metrics)
        if board.game_metrics:
            self.server.play_on(self.roster.evaluator(on_device(trainer, self._data.val_dataloader())), self.ranks)
        local = LocalTraining(
            trainer.lightning_module,
            self.space,
            ClientOptimizers(trainer, arguments["client_optimizer"], optimizer_state),
            AccumulationWindows(trainer),
            self._state.num_clients,
            self._strategies.get("client_algorithm"),
            self._strategies.get("personalizer"),
            list(self._strategies.values()),
            self._uploads,
        )
        if buffers is not None:
            local.restore(buffers)
        self.training = self._cohort_training(local, self.roster)

    def _cohort_training(self, local: LocalTraining, roster: Roster) -> CohortTraining:
        return CohortTraining(local, roster)

    def draw_cohort(self) -> None:
        """Who takes part in the next round: known before its batches are."""
        state = self._state
        self._know_chances()
        sampler, draw = self._strategies["sampler"], generator_for(state.seed, "cohort", state.round_index)
        cohort = sampler.sample(state.num_clients, self._known, draw, state.round_index)
        state.cohort = cohort.tolist()
        if not state.cohort:
            raise RuntimeError(f"{sampler!r} drew no client for round {state.round_index}.")

    def _know_chances(self) -> None:
        # As they are now: the metrics are updated before an aggregator asks.
        self._known = self.server.board.with_priors()
        probabilities = self._strategies["sampler"].inclusion_probabilities
        self._chances: Callable[[], Tensor] = partial(
            probabilities, self._state.num_clients, self._known, self._state.round_index
        )

    def loader(self, limit: float) -> CohortLoader:
        """The train dataloader of the current round; it may be asked for twice."""
        state = self._state
        if self._loader is None or self._loader.round_index != state.round_index:
            self._loader = self._load(state.cohort, limit)
        return self._loader

    def _load(self, clients: list[int], limit: float) -> CohortLoader:
        return CohortLoader(
            self._data,
            clients,
            seed=self._state.seed,
            round_index=self._state.round_index,
            local_epochs=self._arguments["local_epochs"],
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
        self.server.send(self._instructions)
        self.clients.begin_round(loader, self._instructions, self._data.num_samples)

    def end_round(self, evaluate: Callable[[], bool]) -> Round:
        """The cohort has trained: the server's part, and the module becomes the next global model.

        Args:
            evaluate: whether to evaluate the clients' own models, asked once the metrics are updated.
        """
        state, training = self._state, self.clients
        round = self.server.finish(
            self.server.collect(
                training.updates,
                training.matrix,
                self._instructions,
                state,
                self.roster.clients,
                self.roster.server,
                self._chances,
                training.broken,
            ),
            state,
        )
        assert round.server_vector is not None
        assert round.aggregation_weights is not None
        ids = round.client_ids.cpu()
        state.weights = torch.full((state.num_clients,), float("nan"))
        state.weights[ids] = round.aggregation_weights.detach().float().cpu()
        state.participations[ids] += 1
        if self._arguments["keep_trained"]:
            state.trained.update({client: model.clone() for client, model in training.trained().items()})
        state.global_vector = round.server_vector
        self.evaluated = evaluate()
        if self.evaluated:
            trained = state.trained if self._arguments["evaluate_models"] == "trained" else {}
            state.client_accuracy = self._own_accuracy(trained)
        training.end_round(round.server_vector)
        return round

    def _own_accuracy(self, trained: dict[int, Tensor]) -> Tensor:
        models, model = {**self.received(), **trained}, self._state.model()
        return own_accuracy(self._trainer, self._data, self.space, self.roster, models, model)

    def advance(self, last: bool) -> None:
        """The round is complete in every respect: what its clients have kept counts, and the next one is next.

        Args:
            last: whether there is no next one: then nobody is drawn.
        """
        self._states.commit()
        self._state.round_index += 1
        self._state.cohort = []
        if not last:
            self.draw_cohort()

    def discard(self, why: str) -> None:
        """Forget an unfinished round."""
        self.clients.discard()
        self._states.discard()

    def received(self) -> dict[int, Tensor]:
        """Client id to the model ``[P]`` that it would start the next round from, where that is not the global one."""
        instructions = self.server.instruct(range(self._state.num_clients), self._state)
        return received_models(self._strategies.get("personalizer"), instructions, self.roster, self._state.model())

    # ---- around the rounds

    def kept(self) -> tuple[dict[int, Any], dict[str, Any]]:
        """What clients, and what their optimizers keep, between two rounds: for a checkpoint."""
        return self._states.state_dict(), self.clients.local.optimizers.state_dict()

    def failed(self, exception: BaseException, place: str) -> None:
        """The fit ends with this."""

    def close(self) -> None:
        """Leave the trainer as it was found."""
        if self.training is not None:
            self.training.local.windows.remove()
