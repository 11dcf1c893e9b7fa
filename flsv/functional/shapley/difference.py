"""DMC: differences of Shapley values to a base player, by stratified sampling (ShapleyFL section 5.2, algorithm 3).

For a base player k and another player i of the n players N, eq. 11 of ShapleyFL writes the difference of their Shapley
values SV as a mean over the n - 1 sizes j of a mean over coalitions S,

    SV_k - SV_i = 1/(n-1) sum_{j=0..n-2} D_kij,    D_kij = E[U(S + k) - U(S + i)],  S uniform in N \\ {k, i}, |S| = j.

Corrections to the paper:

- eq. 13 divides the sum over S by binom(n-1, j); the mean has to divide by the number of such S, binom(n-2, j).
- Algorithm 3 overwrites D_kij and SV_k - SV_i in its loops (``=``); both must accumulate (``+=``).
- Algorithm 3 lets i run over all players; here i = k is skipped (its difference is 0).
- The number of strata in floor(M/(N-1)) is taken as the n - 1 sizes.

Departures:

- *Shared coalitions.* Algorithm 3 draws S for each player i separately, at two evaluations per sample. With the same
  number of evaluations this is no better than plain Monte Carlo if coalitions average their updates and the utility is
  accuracy. Here one random order of the other players serves all i at once. For up to half of the players, S is the
  order's first j players for every later player i, and the order's last j players for every i among the first j. For
  larger j, S is the order's first j + 1 players without i, or its last j + 1 without i. A sample of all differences
  then takes n + 1 evaluations instead of 2 (n - 1), players are compared on the same coalitions, and S is still uniform
  for each difference. ``shared=False`` is algorithm 3.
- *Small budgets.* A budget too small for one sample of every size is spent on sizes drawn at random, which leaves the
  mean over sizes unbiased.
- *Values* are computed from the differences and from sum_i SV_i = U(N) - U(empty), which takes two more evaluations.
  The normalized values of eq. 12, ``normalize_shapley(-differences)``, need only the differences and do not depend on
  k.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.budget import Sampling
from flsv.functional.shapley.enumeration import all_coalitions, shapley_of_table
from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.memoized_game import MemoizedGame
from flsv.functional.shapley.moments import Moments
from flsv.functional.shapley.random_coalitions import random_coalitions, random_permutations
from flsv.utilities.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class DifferenceEstimate(ShapleyEstimate):
    """A Shapley estimate together with the differences from which its values were computed.

    Attributes:
        differences: the Shapley value of the base player minus that of each player, ``[n]`` or ``[n, M]``; 0 for the
            base player itself.
        base: the base player's number.
    """

    differences: Tensor
    base: int


def difference_shapley(
    utility: Utility,
    num_players: int,
    *,
    base: int = 0,
    shared: bool = True,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> DifferenceEstimate:
    """Estimate Shapley values by their differences from the value of one player, ``base`` (DMC).

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        base: the number of the player that all others are compared with.
        shared: True: compare all players on the same coalitions; False: draw coalitions for each player separately, as
            the paper's algorithm 3 does.
        budget: largest number of distinct evaluations; None: 50 n, or 2^n with ``target_stderr``. The minimum is one
            sample of every difference at one coalition size: n + 3 evaluations, or 2 n with ``shared=False``.
        generator: the random generator that draws the coalitions; None: torch's default.
        target_stderr: stop once every standard error is at most this number, in the utility's unit; None: no target.

    Returns:
        The estimate: ``values``, ``stderr`` and ``differences``, ``[n]`` or ``[n, M]``. The values are exact, with
        stderr 0, if the budget suffices for all coalitions, unless ``target_stderr`` is reached before. The standard
        error is NaN until every coalition size has two samples, which takes about 2 n^2 evaluations (4 n^2 with
        ``shared=False``).

    Raises:
        ConfigurationError: the budget is below the minimum, ``base`` is not a player, ``target_stderr`` is not above
            0, or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> additive = lambda masks: masks.double() @ torch.tensor([3.0, 1.0, 2.0], dtype=torch.float64)
        >>> difference_shapley(additive, 3, budget=6).differences
        tensor([0., 2., 1.], dtype=torch.float64)
    """
    per_size = num_players + 1 if shared else 2 * max(num_players - 1, 1)
    run = Sampling("difference_shapley", utility, num_players, budget, 2 + per_size, target_stderr)
    if not 0 <= base < num_players:
        raise ConfigurationError(f"difference_shapley: base={base} is not one of the players 0..{num_players - 1}.")
    # With up to 3 players S is empty or all other players: one sample of each size covers all coalitions.
    if run.buys_all and (target_stderr is None or num_players <= 3):
        return _enumerate(run.game, base)
    strata = _Strata(run, base, shared, generator)
    strata.fill(per_size)
    stderr = strata.stderr()
    if run.buys_all and not run.reached(stderr):
        return _enumerate(run.game, base)
    return _wrap(run.game, base, strata.values(), stderr, strata.freedom())


class _Strata:
    """Samples of Shapley values by the size of their coalition, and their estimates."""

    def __init__(self, run: Sampling, base: int, shared: bool, generator: Generator | None) -> None:
        self.run, self.base, self.shared, self.generator = run, base, shared, generator
        self.num_players = run.game.num_players
        empty, grand = run.game.empty_and_grand()
        self.gain = grand - empty
        self.sizes = [Moments() for _ in range(self.num_players - 1)]

    def fill(self, per_size: int) -> None:
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
            if run.target_stderr is not None:
                passes = min(passes, max(draws // inner, 1))
            again = 1 + random_permutations(passes, inner, self.generator).flatten()
            with_base, with_other = self.coalitions(again)
            affordable = run.affordable(torch.cat([with_base, with_other], dim=1))
            if affordable:
                self.add(again[:affordable], with_base[:affordable], with_other[:affordable])
            draws += affordable
            if affordable < len(again) or run.reached(self.stderr()):
                break

    def coalitions(self, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the coalitions on which each player is compared with the base player."""
        others, base = self.num_players - 1, self.base
        if self.shared:
            patterns = torch.stack([_pattern(size, others) for size in range(others)])
            rank = random_permutations(len(sizes), others, self.generator).argsort(dim=1)
            inner = patterns[sizes.view(-1, 1, 1), rank.unsqueeze(2), rank.unsqueeze(1)]
        else:
            free = ~torch.eye(others, dtype=torch.bool).expand(len(sizes), -1, -1)
            drawn = random_coalitions(sizes.repeat_interleave(others), others - 1, self.generator)
            inner = torch.zeros(len(sizes), others, others, dtype=torch.bool).masked_scatter(free, drawn)
        nobody = torch.zeros(len(sizes), others, 1, dtype=torch.bool)
        with_other = inner | torch.eye(others, dtype=torch.bool)
        return (
            torch.cat([inner[..., :base], ~nobody, inner[..., base:]], dim=2),
            torch.cat([with_other[..., :base], nobody, with_other[..., base:]], dim=2),
        )

    def add(self, sizes: Tensor, with_base: Tensor, with_other: Tensor) -> None:
        """Evaluate drawn coalitions, and add the values that follow to the samples of their size."""
        both = self.run.game(torch.stack([with_base, with_other]))
        gaps = both[0] - both[1]
        zero = torch.zeros(len(sizes), 1, gaps.shape[2], dtype=torch.float64)
        differences = torch.cat([gaps[:, : self.base], zero, gaps[:, self.base :]], dim=1)
        values = (self.gain + differences.sum(dim=1, keepdim=True)) / self.num_players - differences
        for size in sizes.unique().tolist():
            self.sizes[size].add(values[sizes == size])

    def values(self) -> Tensor:
        """Average the estimated values over the coalition sizes, ``[n, M]``."""
        return torch.stack([moments.mean for moments in self.sizes if moments.count]).mean(dim=0)

    def stderr(self) -> Tensor:
        """Compute the standard errors ``[n, M]``, NaN until there are enough samples."""
        inner = self.sizes[1:-1]
        if any(moments.count < 1 for moments in self.sizes) or any(moments.count < 2 for moments in inner):
            return torch.full_like(self.values(), torch.nan)
        return torch.stack([m.stderr.square() for m in inner]).sum(dim=0).sqrt() / len(self.sizes)

    def freedom(self) -> Tensor:
        """Compute the standard errors' degrees of freedom ``[n, M]`` (Satterthwaite 1946)."""
        inner = [(m.stderr.square(), m.count - 1) for m in self.sizes[1:-1] if m.count > 1]
        if not inner:
            return torch.full_like(self.values(), torch.inf)
        total = torch.stack([variance for variance, _ in inner]).sum(0).square()
        parts = torch.stack([variance.square() / count for variance, count in inner]).sum(0)
        return torch.where(parts > 0, total / parts, torch.inf)


def _pattern(size: int, others: int) -> Tensor:
    """Draw a coalition for each player, as positions in a random order of the others."""
    rank = torch.arange(others)
    block = size if 2 * size <= others else size + 1
    first = rank < block
    last = rank >= others - block
    swap_in = block == size
    rows = torch.where((first ^ swap_in).unsqueeze(1), first, last)
    return rows if swap_in else rows & ~torch.eye(others, dtype=torch.bool)


def _enumerate(game: MemoizedGame, base: int) -> DifferenceEstimate:
    """Compute the values and differences exactly from all coalitions."""
    values = shapley_of_table(game(all_coalitions(game.num_players)))
    return _wrap(game, base, values, torch.zeros_like(values))


def _wrap(
    game: MemoizedGame, base: int, values: Tensor, stderr: Tensor, freedom: Tensor | float = math.inf
) -> DifferenceEstimate:
    plain = game.estimate(values, stderr, freedom)
    differences = game.estimate(values[base] - values, stderr).values
    return DifferenceEstimate(plain.values, plain.stderr, plain.evaluations, differences, base, freedom=plain.freedom)
