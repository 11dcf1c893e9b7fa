"""ShadowShapley that keeps the game of the last round."""

from typing import Any

import torch
from torch import Tensor

from flsv.games.members import Members, members_of
from flsv.metrics import ShadowShapley


class Recorded(ShadowShapley):
    """Keeps the utilities after the last round and after the first, the coalitions' members, and how they were
    trained."""

    game: Tensor
    first: Tensor
    members: list[Members]
    way: str

    def update(self, client_ids: Any, coalitions: Any, utility: Any, round_index: int = 0) -> None:
        super().update(client_ids, coalitions, utility, round_index)
        if self.pending is None:
            vars(self).update(game=utility(coalitions.cpu()), members=members_of(coalitions.cpu()), way="rows")

    def complete(self, masks: Tensor, utilities: Tensor, *rest: Any) -> Any:
        games = [torch.cat([self.ends[place].flatten(), utilities[place].flatten()]) for place in (0, -1)]
        vars(self).update(first=games[0], game=games[1], members=members_of(masks), way="fits")
        return super().complete(masks, utilities, *rest)
