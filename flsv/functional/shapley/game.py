"""Coalition games as batched callables, their estimates, and the budget of sampled estimators.

The Shapley value (Shapley 1953; ShapleyFL, KDD 2023, eq. 1) of player i in the game U on n players is

    SV_i = 1/n sum_{S not containing i} [U(S + i) - U(S)] / binom(n - 1, |S|).

Arithmetic is float64 on the CPU. Results have the utility's dtype if that is float32 or float64, otherwise float32.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flsv.utilities.declared import check_argument
from flsv.utilities.errors import ConfigurationError

Key = TypeVar("Key", bound=Hashable)
Utility = Callable[[Tensor], Tensor]
"""A game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]`` or ``[K, M]``.

Element (k, i) of the masks is True if player i of n is in coalition k. The masks are on the CPU and distinct. The
result may be on any device, and is detached.
"""


@dataclass(frozen=True, eq=False)
class ShapleyEstimate:
    """Values of all players, their standard errors, and the number of evaluations.

    Attributes:
        values: ``[n]``, or ``[n, M]`` for a vector-valued utility, in the utility's unit.
        stderr: standard error of ``values`` due to sampling, same shape and unit. 0 if every coalition that enters the
            values was evaluated. NaN with fewer than two samples. It does not include the bias of truncation or of a
            fitted surrogate.
        evaluations: number of distinct coalitions that were evaluated, the empty and the grand coalition included.
    """

    values: Tensor
    stderr: Tensor
    evaluations: int


def check_num_players(num_players: int) -> None:
    """Raise ConfigurationError if ``num_players`` is below 1."""
    if num_players < 1:
        raise ConfigurationError(
            f"a coalition game needs at least 1 player, but num_players={num_players}."
        )


def coalition_keys(masks: Tensor) -> Sequence[int | bytes]:
    """Compute K distinct keys of coalitions ``[K, n]``: integers up to 64 players, byte strings beyond."""
    packed = np.packbits(masks.numpy(), axis=1)
    count, num_bytes = packed.shape
    if num_bytes > 8:
        # One byte string per row. NumPy removes zeros at the end of each, which keeps them distinct.
        return packed.view(f"S{num_bytes}").ravel().tolist()
    # Up to 64 players: a row's bytes, filled up to 8, are one integer.
    words = np.zeros((count, 8), dtype=np.uint8)
    words[:, :num_bytes] = packed
    return words.view(np.uint64).ravel().tolist()


def first_positions(
    keys: Iterable[Key],
    stored: Container[Key] = (),
) -> dict[Key, int]:
    """Return ``{key: position}``, the first position of each key that is not in ``stored``."""
    positions: dict[Key, int] = {}
    for position, key in enumerate(keys):
        if key not in stored:
            positions.setdefault(key, position)
    return positions


def evaluate(utility: Utility, masks: Tensor) -> Tensor:
    """Evaluate coalitions by one call of ``utility``, and check the result's shape and finiteness."""
    values = torch.as_tensor(utility(masks)).detach()
    num_coalitions = len(masks)
    if values.ndim not in (1, 2) or len(values) != num_coalitions:
        raise ValueError(
            f"utility(masks) returned shape {tuple(values.shape)} for masks of shape {tuple(masks.shape)}. Expected is "
            f"[{num_coalitions}] or [{num_coalitions}, M]: one utility, or M of them, per row of masks."
        )
    is_finite = torch.isfinite(values)
    if not is_finite.all():
        is_valid = is_finite.reshape(num_coalitions, -1).all(dim=1)
        row = int((~is_valid).nonzero()[0])
        members = masks[row].nonzero().flatten().tolist()
        raise ValueError(
            f"the utility of coalition {members} is {values[row].tolist()}, but utilities must be finite. Remove the "
            "player whose update is not finite, or return the worst utility instead."
        )
    return values


def result_dtype(values: Tensor) -> torch.dtype:
    """Return float64 for float64 utilities, otherwise float32."""
    if values.dtype == torch.float64:
        return torch.float64
    return torch.float32


