"""The server side of a round: measure, aggregate, measure again, personalise."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import lightning as L
import torch
from torch import Tensor

from flsv._participants import Participants
from flsv.coalition import CoalitionGames
from flsv.data import FederatedDataModule
from flsv.evaluation import accuracy, on_device
from flsv.parameters import ParameterSpace
from flsv.round import Exchange, Round

if TYPE_CHECKING:
    from flsv.loop import FederatedLoop


class Server:
    """Does to a round what the loop's metrics and strategies say.

    Args:
        loop: whose metrics, strategies and start points (``models``) are used and updated.
        trainer: with its module on its device.
        data: for the server's validation set and the clients' test splits.
        space: the map between the module and vectors.
        participants: the clients, and the server's own data.

    Attributes:
        games: the coalition games on the server's validation set; None where no metric asks for them.
    """

    def __init__(
        self,
        loop: FederatedLoop,
        trainer: L.Trainer,
        data: FederatedDataModule,
        space: ParameterSpace,
        participants: Participants,
    ) -> None:
        self._loop, self._trainer, self._data, self._space = loop, trainer, data, space
        self._participants = participants
        self.games: CoalitionGames | None = None
        if loop.board.game_metrics:
            evaluator = participants.evaluator(on_device(trainer, data.val_dataloader()))
            self.games = CoalitionGames(evaluator, server_lr=loop.server_lr)

    def aggregate(self, round: Round) -> Round:
        """The round with its next global model; metrics are updated before and after, start points at the end.

        Raises:
            RuntimeError: the next global model is not finite.
        """
        loop = self._loop
        if self.games is not None:
            self.games.begin(round)
        loop.board.update(round)
        vector, weights = loop.aggregator.aggregate(round, loop.contributions)
        if loop.server_lr != 1:
            cut = self._space.num_parameters
            vector[:cut] = torch.lerp(round.global_vector[:cut], vector[:cut], loop.server_lr)
        if not vector.isfinite().all():
            raise RuntimeError(
                f"round {round.round_index}: {loop.aggregator!r} gave a global model that is not finite."
            )
        round = round.aggregated(vector, weights)
        loop.board.update(round)
        exchange = Exchange.of_models(round)
        if loop.personalizer is not None:
            own = loop.personalizer.personalize(round, loop.contributions, loop.models)
            loop.models.update({client: model.detach().clone() for client, model in own.items()})
            exchange = loop.personalizer.exchanged(round)
        round = round.exchanged(exchange)
        loop.board.update(round)
        if self.games is not None:
            self.games.end()
        return round

    def starts(self, clients: Iterable[int], global_vector: Tensor) -> dict[int, Tensor]:
        """The start points ``[P]`` of the clients that have one of their own: what each is to train on from."""
        loop, everybody = self._loop, self._participants.clients
        if loop.personalizer is None:
            return {}
        starts = {i: loop.personalizer.start(everybody[i], global_vector, loop.models) for i in clients}
        return {client: start for client, start in starts.items() if start is not None}

    def evaluate_clients(self, server_vector: Tensor) -> Tensor:
        """The accuracy ``[n]`` of each client's own model on its test split: of the one it has received (the global one
        without personalisation), or of the one that it trained last, as the loop's ``evaluate_models`` says.

        The trainer's module is left with the last client's model.
        """
        clients = range(self._data.num_clients)
        trained = self._loop.trained if self._loop.evaluate_models == "trained" else {}
        models = {**self.starts([i for i in clients if i not in trained], server_vector), **trained}
        result = []
        for client in clients:
            self._space.write(self._trainer.lightning_module, models.get(client, server_vector))
            result.append(accuracy(self._trainer, self._data.client_loader(client, "test")))
        return torch.tensor(result)
