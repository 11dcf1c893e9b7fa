"""Shapley values from a few coalitions, by a Gaussian process on membership and on the members' average.

Training a federation again for every coalition costs 2^n trainings. This asks for n + 2 of them (nobody, everybody,
each player alone) or 2 n + 2 (everybody but one, besides) and fits a Gaussian process to what they came to, the
``surrogate`` of ``surrogate_shapley`` with fixed parts:

- membership: what a player adds;
- a Gaussian kernel on the weights z / |S| with which a coalition averages its members' models (z_i: membership of
  player i), of width 0.3^0.5: coalitions whose averages are close are worth about the same.

The Shapley value is linear in the game, so that of the fitted game is known in closed form (``kernels``), and so is how
uncertain it is: with L_i g the value of player i in the game g, K the kernel matrix of the coalitions with the noise in
its diagonal, and v = Var(L_i g) before anything is known,

    E[L_i g | U] = L_i k(., X) K^-1 U,        Var(L_i g | U) = v - L_i k(., X) K^-1 k(X, .) L_i'.

What the fit leaves of U(everybody) - U(nobody) is dealt out equally, so that the values add up to it. From ten players
on, where the process makes up most of the sizes between those that are evaluated, the values are the mean of its own
and of a curve over the coalitions' size (``size_effects``); of fewer players it is better alone. Where all 2^n
coalitions are known, nothing is fitted: the values are exact, and uncertain by what they differ by from one seed of the
trainings to the next (``interval_over_seeds``).

This is no paper's method. Signal and noise are set by marginal likelihood, but the noise has at most the variance of
one part of the fit. The likelihood of so few coalitions has a second mode, in which all of it is noise and all players
get the same, and that one is the higher where a player alone comes close to what all come to, as it does in a loss or
an accuracy. What one training differs from the next by is far less: 1 to 15 % of the variance between coalitions in the
federations of ``flsv.benchmark`` (``docs/results/intervals.md``).

The standard errors are what these coalitions leave open *if the game is of this kind*. ``kernel_shap`` of the same
coalitions assumes nothing: where the two are further apart than the interval, this fit's form decides.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.functional.confidence import t_quantile
from flsv.functional.shapley.enumeration import all_coalitions, check_enumerable
from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import ShapleyEstimate, check_num_players, coalition_keys, first_positions
from flsv.functional.shapley.one_seed import one_seed_stderr
from flsv.functional.shapley.size_effects import size_effects_shapley
from flsv.functional.shapley.surrogate import CONSTANT, PENALTIES, Kernel, gaussian, gram, kernel_shapley, membership
from flsv.utilities.declared import NonNegative, checked

Which = Literal[
    "auto", "singles", "pairs", "leave-one-out", "both", "pairs+leave-one-out", "pairs+leave-two-out", "all"
]
#: Up to so many players ``"auto"`` is all coalitions; from so many on, values are also those of a curve over the size.
MOST_FOR_ALL, CURVE_FROM = 7, 10
#: Up to so many, and from the curve on, ``"auto"`` has all but two: each of twelve players is in 78 coalitions then (of
#: seven, in all 64), each of twenty would be in 210.
MOST_FOR_TWO = 12

#: The parts of the Gaussian process.
PARTS: tuple[Kernel, ...] = (membership, gaussian(0.3))
#: The largest noise variance to fit, in units of a part's.
MOST_NOISE = 1.0


def default_design(num_players: int) -> Which:
    """Return the name of what ``"auto"`` is.

    Example:
        >>> [default_design(players) for players in (7, 8, 12, 13)]
        ['all', 'pairs+leave-one-out', 'pairs+leave-two-out', 'pairs+leave-one-out']
    """
    if num_players <= MOST_FOR_ALL:
        return "all"
    return "pairs+leave-two-out" if CURVE_FROM <= num_players <= MOST_FOR_TWO else "pairs+leave-one-out"


@checked
def few_coalitions(num_players: int, which: Which = "auto") -> Tensor:
    """List the coalitions to evaluate, bool ``[K, n]``: the empty and the grand coalition first.

    Args:
        num_players: n.
        which: ``"singles"``: each player alone, n + 2 in all. ``"pairs"``: each alone, and every two.
            ``"leave-one-out"``: all but one, n + 2 again. ``"both"``: each alone and all but one, 2 n + 2.
            ``"pairs+leave-one-out"``: these three. ``"pairs+leave-two-out"``: all but two as well; n^2 + n + 2.
            ``"all"``: all 2^n. ``"auto"``: all of up to seven players, ``"pairs+leave-two-out"`` of ten to twelve,
            ``"pairs+leave-one-out"`` of others.

    Raises:
        ConfigurationError: an unknown ``which``, or all coalitions of more than 22 players.

    Example:
        >>> few_coalitions(3, "singles").int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
        >>> [len(few_coalitions(5, which)) for which in ("singles", "pairs", "both", "all", "auto")]
        [7, 17, 12, 32, 32]
    """
    check_num_players(num_players)
    if which == "auto":
        which = default_design(num_players)
    masks = [torch.arange(2)[:, None].expand(2, num_players).bool()]
    one = torch.eye(num_players, dtype=torch.bool)
    if which not in ("leave-one-out", "all"):
        masks.append(one)
    first, second = torch.triu_indices(num_players, num_players, 1)
    pairs = one[first] | one[second]
    if which.startswith("pairs"):
        masks.append(pairs)
    if which in ("leave-one-out", "both", "pairs+leave-one-out", "pairs+leave-two-out"):
        masks.append(~one)
    if which == "pairs+leave-two-out":
        masks.append(~pairs)
    if which == "all":
        check_enumerable("few_coalitions", num_players, None, 'Ask for "both".')
        masks.append(all_coalitions(num_players))
    return _distinct(torch.cat(masks))


def _distinct(masks: Tensor) -> Tensor:
    """Keep each coalition once, where it comes first."""
    return masks[list(first_positions(coalition_keys(masks)).values())]


@checked
def few_coalitions_shapley(
    masks: Tensor,
    utilities: Tensor,
    noise: NonNegative | None = None,
) -> ShapleyEstimate:
    """Compute Shapley values from some coalitions' utilities, by the Gaussian process that fits them.

    From ten players on they are the mean of that and of a curve over the coalitions' size.

    Args:
        masks: bool ``[K, n]``, distinct, with the empty and the grand coalition, such as :func:`few_coalitions` lists.
        utilities: ``[K]`` or ``[K, M]``, a game per column.
        noise: standard deviation of a utility from one training to the next, in its unit, where it is known: the fit
            then leaves no less. None: by marginal likelihood, within the bound above.

    Returns:
        ``values`` and ``stderr``, float64 ``[n]`` or ``[n, M]``; ``evaluations`` K. ``stderr`` is of what the other
        coalitions leave open: 0 where there are none.

    Raises:
        ConfigurationError: noise below 0.
        ValueError: shapes that do not fit, utilities that are not finite, repeated coalitions, or no empty or grand
            one.

    Example:
        Ten coalitions of the 16 of a game that is the sum of gains and of an average. Exact are 0.5278, 1.1389, 1.75
        and 3.5833.

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
        exact = exact_shapley(lambda rows: torch.stack([table[tuple(row)] for row in rows.tolist()]), n).values
        exact = exact[:, 0] if flat else exact
        return ShapleyEstimate(exact, torch.zeros_like(exact), len(masks))
    solved = [_solve(masks.cpu(), column, noise) for column in columns.T]
    values, stderr = (torch.stack(part, dim=1) for part in zip(*solved))
    by_size = size_effects_shapley(masks.cpu(), columns) if n >= CURVE_FROM else None
    if by_size is not None:
        values = (values + by_size) / 2
    first, last = (int((masks.sum(1) == size).int().argmax()) for size in (0, n))
    values = values + (columns[last] - columns[first] - values.sum(0)) / n
    return ShapleyEstimate(values[:, 0] if flat else values, stderr[:, 0] if flat else stderr, len(masks))


