"""The budget and the stopping rule that all sampled estimators share.

**Budget.** ``budget`` is the largest number of *distinct* coalitions that one call may evaluate. Without one, an
estimator spends 50 n evaluations (never more than all 2^n). If a budget buys all 2^n coalitions of at most 22 players,
the exact value is returned.

**Stopping on a budget leaves an estimate unbiased.** Estimators stop by looking at masks only, never at utilities, and
by rules that do not depend on the players' numbers. The expected weight of a sample is then the same for every
relabeling of the players, as it is without stopping. Stopping on ``target_stderr`` looks at utilities; its small bias
is the usual one of sequential sampling.
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
MIN_SAMPLES_TO_STOP = 10  # a standard error from fewer samples is too often far too small


class Sampling:
    """One call of a sampled estimator: its budget, its running estimate, and its stopping rule.

    Args:
        name: the estimator, for messages.
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``.
        num_players: n.
        budget: the caller's, or None for 50 n (all 2^n if there is a target standard error).
        minimum: evaluations that one unbiased estimate needs; at most 2^n count.
        target_stderr: the caller's target, above 0, or None.

    Attributes:
        budget: the evaluations that the call may spend.
        game: the memoized utility.

    Raises:
        ConfigurationError: a budget below the minimum, a target that is not positive, or no players.

    Example:
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
        """Return whether the budget buys all coalitions, and these are few enough to enumerate."""
        return self.game.num_players <= MAX_EXACT_PLAYERS and self.budget >= 2**self.game.num_players

    @property
    def exact(self) -> bool:
        """Return whether the budget buys all coalitions, and there is no target to stop at before."""
        return self.target_stderr is None and self.buys_all

    @property
    def left(self) -> int:
        """Return the evaluations that may still be spent."""
        return self.budget - self.game.evaluations

    def affordable(self, groups: Tensor) -> int:
        """Count the groups of coalitions, bool ``[G, K, n]``, that the remaining budget buys, from the first on."""
        return int((self.game.cost(groups) <= self.left).sum())

    def reached(self, stderr: Tensor) -> bool:
        """Return whether every standard error is known and at most the target."""
        return self.target_stderr is not None and bool((stderr <= self.target_stderr).all())
