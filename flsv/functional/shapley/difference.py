"""DMC: differences of Shapley values to a base player, by stratified sampling (ShapleyFL section 5.2, algorithm 3).

For a base player k and another player i of the n players N, eq. 11 of ShapleyFL writes the difference of their Shapley
values SV as a mean over the n - 1 sizes j of a mean over coalitions S,

    SV_k - SV_i = 1/(n-1) sum_{j=0..n-2} D_kij,    D_kij = E[U(S + k) - U(S + i)],  S uniform in N \\ {k, i}, |S| = j.

Corrections to the paper:

- eq. 13 divides the sum over S by binom(n-1, j). The mean has to divide by the number of such S, binom(n-2, j).
- Algorithm 3 overwrites D_kij and SV_k - SV_i in its loops (``=``). Both must accumulate (``+=``).
- Algorithm 3 lets i run over all players. Here i = k is skipped (its difference is 0).
- The number of strata in floor(M/(N-1)) is taken as the n - 1 sizes.

Departures:

- *Small budgets.* A budget too small for one sample of every size is spent on randomly drawn sizes, so that the mean
  over sizes is unbiased.
- *Values* are computed from the differences and from sum_i SV_i = U(N) - U(empty), which takes two more evaluations.
  The base player is the first one.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import Sampling, ShapleyEstimate, Utility
from flsv.functional.shapley.permutation import Moments, random_coalitions, random_permutations


def difference_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
) -> ShapleyEstimate:
    """Estimate Shapley values by their differences from the first player's value (DMC).

    Args:
        utility: the game, from masks bool ``[K, n]`` to utilities ``[K]``, or ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations. None: 50 n. The minimum is one
            sample of every difference at one coalition size: 2 n evaluations.
        generator: the random generator that draws the coalitions. None: torch's default.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0, if the
        budget suffices for all coalitions. The standard error is NaN until
        every coalition size has two samples, which takes about 4 n^2 evaluations.

    Raises:
        ConfigurationError: the budget is below the minimum, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> additive = lambda masks: masks.double() @ torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
        >>> difference_shapley(additive, 3, budget=6).values
        tensor([3., 1., 2.], dtype=torch.float64)
    """
    sample_cost = 2 * max(num_players - 1, 1)
    minimum = 2 + sample_cost  # with the empty and the grand coalition
    game = Sampling("difference_shapley", utility, num_players, budget, minimum)
    if game.can_evaluate_all:
        return exact_shapley(utility, num_players)
    strata = _Strata(game, generator)
    strata.draw_samples(sample_cost)
    return game.estimate(strata.values(), strata.stderr())


class _Strata:
    """Samples of Shapley values, stratified by the size of the drawn coalition."""

    # For each player i a coalition S is drawn without i and the base player k. U(S + k) - U(S + i) estimates SV_k -
    # SV_i.

    def __init__(self, game: Sampling, generator: Generator | None) -> None:
        self.game = game
        self.generator = generator
        self.num_players = game.num_players
        empty, grand = game.empty_and_grand()
        self.sum_of_values = grand - empty
        num_sizes = self.num_players - 1
        self.moments_by_size = [Moments() for _ in range(num_sizes)]

    def draw_samples(self, sample_cost: int) -> None:
        """Draw samples of random sizes until the budget is spent."""
        # A size is the number of members of S, beside the pair of players: 0 to n - 2. Sizes differ in their numbers of
        # evaluations, so the number of sizes is fixed before they are drawn.
        num_sizes = self.num_players - 1
        num_inner_sizes = self.num_players - 3  # all except 0 and n - 2
        num_drawn_sizes = num_sizes
        budget = self.game.budget - 2  # without the empty and the grand coalition
        # Samples of the sizes 0 and n - 2 need the n single players, and the n coalitions without one.
        cost_of_outer_sizes = 2 * self.num_players
        cost_of_inner_sizes = num_inner_sizes * sample_cost
        if budget < cost_of_outer_sizes + cost_of_inner_sizes:
            num_drawn_sizes = budget // sample_cost

        permutations = random_permutations(1, num_sizes, self.generator)
        sizes = permutations[0, :num_drawn_sizes]
        coalitions_with_base, coalitions_with_other = self.draw_coalitions(sizes)
        self.add(sizes, coalitions_with_base, coalitions_with_other)
        if num_drawn_sizes == num_sizes and num_inner_sizes > 0:
            self._draw_inner_sizes(num_inner_sizes, sample_cost)

    def _draw_inner_sizes(self, num_inner_sizes: int, sample_cost: int) -> None:
        """Draw further samples, until the budget is spent, of the sizes with several coalitions per player."""
        cost_of_pass = num_inner_sizes * sample_cost
        num_samples = 0
        # More samples than the budget has evaluations would only repeat coalitions.
        while num_samples < self.game.budget:
            num_passes = max(self.game.left // cost_of_pass, 1)
            permutations = random_permutations(num_passes, num_inner_sizes, self.generator)
            sizes = permutations.flatten() + 1  # each inner size occurs once per pass
            num_affordable = self._add_affordable(sizes)
            num_samples += num_affordable
            if num_affordable < len(sizes):
                return

    def _add_affordable(self, sizes: Tensor) -> int:
        """Draw coalitions of these sizes. Add the first samples, as many as the budget suffices for."""
        with_base, with_other = self.draw_coalitions(sizes)
        coalitions = torch.cat([with_base, with_other], dim=1)  # [R, 2 (n - 1), n]
        count = self.game.affordable(coalitions)
        if count > 0:
            self.add(sizes[:count], with_base[:count], with_other[:count])
        return count

    def draw_coalitions(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Draw coalitions S of sizes ``[R]`` for each player i. Return S + base player and S + i, both bool ``[R,
        n-1, n]``.
        """
        # For each of R sizes, and each of the n - 1 players i (all except the base player), one coalition of the
        # n - 2 players except both: [R (n - 1), n - 2].
        num_others = self.num_players - 1
        drawn_members = random_coalitions(
            sizes=sizes.repeat_interleave(num_others),
            num_players=num_others - 1,
            generator=self.generator,
        )

        # Player i's row gets n - 1 columns: the n - 2 drawn ones, and on the diagonal the player's own, which stays
        # False. For n = 4 the drawn rows ab, cd, ef become -ab, c-d, ef-.
        is_own_column = torch.eye(num_others, dtype=torch.bool)
        is_drawn_column = ~is_own_column.expand(len(sizes), -1, -1)
        without_both = torch.zeros_like(is_drawn_column)  # S [R, n - 1, n - 1]
        without_both = without_both.masked_scatter(is_drawn_column, drawn_members)
        with_other = without_both | is_own_column

        # The base player gets the first column: S + base and S + i, both [R, n - 1, n].
        is_absent = torch.zeros_like(without_both[:, :, :1])
        coalitions_with_base = torch.cat([~is_absent, without_both], dim=2)
        coalitions_with_other = torch.cat([is_absent, with_other], dim=2)
        return coalitions_with_base, coalitions_with_other

    def add(
        self,
        sizes: Tensor,
        coalitions_with_base: Tensor,
        coalitions_with_other: Tensor,
    ) -> None:
        """Evaluate R samples of coalitions, and add the estimated Shapley values to the samples of their size."""
        coalitions = torch.stack([coalitions_with_base, coalitions_with_other])  # [2, R, n - 1, n]
        base_utilities, other_utilities = self.game(coalitions)  # of M games, [R, n - 1, M]
        # Estimates of d_i = SV_base - SV_i, [R, n, M]. The base player is the first one, so d_0 = 0.
        differences_to_others = base_utilities - other_utilities
        difference_to_itself = torch.zeros_like(differences_to_others[:, :1])
        differences = torch.cat([difference_to_itself, differences_to_others], dim=1)

        # Since SV_i = SV_base - d_i, the sum of all n values is n SV_base - sum_i d_i. It is known, which gives
        # SV_base = (sum of values + sum_i d_i) / n.
        sum_of_differences = differences.sum(dim=1, keepdim=True)
        base_value = (self.sum_of_values + sum_of_differences) / self.num_players
        values = base_value - differences
        for size in sizes.unique().tolist():
            has_size = sizes == size
            self.moments_by_size[size].add(values[has_size])

    def values(self) -> Tensor:
        """Return the estimated Shapley values ``[n, M]``, means over the coalition sizes."""
        means = [moments.mean for moments in self.moments_by_size if moments.count]
        return torch.stack(means).mean(dim=0)

    def stderr(self) -> Tensor:
        """Compute the standard errors ``[n, M]``. NaN until there are enough samples."""
        # A player has only one coalition of the smallest and of the largest size, so one sample is exact. All other
        # sizes need two samples.
        inner_moments = self.moments_by_size[1:-1]
        all_have_samples = all(moments.count >= 1 for moments in self.moments_by_size)
        inner_have_spread = all(moments.count >= 2 for moments in inner_moments)
        if not all_have_samples or not inner_have_spread:
            return torch.full_like(self.values(), torch.nan)
        variances = [moments.stderr.square() for moments in inner_moments]
        variance = torch.stack(variances).sum(dim=0)
        return variance.sqrt() / len(self.moments_by_size)
