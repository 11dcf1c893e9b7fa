"""Shapley values from a few coalitions: which coalitions to evaluate, and a Gaussian process fitted to them.

Retraining a federation for every coalition of its n clients costs 2^n trainings. :func:`few_coalitions` lists far fewer
coalitions, and :func:`few_coalitions_shapley` estimates the Shapley values from their utilities. With all 2^n
coalitions the values of these trainings are exact. They still differ from seed to seed, see
:func:`interval_over_seeds`, and :mod:`flsv.functional.intervals` for a single seed.

**The fit** is the surrogate of :mod:`flsv.functional.shapley.surrogate` with a fixed kernel, the sum of

- the inner product of membership vectors, for additive games.
- a Gaussian kernel of squared width 0.3 on the vectors z / |S| with which a coalition S averages its members' models
  (z_i: membership of player i), so that coalitions with similar averages have similar utilities.

The Shapley value is linear in the game, so that the value of the fitted game and its variance have a closed form. Let
L_i g be the Shapley value of player i in the game g, k the kernel, X the evaluated coalitions, U their utilities, K the
matrix k(X, X) with the noise variance added to its diagonal, and v the prior variance of L_i g
(:func:`prior_variance`). Then

    E[L_i g | U] = L_i k(., X) K^-1 U,        Var(L_i g | U) = v - L_i k(., X) K^-1 k(X, .) L_i'.

The gap between the sum of the fitted values and U(grand) - U(empty) is divided equally among the players.

**Signal and noise variance** maximize the marginal likelihood, with the noise variance at most the variance of one part
of the kernel. Without this bound, the likelihood of so few coalitions can be largest where everything counts as noise.
The true noise is far smaller, 1 to 15 % of the variance between coalitions (``docs/results/intervals_digits.csv``).

**Standard errors** measure the uncertainty from coalitions that were not evaluated. The method is this package's own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.functional.intervals import interval_over_seeds
from flsv.functional.shapley.exact import all_coalitions, check_enumerable, exact_shapley
from flsv.functional.shapley.game import (
    ShapleyEstimate,
    check_num_players,
    coalition_keys,
    first_positions,
)
from flsv.functional.shapley.surrogate import (
    CONSTANT,
    PENALTIES,
    Kernel,
    gaussian,
    gram,
    kernel_shapley,
    membership,
)
from flsv.utilities.choices import Which as Which
from flsv.utilities.declared import NonNegative, checked

#: The parts whose sum is the kernel of the Gaussian process.
PARTS: tuple[Kernel, ...] = (membership, gaussian(0.3))
#: The largest noise variance to fit, in units of the variance of one part of the kernel.
MOST_NOISE = 1.0


@checked
def few_coalitions(num_players: int, which: Which = "both") -> Tensor:
    """List the coalitions to evaluate, bool ``[K, n]``. The empty and the grand coalition come first.

    Args:
        num_players: the number n of players.
        which: the design, that is the coalitions besides the empty and the grand one. ``"singles"``: each player alone
            (n + 2 coalitions in all). ``"pairs"``: each player alone and every two players. ``"leave-one-out"``: all
            players but one (n + 2 in all). ``"both"``: each player alone and all but one (2 n + 2 in all).
            ``"pairs+leave-one-out"``: each player alone, every two players, and all but one.
            ``"pairs+leave-two-out"``: these and all but two (n^2 + n + 2 in all). ``"all"``: all 2^n coalitions.
            ``"auto"``: the same as ``"both"``, with which outputs can be predicted, see
            :mod:`flsv.functional.shapley.predicted_outputs`.

    Raises:
        ConfigurationError: ``which`` is unknown, there is no player, or ``which`` is ``"all"`` for more than 22
            players.

    Example:
        >>> few_coalitions(3, "singles").int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
        >>> [len(few_coalitions(5, which)) for which in ("singles", "pairs", "both", "all")]
        [7, 17, 12, 32]
    """
    check_num_players(num_players)
    masks = [torch.arange(2)[:, None].expand(2, num_players).bool()]
    one = torch.eye(num_players, dtype=torch.bool)
    if which not in ("leave-one-out", "all"):
        masks.append(one)
    first, second = torch.triu_indices(num_players, num_players, 1)
    pairs = one[first] | one[second]
    if which.startswith("pairs"):
        masks.append(pairs)
    if which not in ("singles", "pairs", "all"):
        masks.append(~one)
    if which == "pairs+leave-two-out":
        masks.append(~pairs)
    if which == "all":
        check_enumerable("few_coalitions", num_players, None, 'Ask for "both".')
        masks.append(all_coalitions(num_players))
    repeated = torch.cat(masks)
    return repeated[list(first_positions(coalition_keys(repeated)).values())]


@checked
def few_coalitions_shapley(
    masks: Tensor, utilities: Tensor, noise: NonNegative | None = None
) -> ShapleyEstimate:
    """Compute Shapley values from some coalitions' utilities, by a Gaussian process.

    With all 2^n coalitions the values are exact. Otherwise they are those of the fitted game.

    Args:
        masks: the K evaluated coalitions, bool ``[K, n]``, distinct, the empty and the grand coalition among them. See
            :func:`few_coalitions`.
        utilities: the coalitions' utilities, ``[K]``, or ``[K, M]`` for M games at once.
        noise: the least standard deviation of the noise in a utility, that is between trainings of the same coalition,
            in the utility's unit. None: 0. The noise itself is fitted by marginal likelihood.

    Returns:
        The estimate: ``values`` and ``stderr``, float64 ``[n]`` or ``[n, M]``, and ``evaluations`` K. ``stderr``
        measures the uncertainty from the coalitions that were not evaluated. It is 0 if all were.

    Raises:
        ConfigurationError: ``noise`` is below 0.
        ValueError: the shapes do not fit, a utility is not finite, a coalition occurs twice, or the empty or the grand
            coalition is missing.

    Example:
        10 of the 16 coalitions of a game of four players, in which U(S) is the mean of the members' gains plus their
        number. The exact values are 0.5278, 1.1389, 1.75 and 3.5833.

        >>> masks = few_coalitions(4, "both")
        >>> gains = torch.tensor([1.0, 2, 3, 6]).double()
        >>> utilities = masks.double() @ gains / masks.sum(1).clamp_min(1) + masks.sum(1)
        >>> few_coalitions_shapley(masks, utilities).values
        tensor([0.5675, 1.1588, 1.7500, 3.5237], dtype=torch.float64)
    """
    columns = torch.as_tensor(utilities).detach().cpu().double()
    flat = columns.ndim == 1
    columns = columns[:, None] if flat else columns
    _check(masks, columns)
    n = masks.shape[1]
    if len(masks) == 2**n:
        table = dict(zip(map(tuple, masks.tolist()), columns))
        exact = exact_shapley(
            lambda rows: torch.stack([table[tuple(row)] for row in rows.tolist()]), n
        ).values
        exact = exact[:, 0] if flat else exact
        return ShapleyEstimate(exact, torch.zeros_like(exact), len(masks))
    solved = [_solve(masks.cpu(), column, noise) for column in columns.T]
    values, stderr = (torch.stack(part, dim=1) for part in zip(*solved))
    first, last = (int((masks.sum(1) == size).int().argmax()) for size in (0, n))
    values = values + (columns[last] - columns[first] - values.sum(0)) / n
    return ShapleyEstimate(
        values[:, 0] if flat else values, stderr[:, 0] if flat else stderr, len(masks)
    )


def retrained_shapley(
    masks: Tensor, utilities: Tensor, level: float = 0.9
) -> tuple[Tensor, Tensor]:
    """Compute Shapley values from retrained coalitions, and half the widths of their confidence intervals.

    Each seed's values are those of :func:`few_coalitions_shapley`. The result is their mean over the seeds, with the
    half widths of :func:`interval_over_seeds`.

    Args:
        masks: the K trained coalitions, bool ``[K, n]``, see :func:`few_coalitions_shapley`.
        utilities: ``[seeds, K]``, the coalitions' utilities for each seed.
        level: the confidence level, in (0, 1).

    Returns:
        The values, float64 ``[n]``, and half the width of each value's interval, float64 ``[n]``.

    Example:
        >>> masks = few_coalitions(2, "all")
        >>> retrained_shapley(masks, torch.tensor([[0.0, 5.0, 1.0, 2.0]]))
        (tensor([2., 3.], dtype=torch.float64), tensor([0.3701, 0.3701], dtype=torch.float64))
    """
    found = few_coalitions_shapley(masks, utilities.T)
    return found.values.mean(1), interval_over_seeds(found.values.T, found.stderr.mean(1), level)


def _solve(masks: Tensor, utilities: Tensor, noise: float | None) -> tuple[Tensor, Tensor]:
    """Fit the Gaussian process to one game. Return the Shapley values and their standard errors, ``[n]`` each."""
    n, mean, scale = masks.shape[1], utilities.mean(), float(utilities.std())
    if scale <= 1e-12 * (1 + abs(float(mean))):  # all coalitions have the same utility
        nothing = torch.zeros(n, dtype=torch.float64)
        return nothing, nothing
    y = (utilities - mean) / scale
    kernel = torch.full(
        (len(masks), len(masks)), CONSTANT, dtype=torch.float64
    )  # a constant's values are 0
    values, before = (
        torch.zeros(len(masks), n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
    )
    for part in PARTS:
        gram_matrix = gram(part, masks, masks)
        # Each part has unit variance over the coalitions, as in surrogate_shapley.
        weight = 1 / float((gram_matrix.diagonal().mean() - gram_matrix.mean()).clamp_min(1e-12))
        kernel += weight * gram_matrix
        values += weight * kernel_shapley(part, masks)
        before += weight * prior_variance(part, n)
    eigenvalues, vectors = torch.linalg.eigh(kernel)
    shrunk = eigenvalues.clamp_min(0)[None] + PENALTIES[:, None]
    signal = ((vectors.T @ y).square()[None] / shrunk).mean(1).clamp_min(1e-12)
    loss = signal.log() + shrunk.log().mean(1)
    # A ridge penalty is the noise variance in units of the signal variance, which is the variance of one part.
    enough = PENALTIES * signal * scale**2 >= (noise or 0.0) ** 2
    likely = enough & (PENALTIES <= MOST_NOISE)
    if likely.any():
        at = int(torch.where(likely, loss, torch.inf).argmin())
    else:  # the given noise exceeds MOST_NOISE
        at = int(enough.int().argmax()) if enough.any() else -1
    inverse = (vectors / shrunk[at]) @ vectors.T
    variance = signal[at] * (before - (values * (inverse @ values)).sum(0)).clamp_min(0)
    return scale * values.T @ inverse @ y, scale * variance.sqrt()


def prior_variance(kernel: Kernel, num_players: int) -> float:
    """Compute the variance of a player's Shapley value in a game drawn from a Gaussian process."""
    # It is the player's value in the game T -> phi(T), with phi(T) its value in the game S -> k(S, T). phi(T) depends
    # only on the size of T and on whether T contains the player.
    sizes = torch.arange(num_players + 1)
    first = sizes[:, None] > torch.arange(num_players)  # row s: players 0 to s - 1
    inside = kernel_shapley(kernel, first)[1:, 0]  # values of player 0, for |T| = 1 to n
    outside = kernel_shapley(kernel, first)[:-1, -1]  # of the last player, for |T| = 0 to n - 1
    return float((inside - outside).mean())


def _check(masks: Tensor, columns: Tensor) -> None:
    """Check the masks and utilities, and that the empty and the grand coalition are included."""
    if (
        masks.dtype != torch.bool
        or masks.ndim != 2
        or columns.ndim != 2
        or len(masks) != len(columns)
    ):
        raise ValueError(
            f"expected masks bool [K, n] and utilities [K] or [K, M], got {masks.dtype} {list(masks.shape)} and "
            f"{list(columns.shape)}."
        )
    if len(masks.unique(dim=0)) < len(masks):
        raise ValueError("A coalition occurs twice: average its utilities before the call.")
    if not {0, masks.shape[1]} <= set(masks.sum(1).tolist()):
        raise ValueError("the empty and the grand coalition must be among the masks.")
    if not columns.isfinite().all():
        raise ValueError(
            f"the utility of coalitions {masks[~columns.isfinite().all(1)].int().tolist()} is not finite."
        )
