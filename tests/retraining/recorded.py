"""ShadowShapley that keeps the game of the last round."""

from flsv.metrics import ShadowShapley


class ShadowShapleyThatKeepsUtilities(ShadowShapley):
    """Keeps the coalitions' utilities after the last round and after the first, and their members. The first one is
    that of the untrained model."""

    def complete(self, scores, game):
        self.utilities_after_first_round = scores.utilities(game, game.rounds[0]).flatten()
        self.utilities = scores.utilities(game, game.rounds[-1]).flatten()
        self.members = game.coalitions
        return super().complete(scores, game)
