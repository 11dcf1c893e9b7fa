"""The game and the estimate: what every estimator takes, remembers and gives.

Inputs and outputs of all estimators: the coalition game as a batched callable, and ShapleyEstimate.

The Shapley value (Shapley 1953; ShapleyFL, KDD 2023, eq. 1) of player i in the game U on n players is

    SV_i = 1/n sum_{S not containing i} [U(S + i) - U(S)] / binom(n - 1, |S|).

Every function of this package is pure mathematics on a callable ``utility(masks: bool [K, n]) -> float [K]`` (or
``[K, M]``, one game per column, such as the accuracy of each class) and knows nothing of models or rounds.

Arithmetic is float64 on the CPU; results come back in the utility's own dtype if that is float32 or float64, and in
float32 otherwise.

A memoised coalition game: evaluates each distinct coalition once, checks and counts it.

Estimators ask for whatever they need, in whatever order, as often as they like; :class:`MemoizedGame` turns that into
the fewest possible calls of the user's utility. Keys are bitmasks: Python integers up to 64 players, byte strings
beyond, so that cohorts of hundreds work too.

The exact Shapley value from all 2^n coalitions (ShapleyFL eq. 1, definition 4.1).

The second line of definition 4.1 divides by ``|C| binom(|C|, |S|)``; that is a misprint, its weights do not sum to 1.
The first line, ``|C| binom(|C| - 1, |S|)``, is the Shapley value and is what is computed here.

Coalition number b contains player i iff bit i of b is set. Viewed as ``[high bits, bit i, low bits]``, the table of
utilities holds U(S) and U(S + i) side by side for all S at once: n subtractions of 2^(n-1) numbers give everything, a
null player's value is exactly 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from scipy import stats
from torch import Generator, Tensor

from flsv.utilities.errors import ConfigurationError

Utility = Callable[[Tensor], Tensor]
"""``masks: bool [K, n] -> float [K]`` or ``[K, M]``; row k says which of the n players are in coalition k.