def interval_over_seeds(values: Tensor, level: float = 0.9) -> Tensor:
    """Compute half the width of the interval of each player's mean over seeds, float64 ``[n]``.

    It is Student's t of the player's own values: players differ in how much they spread, so that a pooled spread would
    make some players' intervals too narrow.

    Args:
        values: ``[seeds, n]``, exact values by each seed; NaN of one seed, which does not tell it.
        level: of the interval.

    Raises:
        ValueError: another shape, a level that is not between 0 and 1.

    Example:
        >>> interval_over_seeds(torch.tensor([[1.0, 3.0], [1.0, 5.0]])).round(decimals=3)
        tensor([0.0000, 6.3140], dtype=torch.float64)
    """
    if values.ndim != 2 or not 0 < level < 1:
        raise ValueError(f"expected values [seeds, n] and a level in (0, 1), got {list(values.shape)} and {level}.")
    seeds = len(values)
    if seeds < 2:
        return torch.full((values.shape[1],), torch.nan, dtype=torch.float64)
    return t_quantile(level, seeds - 1) * values.double().std(0) / seeds**0.5


def retrained_shapley(masks: Tensor, utilities: Tensor, level: float = 0.9) -> tuple[Tensor, Tensor]:
    """Compute Shapley values of trainings with some seeds, and half the widths of their intervals, float64 ``[n]``.

    Of all 2^n coalitions of several seeds the width is by :func:`interval_over_seeds`; of fewer by
    :func:`few_coalitions_shapley`, to which the seeds tell the noise; of one seed by :func:`one_seed_stderr`.

    Args:
        masks: bool ``[K, n]``, as there.
        utilities: ``[seeds, K]``.
        level: of the intervals.

    Example:
        >>> masks = few_coalitions(2, "all")
        >>> retrained_shapley(masks, torch.tensor([[0.0, 5.0, 1.0, 2.0]]))
        (tensor([2., 3.], dtype=torch.float64), tensor([0.2056, 0.2056], dtype=torch.float64))
    """
    if len(utilities) == 1:
        found = few_coalitions_shapley(masks, utilities[0])
        return found.values, t_quantile(level) * one_seed_stderr(found.values, found.stderr)
    if len(masks) == 2 ** masks.shape[1]:
        by_seed = few_coalitions_shapley(masks, utilities.T).values.T
        return by_seed.mean(0), interval_over_seeds(by_seed, level)
    noise = float(utilities.var(0).mean().sqrt()) / len(utilities) ** 0.5
    found = few_coalitions_shapley(masks, utilities.mean(0), noise)
    return found.values, t_quantile(level) * found.stderr


