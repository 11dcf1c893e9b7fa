"""ShadowShapley that keeps the game of the last round."""

from typing import Any

import torch
from torch import Tensor

from flsv.games.members import Members, members_of
from flsv.metrics import ShadowShapley


class Recorded(ShadowShapley):
    """Keeps the utilities after the last round, the coalitions' members, and how they were trained."""

    game: Tensor
    members: list[Members]
    way: str

    def update(self, client_ids: Any, coalitions: Any, utility: Any, round_index: int = 0) -> None:
        def played(masks: Tensor) -> Tensor:
            vars(self).update(game=utility(masks), members=members_of(masks), way="rows")
            return self.game

        super().update(client_ids, coalitions, played, round_index)

    def complete(self, masks: Tensor, utilities: Tensor) -> Any:
        game = torch.cat([self.ends[-1].flatten(), utilities[-1].flatten()])
        vars(self).update(game=game, members=members_of(masks), way="fits")
        return super().complete(masks, utilities)
