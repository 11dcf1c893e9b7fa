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
        self, masks: Tensor, utilities: Tensor, outputs: Tensor | None = None, *how: Any
    ) -> Any:
        games = []
        for index in (0, -1):
            games.append(
                torch.cat(
                    [
                        self.ends[index].flatten(),
                        utilities[index].flatten(),
                    ]
                )
            )

        trained = None
        if outputs is not None:
            trained = torch.cat([self.outputs[-1], outputs[-1]])

        vars(self).update(
            first_round=games[0],
            game=games[1],
            members=members_of(masks),
            trained=trained,
        )

        return super().complete(masks, utilities, outputs, *how)