The masks are on the CPU and distinct; the answer may be on any device. It is read without gradients.
"""


@dataclass(frozen=True, eq=False)
class ShapleyEstimate:
    """Values of all players, their standard errors, and the number of evaluations.

    Attributes:
        values: ``[n]``, or ``[n, M]`` for a vector-valued utility, in the utility's unit.
        stderr: standard error of ``values`` due to sampling, same shape and unit: 0 where every coalition that matters
            was evaluated, NaN where fewer than two samples say nothing about the spread. It does not contain the bias
            of truncation or of a fitted surrogate; the estimators that have one say so.
        evaluations: number of distinct coalitions that this call asked the utility for, the empty one and the grand
            one included.
        freedom: of how many degrees of freedom ``stderr`` is, for intervals by Student's t; inf, for normal ones, where
            the estimator does not tell. A tensor of the shape of ``stderr``, or one number for all.

    Example:
        Three pairs of orders, and so an interval half as wide again as a normal one.

        >>> import torch
        >>> from flsv.functional import permutation_shapley
        >>> airport = lambda masks: -(masks * torch.arange(6.0)).amax(dim=1)
        >>> found = permutation_shapley(airport, 6, num_permutations=6, generator=torch.Generator().manual_seed(0))
        >>> found.freedom, t_quantile(0.9, found.freedom) / t_quantile(0.9)
        (2, tensor(1.7752, dtype=torch.float64))
    """

    values: Tensor
    stderr: Tensor
    evaluations: int
    freedom: Tensor | float = field(default=math.inf, kw_only=True)


def t_quantile(level: float, freedom: Tensor | float = math.inf) -> Tensor:
    """Half the width of an interval at this level, in standard errors of that many degrees of freedom: float64."""
    told = torch.as_tensor(freedom, dtype=torch.float64, device="cpu")
    return torch.as_tensor(stats.t.ppf((1 + level) / 2, told.numpy()), dtype=torch.float64)


def check_num_players(num_players: int) -> None:
    """Raise ConfigurationError unless ``num_players`` is a positive integer."""
    if num_players < 1:
        raise ConfigurationError(f"num_players={num_players}: a coalition game needs at least 1 player.")


def coalition_keys(masks: Tensor) -> Sequence[int | bytes]:
    """One hashable key per row of ``masks`` (bool ``[K, n]``), equal for equal coalitions only."""
    packed = np.packbits(masks.numpy(), axis=1)
    width = packed.shape[1]
    if width > 8:
        return packed.view(f"S{width}").ravel().tolist()
    words = np.zeros((len(packed), 8), dtype=np.uint8)
    words[:, :width] = packed
    return words.view(np.uint64).ravel().tolist()


def evaluate(utility: Utility, masks: Tensor) -> Tensor:
    """Call ``utility`` once and check what it returns.

    Args:
        utility: the game.
        masks: bool ``[K, n]``.

    Returns:
        The utilities as they came, ``[K]`` or ``[K, M]``, detached.

    Raises:
        ValueError: if the result has the wrong shape, or is NaN or infinite for a coalition, which is then named.
    """
    values = torch.as_tensor(utility(masks)).detach()
    if values.ndim not in (1, 2) or values.shape[0] != masks.shape[0]:
        raise ValueError(
            f"utility(masks) returned shape {tuple(values.shape)} for masks of shape {tuple(masks.shape)}; expected "
            f"[{masks.shape[0]}] or [{masks.shape[0]}, M]: one utility, or M of them, per row of masks."
        )
    finite = torch.isfinite(values)
    if not bool(finite.all()):
        row = int((~finite.reshape(len(masks), -1).all(dim=1)).nonzero()[0])
        members = masks[row].nonzero().flatten().tolist()
        raise ValueError(
            f"the utility of coalition {members} is {values[row].tolist()}; every coalition needs a finite utility. "
            "Drop the player whose update is not finite, or make the utility return its worst value instead."
        )
    return values


def result_dtype(values: Tensor) -> torch.dtype:
    """float64 for a float64 utility, float32 for every other."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32


