"""Shapley values from a few coalitions: which coalitions to evaluate, and a Gaussian process fitted to them.

Retraining a federation for every coalition of its n clients costs 2^n trainings. :func:`few_coalitions` lists far fewer
coalitions, and :func:`few_coalitions_shapley` estimates the Shapley values from their utilities. With all 2^n
coalitions the values of these trainings are exact. They still differ from seed to seed, see
:func:`flsv.functional.interval_over_seeds`, and :mod:`flsv.functional.intervals` for a single seed.

**The fit** is the surrogate of :mod:`flsv.functional.shapley.surrogate` with a fixed kernel, the sum of

- the inner product of membership vectors, for additive games.
- a Gaussian kernel of squared width 0.3 on the vectors z / |S| with which a coalition S averages its members' models
  (z_i: membership of player i), so that coalitions with similar averages have similar utilities.

The Shapley value is linear in the game, so that the value of the fitted game and its variance have a closed form. Let
L_i g be the Shapley value of player i in the game g, k the kernel, X the evaluated coalitions, U their utilities, K the
matrix k(X, X) with the noise variance added to its diagonal, and v the prior variance of L_i g
(:func:`prior_variance`). Then

    E[L_i g | U] = L_i k(., X) K^-1 U,        Var(L_i g | U) = v - L_i k(., X) K^-1 k(X, .) L_i'.

The difference between the sum of the fitted values and U(grand) - U(empty) is divided equally among the players.

**Signal and noise variance** maximize the marginal likelihood, with the noise variance at most the variance of one part
of the kernel. Without this bound, the likelihood of so few coalitions can be largest if all variance is noise.
The true noise is far smaller, 1 to 15 % of the variance between coalitions (``docs/results/intervals_digits.csv``).

**Standard errors** measure the uncertainty from coalitions that were not evaluated. This is flsv's own method.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flsv.functional.shapley.exact import all_coalitions, check_enumerable, shapley_of_table
from flsv.functional.shapley.game import (
    ShapleyEstimate,
    check_num_players,
    coalition_keys,
    first_positions,
)
from flsv.functional.shapley.kernels import Kernel, gaussian, gram, kernel_shapley, membership
from flsv.functional.shapley.surrogate import CONSTANT_VARIANCE, PENALTIES, TINY
from flsv.utilities.choices import Which as Which
from flsv.utilities.declared import NonNegative, checked

#: The sizes of the coalitions of each design but for ``"all"``. Below 0: of all players without so many.
SIZES_OF_DESIGNS: Mapping[Which, Sequence[int]] = {
    "singles": [1],
    "pairs": [1, 2],
    "leave-one-out": [-1],
    "both": [1, -1],
    "auto": [1, -1],
    "pairs+leave-one-out": [1, 2, -1],
    "pairs+leave-two-out": [1, 2, -1, -2],
}
#: The parts whose sum is the kernel of the Gaussian process.
KERNEL_PARTS: tuple[Kernel, ...] = (membership, gaussian(0.3))
#: The largest ridge penalty to fit, if the noise allows it: a noise variance in units of the variance of one part of
#: the kernel.
MAX_LIKELY_PENALTY = 1.0


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
    empty_and_grand = torch.zeros(2, num_players, dtype=torch.bool)
    empty_and_grand[1] = True
    if which == "all":
        check_enumerable("few_coalitions", num_players, alternatives='Set which="both".')
        parts = [all_coalitions(num_players)]
    else:
        parts = [_coalitions_of_size(num_players, size) for size in SIZES_OF_DESIGNS[which]]
    with_duplicates = torch.cat([empty_and_grand, *parts])
    position_of_key = first_positions(coalition_keys(with_duplicates))
    return with_duplicates[list(position_of_key.values())]


def sizes_of_design(num_players: int, which: Which) -> set[int]:
    """Return the sizes of the coalitions of a design, each of which it has completely.

    Example:
        >>> sizes_of_design(5, "both"), sizes_of_design(2, "both"), sizes_of_design(4, "all")
        ({1, 4}, {1}, {1, 2, 3})
    """
    sizes = {size % num_players for size in SIZES_OF_DESIGNS.get(which, range(num_players))}
    return sizes - {0}


def _coalitions_of_size(num_players: int, size: int) -> Tensor:
    """Return all coalitions of a size of :data:`SIZES_OF_DESIGNS`."""
    singles = torch.eye(num_players, dtype=torch.bool)
    if abs(size) == 1:
        coalitions = singles
    else:
        low_players, high_players = torch.triu_indices(num_players, num_players, offset=1)
        coalitions = singles[low_players] | singles[high_players]
    return coalitions if size > 0 else ~coalitions


@checked
def few_coalitions_shapley(
    masks: Tensor,
    utilities: Tensor,
    noise: NonNegative | None = None,
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
    utilities = torch.as_tensor(utilities).detach()
    utilities = utilities.cpu().double()
    is_one_game = utilities.ndim == 1
    if is_one_game:
        utilities = utilities[:, None]
    _check_coalitions(masks, utilities)

    if len(masks) == 2 ** masks.shape[1]:
        values = _exact_values(masks, utilities)
        stderr = torch.zeros_like(values)
    else:
        values, stderr = _fitted_values(masks, utilities, noise)
    if is_one_game:
        values = values[:, 0]
        stderr = stderr[:, 0]
    return ShapleyEstimate(values, stderr, len(masks))


def _exact_values(masks: Tensor, utilities: Tensor) -> Tensor:
    """Compute Shapley values ``[n, M]`` from the utilities ``[2^n, M]`` of all coalitions, in any order."""
    # In a table of all coalitions, bit i of a coalition's number says whether player i is a member.
    bits = 1 << torch.arange(masks.shape[1])
    numbers = (masks.cpu() * bits).sum(1)
    table = utilities[numbers.argsort()]
    return shapley_of_table(table)


def _fitted_values(
    masks: Tensor,
    utilities: Tensor,
    noise: float | None,
) -> tuple[Tensor, Tensor]:
    """Fit a Gaussian process per game. Return Shapley values and standard errors, ``[n, M]``."""
    num_players = masks.shape[1]
    values_by_game = []
    stderr_by_game = []
    for game_utilities in utilities.T:
        game_values, game_stderr = _fit_game(masks.cpu(), game_utilities, noise)
        values_by_game.append(game_values)
        stderr_by_game.append(game_stderr)
    values = torch.stack(values_by_game, dim=1)
    stderr = torch.stack(stderr_by_game, dim=1)

    # The gap between the sum of the values and what it should be is divided equally.
    sizes = masks.sum(1)
    empty_row = int(sizes.argmin())
    grand_row = int(sizes.argmax())
    sum_of_values = utilities[grand_row] - utilities[empty_row]
    gap = sum_of_values - values.sum(0)
    return values + gap / num_players, stderr


def _fit_game(
    masks: Tensor,
    utilities: Tensor,
    noise: float | None,
) -> tuple[Tensor, Tensor]:
    """Fit the Gaussian process to one game. Return the Shapley values and their standard errors, ``[n]`` each."""
    mean = utilities.mean()
    scale = float(utilities.std())
    if scale <= TINY * (1 + abs(float(mean))):  # all coalitions have the same utility
        zeros = torch.zeros(masks.shape[1], dtype=torch.float64)
        return zeros, zeros

    kernel, kernel_values, prior_variances = _kernel_of_parts(masks)  # [K, K], [K, n], [n]
    standardized = (utilities - mean) / scale
    min_noise = (noise or 0.0) / scale
    inverse, signal = _most_likely_inverse(kernel, standardized, min_noise)

    # The Gaussian process's posterior mean and standard deviation of each player's value.
    explained = (kernel_values * (inverse @ kernel_values)).sum(0)
    unexplained = (prior_variances - explained).clamp_min(0)
    values = scale * kernel_values.T @ inverse @ standardized
    return values, scale * (signal * unexplained).sqrt()


def _most_likely_inverse(
    kernel: Tensor,
    utilities: Tensor,
    min_noise: float,
) -> tuple[Tensor, Tensor]:
    """Return the inverse ``[K, K]`` of the kernel plus the most likely ridge penalty, and the signal variance."""
    # Marginal likelihood in the kernel's eigenvectors, a row for each ridge penalty. A penalty is the noise variance in
    # units of the signal variance, which is the variance of one part.
    eigenvalues, eigenvectors = torch.linalg.eigh(kernel)
    spectra = eigenvalues.clamp_min(0) + PENALTIES[:, None]  # [penalties, K]
    power = (eigenvectors.T @ utilities).square()
    signals = (power / spectra).mean(1).clamp_min(TINY)
    losses = signals.log() + spectra.log().mean(1)
    has_enough_noise = PENALTIES * signals >= min_noise**2
    best_penalty = _index_of_best_penalty(losses, has_enough_noise)
    inverse = (eigenvectors / spectra[best_penalty]) @ eigenvectors.T
    return inverse, signals[best_penalty]


def _kernel_of_parts(masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the kernel matrix ``[K, K]``, the Shapley values ``[K, n]`` of its rows, and the values' prior variance
    ``[n]``."""
    # The sum starts with a constant part, which has no Shapley values.
    num_coalitions, num_players = masks.shape
    kernel = torch.full((num_coalitions, num_coalitions), CONSTANT_VARIANCE).double()
    values = torch.zeros(num_coalitions, num_players).double()
    prior_variances = torch.zeros(num_players).double()
    for part in KERNEL_PARTS:
        matrix = gram(part, masks, masks)
        # Each part has unit variance over the coalitions, as in surrogate_shapley.
        variance = matrix.diagonal().mean() - matrix.mean()
        weight = 1 / float(variance.clamp_min(TINY))
        kernel += weight * matrix
        values += weight * kernel_shapley(part, masks)
        prior_variances += weight * prior_variance(part, num_players)
    return kernel, values, prior_variances


