"""The budget and the stopping rule that all sampled estimators share.

**Budget.** ``budget`` is the largest number of *distinct* coalitions that one call may evaluate. The default is 50 n
for n players, or all 2^n if there is a target. If the budget suffices for all 2^n coalitions of at most 22 players, the
exact value is returned.

**Stopping on a budget leaves an estimate unbiased.** The decision to stop depends on masks only, never on utilities,
and not on how the players are numbered. The expected weight of a sample is then the same for every relabeling of the
players, as it is without stopping. Stopping on ``target_stderr`` depends on utilities, and has the usual small bias of
sequential sampling.
"""

from __future__ import annotations

from torch import Tensor

from flsv.functional.shapley.enumeration import MAX_EXACT_PLAYERS
from flsv.functional.shapley.game import Utility
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.utilities import progress
from flsv.utilities.arguments import check_number
from flsv.utilities.errors import ConfigurationError

DEFAULT_EVALUATIONS_PER_PLAYER = 50
MIN_SAMPLES_TO_STOP = 10  # with fewer samples the standard error is too often far too small


class Sampling:
    """Memoized game, budget and stopping rule of one call of a sampled estimator.

    Args:
        name: the estimator's name, for error messages.
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: the largest number of distinct evaluations; None: 50 n (at least ``minimum``, at most 2^n), or 2^n if
            there is a target.
        minimum: the number of evaluations that an estimate needs; numbers above 2^n count as 2^n.
        target_stderr: stop as soon as every standard error is at most this number, above 0; None: no target.

    Attributes:
        budget: the number of evaluations that the call may spend.
        game: the memoized utility.

    Raises:
        ConfigurationError: the budget is below the minimum, the target is not above 0, or there is no player.

    Example:
        Two of four evaluations are spent on the empty and the grand coalition; the rest pays for two single players.

        >>> import torch
        >>> run = Sampling("sampler", lambda masks: masks.sum(dim=1), 3, 4, 2, None)
        >>> ends, alone = run.game.empty_and_grand(), torch.eye(3, dtype=torch.bool)
        >>> run.left, run.affordable(alone.unsqueeze(1))
        (2, 2)
        >>> Sampling("sampler", lambda masks: masks.sum(dim=1), 10, 7, 20, None)
        Traceback (most recent call last):
        ...
        flsv.utilities.errors.ConfigurationError: sampler: budget=7 is below the minimum of 20 evaluations for 10 \
players.
    """

    def __init__(
        self,
        name: str,
        utility: Utility,
        num_players: int,
        budget: int | None,
        minimum: int,
        target_stderr: float | None,
    ) -> None:
        self.game = MemoizedGame(utility, num_players)
        if target_stderr is not None:
            check_number(name, "target_stderr", target_stderr, above=0, hint="None means no target.")
        everything = 2**num_players
        minimum = min(minimum, everything)
        if budget is None:
            usual = everything if target_stderr is not None else DEFAULT_EVALUATIONS_PER_PLAYER * num_players
            budget = min(max(usual, minimum), everything)
        if budget < minimum:
            raise ConfigurationError(
                f"{name}: budget={budget} is below the minimum of {minimum} evaluations for {num_players} players."
            )
        if target_stderr is None:  # with a target the number is not known in advance
            progress.start("coalitions", min(budget, everything))
        self.budget, self.target_stderr = budget, target_stderr

    @property
    def buys_all(self) -> bool:
        """Return whether all coalitions can be evaluated: the budget suffices, and there are at most 22 players."""
        return self.game.num_players <= MAX_EXACT_PLAYERS and self.budget >= 2**self.game.num_players

    @property
    def exact(self) -> bool:
        """Return whether all coalitions are to be evaluated: :attr:`buys_all`, and there is no target."""
        return self.target_stderr is None and self.buys_all

    @property
    def left(self) -> int:
        """Return the number of evaluations that may still be spent."""
        return self.budget - self.game.evaluations

    def affordable(self, groups: Tensor) -> int:
        """Return how many groups of coalitions, from the first on, can be evaluated with the remaining budget.

        Args:
            groups: bool ``[G, K, n]``, G groups of K coalitions, in the order of evaluation.
        """
        return int((self.game.cost(groups) <= self.left).sum())

    def reached(self, stderr: Tensor) -> bool:
        """Return whether there is a target, and every standard error is at most the target (and not NaN)."""
        return self.target_stderr is not None and bool((stderr <= self.target_stderr).all())