class MemoizedGame:
    """A game that evaluates each distinct coalition once.

    Args:
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``.
        num_players: n.

    Attributes:
        evaluations: distinct coalitions evaluated so far.

    Example:
        >>> game = MemoizedGame(lambda masks: masks.sum(dim=1).float(), 3)
        >>> game(torch.tensor([[True, False, True], [True, False, True]])).flatten().tolist()
        [2.0, 2.0]
        >>> game.evaluations
        1
    """

    def __init__(self, utility: Utility, num_players: int) -> None:
        check_num_players(num_players)
        self.utility = utility
        self.num_players = num_players
        self._rows: dict[int | bytes, int] = {}
        self._values = torch.empty(0, 0, dtype=torch.float64)
        self._vector = False
        self._dtype = torch.float32

    @property
    def evaluations(self) -> int:
        return len(self._rows)

    def __call__(self, masks: Tensor) -> Tensor:
        """Utilities ``[..., M]`` (float64) of the coalitions ``masks``: bool ``[..., n]``; M = 1 for a scalar game."""
        flat = masks.reshape(-1, self.num_players)
        keys = coalition_keys(flat)
        if keys:
            self._evaluate_new(flat, keys)
        rows = torch.tensor(list(map(self._rows.__getitem__, keys)), dtype=torch.int64)
        return self._values[rows].reshape(*masks.shape[:-1], self._values.shape[1])

    def cost(self, masks: Tensor) -> Tensor:
        """New evaluations that groups of coalitions would need, cumulated: ``masks`` bool ``[G, K, n]`` -> int ``[G]``.

        Entry g is the price of groups 0..g together, so an estimator can take as many groups as its budget allows.
        """
        groups, size = masks.shape[:2]
        new = self._unknown(coalition_keys(masks.reshape(-1, self.num_players)))
        first = torch.tensor(list(new.values()), dtype=torch.int64)
        return torch.bincount(first // max(size, 1), minlength=groups).cumsum(0)

    def empty_and_grand(self) -> tuple[Tensor, Tensor]:
        """The utilities ``[M]`` of the empty and the grand coalition."""
        ends = self(torch.arange(2)[:, None].expand(2, self.num_players).bool())
        return ends[0], ends[1]

    def estimate(self, values: Tensor, stderr: Tensor, freedom: Tensor | float = math.inf) -> ShapleyEstimate:
        """Wrap float64 ``[n, M]`` results in the shape and dtype that the utility's own answers have."""

        def shaped(x: Tensor) -> Tensor:
            return (x if self._vector else x[:, 0]).to(self._dtype)

        told = shaped(freedom) if isinstance(freedom, Tensor) else freedom
        return ShapleyEstimate(shaped(values), shaped(stderr), self.evaluations, freedom=told)

    def _unknown(self, keys: Sequence[int | bytes]) -> dict[int | bytes, int]:
        """Coalitions without a value, and where each comes first."""
        new: dict[int | bytes, int] = {}
        for position, key in enumerate(keys):
            if key not in self._rows:
                new.setdefault(key, position)
        return new

    def _evaluate_new(self, masks: Tensor, keys: Sequence[int | bytes]) -> None:
        rows, new = self._rows, self._unknown(keys)
        if not new:
            return
        values = evaluate(self.utility, masks[list(new.values())])
        vector = values.ndim == 2
        table = values.reshape(len(new), -1).to("cpu", torch.float64)
        if not rows:
            self._vector, self._dtype = vector, result_dtype(values)
            self._values = table
        elif vector != self._vector or table.shape[1] != self._values.shape[1]:
            raise ValueError(
                f"utility(masks) returned {tuple(values.shape)} now and [K{', ' if self._vector else ''}"
                f"{self._values.shape[1] if self._vector else ''}] before; the number of columns must not change."
            )
        else:
            self._values = torch.cat([self._values, table])
        rows.update(zip(new, range(len(rows), len(rows) + len(new)), strict=True))


MAX_EXACT_PLAYERS = 22
_CHUNK = 2**16  # masks per call of the utility: a few MB, and utilities have per-call overhead


def all_coalitions(num_players: int, start: int = 0, stop: int | None = None) -> Tensor:
    """Membership masks bool ``[stop - start, n]`` of coalitions number ``start``..``stop - 1``; bit i is player i.

    Example:
        >>> all_coalitions(2).int().tolist()
        [[0, 0], [1, 0], [0, 1], [1, 1]]
    """
    numbers = torch.arange(start, 2**num_players if stop is None else stop)
    return (numbers[:, None] & (1 << torch.arange(num_players))) != 0


def semivalue_of_table(table: Tensor, weight: list[float]) -> Tensor:
    """Weighted sum of all marginal contributions, from a game given in full.

    Args:
        table: ``[2^n, M]``, row b the utilities of coalition number b.
        weight: n numbers, the s-th for coalitions of size s that the player joins.

    Returns:
        ``[n, M]`` float64.
    """
    num_players = len(table).bit_length() - 1
    sizes = torch.zeros(1, dtype=torch.int64)
    for _ in range(num_players - 1):
        sizes = torch.cat([sizes, sizes + 1])
    # Striking bit i out of a coalition number leaves a number below 2^(n-1) with the same other bits, in order: one
    # vector of weights serves every player.
    weights = torch.tensor(weight, dtype=torch.float64)[sizes]
    values = torch.empty(num_players, table.shape[1], dtype=torch.float64)
    for i in range(num_players):
        pairs = table.view(2 ** (num_players - 1 - i), 2, 2**i, -1)
        marginals = pairs[:, 1] - pairs[:, 0]
        values[i] = weights @ marginals.reshape(len(weights), -1)
    return values


def shapley_weights(num_players: int) -> list[float]:
    """1 / (n binom(n-1, s)) for s = 0..n-1."""
    return [1 / (num_players * math.comb(num_players - 1, s)) for s in range(num_players)]


def per_coalition(size_weights: Sequence[float] | None, num_players: int) -> list[float]:
    """Of every single coalition of size s = 0..n-1, from the weights of the sizes; None: Shapley's."""
    if size_weights is None:
        return shapley_weights(num_players)
    return [weight / math.comb(num_players - 1, s) for s, weight in enumerate(size_weights)]


def shapley_of_table(table: Tensor) -> Tensor:
    """Shapley values ``[n, M]`` of a game given in full: ``table [2^n, M]``, row b for coalition number b."""
    return semivalue_of_table(table, shapley_weights(len(table).bit_length() - 1))


def semivalue(utility: Utility, num_players: int, weight: list[float]) -> ShapleyEstimate:
    """Enumerate the game and return its semivalue with the given weights; see :func:`semivalue_of_table`."""
    total = 2**num_players
    answers = [
        evaluate(utility, all_coalitions(num_players, start, min(start + _CHUNK, total)))
        for start in range(0, total, _CHUNK)
    ]
    answer = answers[0] if len(answers) == 1 else torch.cat(answers)
    values = semivalue_of_table(answer.reshape(total, -1).to("cpu", torch.float64), weight).to(result_dtype(answer))
    values = values if answer.ndim == 2 else values[:, 0]
    return ShapleyEstimate(values, torch.zeros_like(values), total)


def check_enumerable(name: str, num_players: int, budget: int | None, alternatives: str) -> None:
    """Raise ConfigurationError if 2^n coalitions are too many to enumerate, or more than ``budget``."""
    check_num_players(num_players)
    if num_players > MAX_EXACT_PLAYERS:
        raise ConfigurationError(
            f"{name} with {num_players} players needs 2^{num_players} = {2**num_players:,} evaluations; the limit is "
            f"{MAX_EXACT_PLAYERS} players. {alternatives}"
        )
    if budget is not None and budget < 2**num_players:
        raise ConfigurationError(
            f"{name}: budget={budget} is below the minimum of 2^{num_players} = {2**num_players} evaluations for "
            f"{num_players} players. {alternatives}"
        )


def exact_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
    size_weights: Sequence[float] | None = None,
) -> ShapleyEstimate:
    """The Shapley value from all 2^n coalitions.

    Args:
        utility: ``masks: bool [K, n] -> float [K]`` or ``[K, M]``; called with up to 65,536 masks at once.
        num_players: n, at most 22.
        budget: largest number of evaluations allowed; fewer than 2^n raises.
        generator: not used; every estimator takes it.
        target_stderr: not used, the standard error is 0.
        size_weights: n numbers for another semivalue, see :mod:`flsv.functional.shapley.semivalues`; None: Shapley's.

    Returns:
        ``values [n]`` or ``[n, M]``, ``stderr`` 0, ``evaluations`` 2^n.

    Raises:
        ConfigurationError: more than 22 players, or a budget below 2^n.
        ValueError: a utility that is NaN, infinite or of the wrong shape.

    Example:
        The glove game: player 0 owns a left glove, players 1 and 2 a right one; a pair is worth 1.

        >>> glove = lambda masks: (masks[:, 0] & (masks[:, 1] | masks[:, 2])).float()
        >>> exact_shapley(glove, 3).values
        tensor([0.6667, 0.1667, 0.1667])
    """
    alternatives = "Use surrogate_shapley, regression_shapley or permutation_shapley with a budget."
    check_enumerable("exact_shapley", num_players, budget, alternatives)
    return semivalue(utility, num_players, per_coalition(size_weights, num_players))