def _index_of_best_penalty(loss: Tensor, has_enough_noise: Tensor) -> int:
    """Return the index of the best penalty with enough noise, at most the largest likely one."""
    is_likely = has_enough_noise & (PENALTIES <= MAX_LIKELY_PENALTY)
    if is_likely.any():
        likely_loss = loss.where(is_likely, torch.inf)
        return int(likely_loss.argmin())
    if has_enough_noise.any():  # only larger penalties have enough noise
        smallest_enough = has_enough_noise.int().argmax()
        return int(smallest_enough)
    return len(PENALTIES) - 1  # the index of the largest penalty


def prior_variance(kernel: Kernel, num_players: int) -> float:
    """Compute the variance of a player's Shapley value in a game drawn from a Gaussian process."""
    # Let phi(T) be a player's value in the game S -> k(S, T). It depends only on the size of T and on whether the
    # player is in T, so that one coalition T of each size is enough.
    sizes = torch.arange(num_players + 1)
    players = torch.arange(num_players)
    coalitions = players < sizes[:, None]  # [n + 1, n]: players 0 to s - 1 in row s
    values = kernel_shapley(kernel, coalitions)  # [n + 1, n]: phi of each player

    # The variance is a player's value in the game T -> phi(T): the mean over sizes of phi(T with the player) - phi(T
    # without the player). The first player is in all these T except the empty one, the last player only in the largest.
    phi_with_player = values[1:, 0]  # sizes 1 to n
    phi_without_player = values[:-1, -1]  # sizes 0 to n - 1
    return float((phi_with_player - phi_without_player).mean())


def _check_coalitions(masks: Tensor, utilities: Tensor) -> None:
    """Check the masks and utilities, and that the empty and the grand coalition are included."""
    are_masks = masks.dtype == torch.bool and masks.ndim == 2
    are_utilities = utilities.ndim == 2 and len(utilities) == len(masks)
    if not are_masks or not are_utilities:
        raise ValueError(
            f"expected masks bool [K, n] and utilities of K coalitions, got {masks.dtype} {list(masks.shape)} and "
            f"{list(utilities.shape)}."
        )
    _check_required_coalitions(masks)
    is_finite = utilities.isfinite().all(1)
    if not is_finite.all():
        raise ValueError(
            f"the utility of coalitions {masks[~is_finite].int().tolist()} is not finite."
        )


def _check_required_coalitions(masks: Tensor) -> None:
    if len(masks.unique(dim=0)) < len(masks):
        raise ValueError(
            "a coalition occurs twice in the masks. Average its utilities before the call."
        )
    sizes = masks.sum(1).tolist()
    if 0 not in sizes or masks.shape[1] not in sizes:
        raise ValueError(
            "the empty or the grand coalition is missing in the masks. Evaluate it, too."
        )
