"""ShadowShapley that keeps the game of the last round."""

from typing import Any

import torch
from torch import Tensor

from flsv.games.members import Members, members_of
from flsv.metrics import ShadowShapley


class Recorded(ShadowShapley):
    """Keeps the utilities after the last round and after the first, the coalitions' members, and their outputs."""

    game: Tensor
    first: Tensor
    members: list[Members]
    trained: Tensor | None

    def complete(
        self, masks: Tensor, utilities: Tensor, outputs: Tensor | None = None, *how: Any
    ) -> Any:
        first, game = (
            torch.cat([self.ends[place].flatten(), utilities[place].flatten()]) for place in (0, -1)
        )
        trained = None if outputs is None else torch.cat([self.outputs[-1], outputs[-1]])
        vars(self).update(first=first, game=game, members=members_of(masks), trained=trained)
        return super().complete(masks, utilities, outputs, *how)
