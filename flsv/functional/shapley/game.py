"""The coalition game as a batched callable, and the ShapleyEstimate that estimators return.

The Shapley value (Shapley 1953; ShapleyFL, KDD 2023, eq. 1) of player i in the game U on n players is

    SV_i = 1/n sum_{S not containing i} [U(S + i) - U(S)] / binom(n - 1, |S|).

A game is a callable ``utility(masks: bool [K, n]) -> float [K]`` that returns the utilities of K coalitions (or
``[K, M]``, one game per column, such as the accuracy of each class). The functions of this package know nothing about
models or rounds.

Arithmetic is float64 on the CPU; results have the utility's dtype if that is float32 or float64, otherwise float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from flsv.utilities.errors import ConfigurationError

Key = TypeVar("Key", bound=Hashable)
Utility = Callable[[Tensor], Tensor]
"""A game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]`` or ``[K, M]``.

Entry (k, i) of the masks is True if player i of n is in coalition k. The masks are on the CPU and distinct; the result
may be on any device, and is detached.
"""


@dataclass(frozen=True, eq=False)
class ShapleyEstimate:
    """Values of all players, their standard errors, and the number of evaluations.

    Attributes:
        values: ``[n]``, or ``[n, M]`` for a vector-valued utility, in the utility's unit.
        stderr: standard error of ``values`` due to sampling, same shape and unit. 0 if every coalition that enters the
            values was evaluated; NaN with fewer than two samples, which show no spread. It does not include the bias of
            truncation or of a fitted surrogate.
        evaluations: number of distinct coalitions that were evaluated, the empty and the grand coalition included.
        freedom: the degrees of freedom of ``stderr``, for intervals by Student's t: a tensor of the shape of
            ``stderr``, or one number for all; inf (normal intervals) if the estimator does not compute them.

    Example:
        Three pairs of orders give 2 degrees of freedom, and an interval 1.8 times as wide as a normal interval.

        >>> import torch
        >>> from flsv.functional import permutation_shapley
        >>> from flsv.functional.confidence import t_quantile
        >>> airport = lambda masks: -(masks * torch.arange(6.0)).amax(dim=1)
        >>> found = permutation_shapley(airport, 6, num_permutations=6, generator=torch.Generator().manual_seed(0))
        >>> found.freedom, t_quantile(0.9, found.freedom) / t_quantile(0.9)
        (2, tensor(1.7752, dtype=torch.float64))
    """

    values: Tensor
    stderr: Tensor
    evaluations: int
    freedom: Tensor | float = field(default=math.inf, kw_only=True)


def check_num_players(num_players: int) -> None:
    """Raise ConfigurationError if ``num_players`` is below 1."""
    if num_players < 1:
        raise ConfigurationError(f"num_players={num_players}: a coalition game needs at least 1 player.")


def coalition_keys(masks: Tensor) -> Sequence[int | bytes]:
    """Compute a hashable key for each coalition; two keys are equal only if the coalitions are.

    Args:
        masks: K coalitions, bool ``[K, n]``.

    Returns:
        K integers for up to 64 players, K byte strings for more.
    """
    packed = np.packbits(masks.numpy(), axis=1)
    width = packed.shape[1]
    if width > 8:
        return packed.view(f"S{width}").ravel().tolist()
    words = np.zeros((len(packed), 8), dtype=np.uint8)
    words[:, :width] = packed
    return words.view(np.uint64).ravel().tolist()


def first_positions(keys: Iterable[Key], known: Container[Key] = ()) -> dict[Key, int]:
    """Find the keys that are not in ``known``, and the position in ``keys`` at which each occurs first.

    Args:
        keys: keys of coalitions, possibly repeated.
        known: the keys to leave out, such as those of evaluated coalitions.

    Returns:
        ``{key: position}``, by ascending position.

    Example:
        >>> first_positions([6, 3, 5, 6, 5], known={3})
        {6: 0, 5: 2}
    """
    new: dict[Key, int] = {}
    for position, key in enumerate(keys):
        if key not in known:
            new.setdefault(key, position)
    return new


def evaluate(utility: Utility, masks: Tensor) -> Tensor:
    """Evaluate coalitions by one call of ``utility``, and check the result.

    Args:
        utility: the game.
        masks: the coalitions, bool ``[K, n]``.

    Returns:
        The utilities, ``[K]`` or ``[K, M]``, detached.

    Raises:
        ValueError: the result has a wrong shape, or a utility is NaN or infinite; the message names its coalition.
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
    """Return the dtype of estimates from the utilities ``values``: float64 if they are float64, otherwise float32."""
    return torch.float64 if values.dtype == torch.float64 else torch.float32
