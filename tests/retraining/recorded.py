"""ShadowShapley that keeps the game of the last round."""

from flsv.metrics import ShadowShapley


class ShadowShapleyThatKeepsUtilities(ShadowShapley):
    """Keeps the coalitions' utilities after the last round and after the first, and their members. The first one is
    that of the untrained model."""

    def complete(self, scores, game):
        utilities_by_round = [scores.utilities(game, round_index) for round_index in game.rounds]
        self.utilities_after_first_round = utilities_by_round[0].flatten()
        self.utilities = utilities_by_round[-1].flatten()
        self.members = game.coalitions
        return super().complete(scores, game)