def _solve(masks: Tensor, utilities: Tensor, noise: float | None) -> tuple[Tensor, Tensor]:
    """Compute posterior mean and standard deviation ``[n]`` of the fitted game's Shapley values."""
    n, mean, scale = masks.shape[1], utilities.mean(), float(utilities.std())
    if scale <= 1e-12 * (1 + abs(float(mean))):  # all coalitions are worth the same
        nothing = torch.zeros(n, dtype=torch.float64)
        return nothing, nothing
    y = (utilities - mean) / scale
    kernel = torch.full((len(masks), len(masks)), CONSTANT, dtype=torch.float64)  # whose own values are 0
    values, before = torch.zeros(len(masks), n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
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
    # A ridge penalty is the noise's variance in units of the signal's, which is a part's.
    enough = PENALTIES * signal * scale**2 >= (noise or 0.0) ** 2
    likely = enough & (PENALTIES <= MOST_NOISE)
    if likely.any():
        at = int(torch.where(likely, loss, torch.inf).argmin())
    else:  # the noise is known to be more
        at = int(enough.int().argmax()) if enough.any() else -1
    inverse = (vectors / shrunk[at]) @ vectors.T
    variance = signal[at] * (before - (values * (inverse @ values)).sum(0)).clamp_min(0)
    return scale * values.T @ inverse @ y, scale * variance.sqrt()


def prior_variance(kernel: Kernel, num_players: int) -> float:
    """Compute the variance of a player's Shapley value in a game drawn from a Gaussian process.

    It is the Shapley value of the game T -> (the player's Shapley value in the game S -> k(S, T)), which depends on T's
    size and the player's membership.

    Example:
        In a game with independent gains of variance 1, each player is worth its own gain.

        >>> round(prior_variance(membership, 5), 9)
        1.0
    """
    sizes = torch.arange(num_players + 1)
    first = sizes[:, None] > torch.arange(num_players)  # player 0 is in, then 1, and so on
    inside = kernel_shapley(kernel, first)[1:, 0]  # of player 0, by |T| from 1
    outside = kernel_shapley(kernel, first)[:-1, -1]  # of the last player, by |T| up to n - 1
    return float((inside - outside).mean())


def _check(masks: Tensor, columns: Tensor) -> None:
    """Raise unless masks and utilities fit, are distinct and finite, and include the empty and the grand coalition."""
    if masks.dtype != torch.bool or masks.ndim != 2 or columns.ndim != 2 or len(masks) != len(columns):
        raise ValueError(
            f"expected masks bool [K, n] and utilities [K] or [K, M], got {masks.dtype} {list(masks.shape)} and "
            f"{list(columns.shape)}."
        )
    if len(masks.unique(dim=0)) < len(masks):
        raise ValueError("a coalition is there twice: average what it came to first.")
    if not {0, masks.shape[1]} <= set(masks.sum(1).tolist()):
        raise ValueError("the empty coalition and that of everybody must be among the masks.")
    if not columns.isfinite().all():
        raise ValueError(f"the utility of coalitions {masks[~columns.isfinite().all(1)].int().tolist()} is not finite.")
