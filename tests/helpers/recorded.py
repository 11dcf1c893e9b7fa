"""ShadowShapley that keeps the game of the last round."""

from torch import Tensor

from flsv.games.members import Members, members_of
from flsv.metrics import ShadowShapley


class Recorded(ShadowShapley):
    """Keeps the utilities after the last round and after the first, the coalitions' members, and their outputs.

    Of the untrained model first, then of that of all clients.
    """

    #: Of the model of all clients after each valued round, [R, 1].
    grand_utilities: Tensor

    game: Tensor
    first_round: Tensor
    members: list[Members]
    trained: Tensor | None

    def complete(
        self,
        masks,
        utilities,
        *,
        outputs=None,
        **how,
    ):
        self.grand_utilities = utilities[:, 1]
        self.first_round = utilities[0].flatten()
        self.game = utilities[-1].flatten()
        self.members = members_of(masks)
        self.trained = None if outputs is None else outputs[-1]
        return super().complete(masks, utilities, outputs=outputs, **how)
