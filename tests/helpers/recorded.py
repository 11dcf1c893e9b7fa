"""ShadowShapley that keeps the game of the last round."""

from typing import Any

import torch
from torch import Tensor

from flsv.games.members import Members, members_of
from flsv.metrics import ShadowShapley


class Recorded(ShadowShapley):
    """Keeps the utilities after the last round and after the first, the coalitions' members, and their outputs."""

    game: Tensor
    first_round: Tensor
    members: list[Members]
    trained: Tensor | None

    def complete(
        self,
        masks: Tensor,
        utilities: Tensor,
        outputs: Tensor | None = None,
        *how: Any,
    ) -> Any:
        self.first_round = self.game_of_round(0, utilities)
        self.game = self.game_of_round(-1, utilities)
        self.members = members_of(masks)
        if outputs is None:
            self.trained = None
        else:
            self.trained = torch.cat([self.outputs[-1], outputs[-1]])

        return super().complete(masks, utilities, outputs, *how)

    def game_of_round(self, round_index: int, utilities: Tensor) -> Tensor:
        """Utilities of the untrained model, of that of all clients, and of the coalitions' models."""
        utilities_of_ends = self.ends[round_index].flatten()  # untrained, all clients
        return torch.cat([utilities_of_ends, utilities[round_index].flatten()])
