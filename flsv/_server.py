"""The server side of a round: measure, aggregate, measure again, personalise."""

from __future__ import annotations

from typing import TYPE_CHECKING

import lightning as L
import torch
from torch import Tensor

from flsv.coalition import CoalitionGames, ModelEvaluator
from flsv.data import FederatedDataModule
from flsv.evaluation import accuracy, on_device
from flsv.parameters import ParameterSpace
from flsv.round import Round

if TYPE_CHECKING:
    from flsv.loop import FederatedLoop


class Server:
    """Does to a round what the loop's metrics and strategies say.

    Args:
        loop: whose metrics, strategies and start points (``models``) are used and updated.
        trainer: with its module on its device.
        data: for the server's validation set and the clients' test splits.
        space: the map between the module and vectors.

    Attributes:
        games: the coalition games on the server's validation set; None where no metric asks for them.
    """

    def __init__(
        self, loop: FederatedLoop, trainer: L.Trainer, data: FederatedDataModule, space: ParameterSpace
    ) -> None:
        self._loop, self._trainer, self._data, self._space = loop, trainer, data, space
        self.games: CoalitionGames | None = None
        if loop.board.game_metrics:
            evaluator = ModelEvaluator(
                trainer.lightning_module,
                space,
                on_device(trainer, data.val_dataloader()),
                num_classes=data.num_classes,
                context=trainer.strategy.precision_plugin.forward_context,
            )
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
        if loop.personalizer is not None:
            own = loop.personalizer.personalize(round, loop.contributions, loop.models)
            loop.models.update({client: model.detach().clone() for client, model in own.items()})
        if self.games is not None:
            self.games.end()
        return round

    def evaluate_clients(self, server_vector: Tensor) -> Tensor:
        """The accuracy ``[n]`` of each client's own model (the global one, if it has none) on its test split.

        The trainer's module is left with the last client's model.
        """
        result = []
        for client in range(self._data.num_clients):
            self._space.write(self._trainer.lightning_module, self._loop.models.get(client, server_vector))
            result.append(accuracy(self._trainer, self._data.client_loader(client, "test")))
        return torch.tensor(result)
