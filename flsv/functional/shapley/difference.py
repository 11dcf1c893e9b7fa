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

- *Small budgets.* A budget too small for one sample of every size is spent on sizes drawn at random, which leaves the
  mean over sizes unbiased.
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
    per_size = 2 * max(num_players - 1, 1)
    run = Sampling("difference_shapley", utility, num_players, budget, 2 + per_size)
    if run.buys_all:
        return exact_shapley(utility, num_players)
    strata = _Strata(run, generator)
    strata.fill(per_size)
    return run.estimate(strata.values(), strata.stderr())


class _Strata:
    """Samples of Shapley values, stratified by the size of the drawn coalition."""

    # For each player i a coalition S is drawn without i and the base player k. U(S + k) - U(S + i) estimates SV_k -
    # SV_i.

    def __init__(self, run: Sampling, generator: Generator | None) -> None:
        self.run, self.generator = run, generator
        self.num_players = run.num_players
        empty, grand = run.empty_and_grand()
        self.gain = grand - empty
        self.sizes = [Moments() for _ in range(self.num_players - 1)]

    def fill(self, per_size: int) -> None:
        """Draw samples until the budget is spent, of sizes in random order. A sample takes ``per_size`` evaluations."""
        run, strata, inner = self.run, self.num_players - 1, self.num_players - 3
        # Sizes differ in their numbers of evaluations, so their number is fixed before they are drawn.
        all_sizes = run.budget - 2 >= 2 * self.num_players + inner * per_size
        count = strata if all_sizes else (run.budget - 2) // per_size
        sizes = random_permutations(1, strata, self.generator)[0][:count]
        self.add(sizes, *self.coalitions(sizes))
        draws = 0
        # More draws than the budget has evaluations only repeat evaluated coalitions.
        while len(sizes) == strata and inner > 0 and draws < run.budget:
            passes = max(run.left // (inner * per_size), 1)
            again = 1 + random_permutations(passes, inner, self.generator).flatten()
            with_base, with_other = self.coalitions(again)
            affordable = run.affordable(torch.cat([with_base, with_other], dim=1))
            if affordable:
                self.add(again[:affordable], with_base[:affordable], with_other[:affordable])
            draws += affordable
            if affordable < len(again):
                break

    def coalitions(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Draw, for each player i except the base player, coalitions S of the given sizes ``[R]`` without these two.
        Return S + base player and S + i, both bool ``[R, n-1, n]``.
        """
        others = self.num_players - 1
        free = ~torch.eye(others, dtype=torch.bool).expand(len(sizes), -1, -1)
        drawn = random_coalitions(sizes.repeat_interleave(others), others - 1, self.generator)
        inner = torch.zeros(len(sizes), others, others, dtype=torch.bool).masked_scatter(
            free, drawn
        )
        nobody = torch.zeros(len(sizes), others, 1, dtype=torch.bool)
        return (
            torch.cat([~nobody, inner], dim=2),
            torch.cat([nobody, inner | torch.eye(others, dtype=torch.bool)], dim=2),
        )

    def add(self, sizes: Tensor, with_base: Tensor, with_other: Tensor) -> None:
        """Evaluate drawn coalitions, and add the estimated Shapley values to the samples of their size."""
        both = self.run(torch.stack([with_base, with_other]))
        gaps = both[0] - both[1]
        zero = torch.zeros(len(sizes), 1, gaps.shape[2], dtype=torch.float64)
        differences = torch.cat([zero, gaps], dim=1)
        values = (self.gain + differences.sum(dim=1, keepdim=True)) / self.num_players - differences
        for size in sizes.unique().tolist():
            self.sizes[size].add(values[sizes == size])

    def values(self) -> Tensor:
        """Return the estimated Shapley values ``[n, M]``, means over the coalition sizes."""
        return torch.stack([moments.mean for moments in self.sizes if moments.count]).mean(dim=0)

    def stderr(self) -> Tensor:
        """Compute the standard errors ``[n, M]``. NaN until there are enough samples."""
        # The smallest and the largest size have one S per player only and need one sample; all others need two.
        inner = self.sizes[1:-1]
        if any(moments.count < 1 for moments in self.sizes) or any(
            moments.count < 2 for moments in inner
        ):
            return torch.full_like(self.values(), torch.nan)
        return torch.stack([m.stderr.square() for m in inner]).sum(dim=0).sqrt() / len(self.sizes)
