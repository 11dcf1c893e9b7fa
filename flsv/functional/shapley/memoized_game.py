"""The memoized coalition game, which evaluates, checks and counts each distinct coalition once.

Estimators may ask for coalitions in any order and repeatedly; :class:`MemoizedGame` calls the user's utility only for
those that are new. The keys of the stored utilities are bitmasks: Python integers for up to 64 players, and byte
strings for more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flsv.functional.shapley.game import (
    ShapleyEstimate,
    Utility,
    check_num_players,
    coalition_keys,
    evaluate,
    first_positions,
    result_dtype,
)


class MemoizedGame:
    """A game that evaluates each distinct coalition once.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.

    Attributes:
        evaluations: how many distinct coalitions have been evaluated so far.

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
        """Count the distinct coalitions evaluated so far."""
        return len(self._rows)

    def __call__(self, masks: Tensor) -> Tensor:
        flat = masks.reshape(-1, self.num_players)
        keys = coalition_keys(flat)
        if keys:
            self._evaluate_new(flat, keys)
        rows = torch.tensor(list(map(self._rows.__getitem__, keys)), dtype=torch.int64)
        return self._values[rows].reshape(*masks.shape[:-1], self._values.shape[1])

    def cost(self, masks: Tensor) -> Tensor:
        """Count, for each g, the new evaluations that the first g + 1 groups of coalitions take.

        Args:
            masks: G groups of K coalitions, bool ``[G, K, n]``.

        Returns:
            int ``[G]``; entry g is the number of coalitions in the groups 0..g that have not been evaluated yet.
        """
        groups, size = masks.shape[:2]
        new = first_positions(coalition_keys(masks.reshape(-1, self.num_players)), self._rows)
        first = torch.tensor(list(new.values()), dtype=torch.int64)
        return torch.bincount(first // max(size, 1), minlength=groups).cumsum(0)

    def empty_and_grand(self) -> tuple[Tensor, Tensor]:
        """Return the utility ``[M]`` of the empty coalition and that of the grand coalition."""
        ends = self(torch.arange(2)[:, None].expand(2, self.num_players).bool())
        return ends[0], ends[1]

    def estimate(self, values: Tensor, stderr: Tensor, freedom: Tensor | float = math.inf) -> ShapleyEstimate:
        """Make a :class:`ShapleyEstimate` in the dtype of the utility's results, without the axis M for a scalar game.

        Args:
            values: float64 ``[n, M]``.
            stderr: float64 ``[n, M]``, the values' standard errors.
            freedom: degrees of freedom of the standard errors, ``[n, M]`` or one number for all.
        """

        def shaped(x: Tensor) -> Tensor:
            return (x if self._vector else x[:, 0]).to(self._dtype)

        told = shaped(freedom) if isinstance(freedom, Tensor) else freedom
        return ShapleyEstimate(shaped(values), shaped(stderr), self.evaluations, freedom=told)

    def _evaluate_new(self, masks: Tensor, keys: Sequence[int | bytes]) -> None:
        """Evaluate the coalitions without a stored utility in one call, and store the utilities."""
        rows, new = self._rows, first_positions(keys, self._rows)
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