class MemoizedGame:
    """A game that evaluates, checks and counts each distinct coalition once."""

    _is_vector_valued = False
    _dtype = torch.float32

    def __init__(self, utility: Utility, num_players: int) -> None:
        check_num_players(num_players)
        self.utility = utility
        self.num_players = num_players
        self._row_by_key: dict[int | bytes, int] = {}  # see coalition_keys
        self._utilities = torch.empty(0, 0, dtype=torch.float64)  # [rows, M]

    @property
    def evaluations(self) -> int:
        """Count the distinct coalitions evaluated so far."""
        return len(self._row_by_key)

    def __call__(self, masks: Tensor) -> Tensor:
        coalitions = masks.reshape(-1, self.num_players)
        keys = coalition_keys(coalitions)
        if keys:
            self._evaluate_new(coalitions, keys)
        rows = torch.tensor([self._row_by_key[key] for key in keys], dtype=torch.int64)
        utilities = self._utilities[rows]
        return utilities.reshape(*masks.shape[:-1], self._utilities.shape[1])

    def cumulative_cost(self, masks: Tensor) -> Tensor:
        """Count the new evaluations ``[G]`` for the first 1, 2, ..., G groups of coalitions ``[G, K, n]``."""
        num_groups, group_size, _num_players = masks.shape
        coalitions = masks.reshape(-1, self.num_players)  # group after group
        # A coalition that was not evaluated yet counts for the group in which it occurs first.
        keys = coalition_keys(coalitions)
        position_by_key = first_positions(keys, stored=self._row_by_key)
        positions = torch.tensor(list(position_by_key.values()), dtype=torch.int64)
        groups = positions // max(group_size, 1)
        num_new_by_group = torch.bincount(groups, minlength=num_groups)
        return num_new_by_group.cumsum(0)

    def empty_and_grand(self) -> tuple[Tensor, Tensor]:
        """Return the utilities ``[M]`` of the empty and of the grand coalition."""
        masks = torch.zeros(2, self.num_players, dtype=torch.bool)
        masks[1] = True
        empty, grand = self(masks)
        return empty, grand

    def estimate(self, values: Tensor, stderr: Tensor) -> ShapleyEstimate:
        """Return an estimate in the utility's dtype, without the axis M for a scalar game."""
        if not self._is_vector_valued:
            values = values[:, 0]
            stderr = stderr[:, 0]
        return ShapleyEstimate(
            values=values.to(self._dtype),
            stderr=stderr.to(self._dtype),
            evaluations=self.evaluations,
        )

    def _evaluate_new(
        self,
        masks: Tensor,
        keys: Sequence[int | bytes],
    ) -> None:
        """Evaluate the coalitions without a stored utility in one call, and store their utilities."""
        position_by_key = first_positions(keys, stored=self._row_by_key)
        if not position_by_key:
            return
        new_masks = masks[list(position_by_key.values())]
        utilities = evaluate(self.utility, new_masks)
        new_rows = utilities.reshape(len(new_masks), -1).to("cpu", torch.float64)

        num_rows = len(self._row_by_key)
        if num_rows == 0:
            self._is_vector_valued = utilities.ndim == 2
            self._dtype = result_dtype(utilities)
            self._utilities = new_rows
        else:
            self._check_columns(utilities)
            self._utilities = torch.cat([self._utilities, new_rows])
        for row, key in enumerate(position_by_key, start=num_rows):
            self._row_by_key[key] = row

    def _check_columns(self, utilities: Tensor) -> None:
        """Raise ValueError unless utilities have as many columns as earlier ones."""
        columns_before = self._utilities.shape[1:] if self._is_vector_valued else ()
        if utilities.shape[1:] != columns_before:
            previous_shape = f"[K, {columns_before[0]}]" if columns_before else "[K]"
            raise ValueError(
                f"utility(masks) returned shape {tuple(utilities.shape)}, but {previous_shape} before. The number of "
                "columns must not change."
            )


DEFAULT_EVALUATIONS_PER_PLAYER = 50
MAX_EXACT_PLAYERS = 22  # up to this number all 2^n coalitions may be evaluated


class Sampling(MemoizedGame):
    """A memoized game with a budget, for one call of a sampled estimator. The default is 50 n distinct evaluations."""

    # Stopping at the budget does not bias an estimate, since it depends only on masks, not on utilities or on the order
    # of the players.

    def __init__(
        self,
        name: str,
        utility: Utility,
        num_players: int,
        budget: int | None,
        minimum: int,
    ) -> None:
        super().__init__(utility, num_players)
        num_coalitions = 2**num_players
        minimum = min(minimum, num_coalitions)
        budget = check_argument(name, "budget", budget, int | None)
        if budget is None:
            budget = max(DEFAULT_EVALUATIONS_PER_PLAYER * num_players, minimum)
            budget = min(budget, num_coalitions)
        if budget < minimum:
            raise ConfigurationError(
                f"{name}: budget={budget} is below the minimum of {minimum} evaluations for {num_players} players."
            )
        self.budget = budget

    @property
    def can_evaluate_all(self) -> bool:
        """Return whether there are at most 22 players and the budget suffices for all coalitions."""
        return self.num_players <= MAX_EXACT_PLAYERS and self.budget >= 2**self.num_players

    @property
    def left(self) -> int:
        """Return the remaining number of evaluations."""
        return self.budget - self.evaluations

    def affordable(self, groups: Tensor) -> int:
        """Return how many groups of coalitions ``[G, K, n]`` the remaining budget covers. Groups are taken in order."""
        is_affordable = self.cumulative_cost(groups) <= self.left
        return int(is_affordable.sum())
