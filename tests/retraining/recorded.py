"""ShadowShapley that keeps the game of the last round."""

import torch
from torch import Tensor

from flsv.games.members import Members
from flsv.metrics import ShadowShapley


class Recorded(ShadowShapley):
    """Keeps the utilities after the last round and after the first, the coalitions' members, and their outputs.

    Of the untrained model first, then of that of all clients.
    """

    utilities: Tensor
    first_round: Tensor
    members: list[Members]
    trained: Tensor | None

    def complete(self, scores, game):
        utilities_by_round = [scores.utilities(game, index) for index in game.rounds]
        utilities = torch.stack(utilities_by_round)  # [R, K, 1]
        self.first_round = utilities[0].flatten()
        self.utilities = utilities[-1].flatten()
        self.members = game.coalitions
        self.trained = scores.outputs(game, game.rounds[-1]) if game.has_outputs else None
        return super().complete(scores, game)
