"""ShadowShapley that keeps the game of the last round."""

from typing import Any

import torch
from torch import Tensor

from flsv.games.members import Members, members_of
from flsv.metrics import ShadowShapley


class Recorded(ShadowShapley):
    """Keeps the utilities after the last round, the coalitions' members, and their outputs."""

    game: Tensor
    members: list[Members]
    trained: Tensor | None

    def complete(self, masks: Tensor, utilities: Tensor, outputs: Tensor | None = None, *how: Any) -> Any:
        game = torch.cat([self.ends[-1].flatten(), utilities[-1].flatten()])
        trained = None if outputs is None else torch.cat([self.outputs[-1], outputs[-1]])
        vars(self).update(game=game, members=members_of(masks), trained=trained)
        return super().complete(masks, utilities, outputs, *how)
