"""KernelSHAP: Shapley values by weighted least squares, on sampled coalitions and on given coalitions.

Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017, theorem 2; Covert and Lee,
AISTATS 2021. The Shapley values phi_i of the game U of n players N solve a weighted least-squares problem over all
coalitions S,

    min_phi sum_{0<|S|<n} w(S) [U(S) - U(empty) - sum_{i in S} phi_i]^2    s.t.  sum_i phi_i = V := U(N) - U(empty),
    w(S) = (n - 1) / (binom(n, |S|) |S| (n - |S|)).
"""

from __future__ import annotations

import math

import torch
from torch import Generator, Tensor

from flsv.functional.shapley.game import ShapleyEstimate, Utility
from flsv.functional.shapley.layers import Layer, LayeredSample, estimate_in_stages, layer_variance
from flsv.functional.shapley.memoized_game import MemoizedGame


def centered(layer: Layer) -> Tensor:
    """Return the membership vectors of a layer's m drawn coalitions minus s/n, with s their size: float64 ``[m, n]``,
    each row of which sums to 0."""
    return layer.masks.to(torch.float64) - layer.size / layer.masks.shape[1]


def kernel_share(layer: Layer) -> float:
    """Compute a layer's total weight in the Shapley kernel w, divided by n - 1.

    The weight is 1 / (s (n - s)) for coalitions of size s among n players, twice that for a layer of two sizes.
    """
    return layer.sizes / (layer.size * (layer.masks.shape[1] - layer.size))


def kernel_regression(game: MemoizedGame, sample: LayeredSample) -> tuple[Tensor, Tensor]:
    r"""Solve KernelSHAP's least-squares problem on a sample of complementary pairs.

    Let N be the n players, V = U(N) - U(empty) the gain to divide, and phi_i = V/n + psi_i the Shapley values, with
    sum_i psi_i = 0. A coalition S of size s with membership vector z and its complement determine one equation,

        ((U(S) - U(N \ S)) - V (2s - n)/n) / 2  =  sum_i (z_i - s/n) psi_i + error.

    The part of the game that is equal for a coalition and its complement cancels, and with it all interactions of two
    players. This makes pairs far better than single coalitions.

    Departures from KernelSHAP: coalitions are drawn without replacement, size by size (see
    :mod:`flsv.functional.shapley.layers`). And each layer has exactly its weight in the Shapley kernel
    (:func:`kernel_share`), whatever its number of pairs, which removes the sampling noise of the sizes. The estimate is
    consistent but not unbiased, since it is a ratio of two unbiased estimates (with m pairs the bias is of order 1/m);
    for an additive game it is exact. The standard error is the sandwich estimate, with residuals divided by one minus
    their leverage, and with the finite-population correction of each layer.

    Args:
        game: the memoized game.
        sample: a sample of complementary pairs.

    Returns:
        Values and standard errors, both ``[n, M]``.
    """
    num_players = sample.num_players
    empty, grand = game.empty_and_grand()
    gain = grand - empty
    # The constant matrix makes the sum regular, and leaves solutions that sum to 0 as they are.
    matrix = torch.full((num_players, num_players), 1 / num_players, dtype=torch.float64)
    right = torch.zeros(num_players, len(gain), dtype=torch.float64)
    rows: list[tuple[Layer, Tensor, Tensor, float]] = []
    for layer in sample.layers:
        x, weight = centered(layer), kernel_share(layer) / len(layer.masks)
        y = (game(layer.masks) - game(~layer.masks) - gain * (2 * layer.size / num_players - 1)) / 2
        matrix = matrix + weight * x.T @ x
        right = right + weight * x.T @ y
        rows.append((layer, x, y, weight))
    psi = torch.linalg.solve(matrix, right)
    variance = torch.zeros_like(psi)
    for layer, x, y, weight in rows:
        directions = torch.linalg.solve(matrix, x.T).T
        leverage = (weight * (x * directions).sum(dim=1)).clamp_max(0.9)
        residuals = (y - x @ psi) / (1 - leverage).unsqueeze(1)
        influences = weight * directions.unsqueeze(-1) * residuals.unsqueeze(1)
        variance = variance + layer_variance(layer, influences - influences.mean(dim=0))
    return gain / num_players + psi, variance.sqrt()


def regression_shapley(
    utility: Utility,
    num_players: int,
    *,
    budget: int | None = None,
    generator: Generator | None = None,
    target_stderr: float | None = None,
) -> ShapleyEstimate:
    """Estimate Shapley values by KernelSHAP on complementary pairs drawn without replacement.

    Args:
        utility: the game: a function from K coalitions (masks, bool ``[K, n]``) to their utilities, float ``[K]``, or
            ``[K, M]`` for M games at once.
        num_players: the number n of players.
        budget: largest number of distinct evaluations; None: 50 n, or 2^n with ``target_stderr``. The minimum is all
            coalitions of size 1 and n - 1 and two pairs of every other size, 4 n - 2 for even n and 4 n - 4 for odd n.
        generator: the random generator that draws the coalitions; None: torch's default.
        target_stderr: stop once every standard error is at most this number, in the utility's unit; None: no target.

    Returns:
        The estimate: ``values`` and ``stderr``, ``[n]`` or ``[n, M]``. The values are exact, with stderr 0, if the
        budget suffices for all coalitions, unless ``target_stderr`` is reached before.

    Raises:
        ConfigurationError: the budget is below the minimum, which the message names; ``target_stderr`` is not above 0;
            or there is no player.
        ValueError: a utility is NaN or infinite, or ``utility`` returns a wrong shape.

    Example:
        >>> additive = lambda masks: masks.double() @ torch.arange(12.0, dtype=torch.float64)
        >>> regression_shapley(additive, 12, budget=60, generator=torch.Generator().manual_seed(0)).values[:3].round()
        tensor([0., 1., 2.], dtype=torch.float64)
    """
    sample = LayeredSample(num_players, paired=True, generator=generator)
    return estimate_in_stages("regression_shapley", utility, sample, budget, target_stderr, kernel_regression)


def kernel_shap(masks: Tensor, utilities: Tensor) -> Tensor:
    """Compute KernelSHAP's values from the utilities of given coalitions.

    KernelSHAP's sum over all coalitions is replaced by the sum over the given coalitions: the result is the additive
    game closest to their utilities. This assumes nothing about the game, not even that similar coalitions have similar
    utilities, and is a baseline for fits that do. There is no standard error, since the coalitions are not drawn at
    random; :func:`regression_shapley` draws them and has one.

    Args:
        masks: the K coalitions, bool ``[K, n]``, distinct, the empty and the grand coalition among them.
        utilities: the coalitions' utilities, ``[K]``.

    Returns:
        float64 ``[n]``, which sums to the utility of the grand coalition minus that of the empty one. If several
        solutions fit the coalitions equally well, it is the solution closest to equal values.

    Raises:
        ValueError: the empty or the grand coalition is missing, or the shapes do not fit.

    Example:
        With the coalitions of one player and of all but one, a value is the mean of the player's two marginal
        contributions, shifted so that the values sum to the utility of all players minus that of none. With all
        coalitions the values are the Shapley values.

        >>> from flsv.functional import few_coalitions
        >>> few_coalitions(3, "both").int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]]
        >>> kernel_shap(few_coalitions(3, "both"), torch.tensor([0.0, 9, 1, 2, 3, 6, 5, 4])).round(decimals=6)
        tensor([2., 3., 4.], dtype=torch.float64)
    """
    worth, sizes, n = torch.as_tensor(utilities).detach().cpu().double(), masks.sum(1).cpu(), masks.shape[1]
    if worth.shape != sizes.shape or not {0, n} <= set(sizes.tolist()):
        raise ValueError(
            f"expected utilities [{len(masks)}] of as many coalitions, nobody and everybody among them; got "
            f"{list(worth.shape)} and sizes {sorted(set(sizes.tolist()))} of {n}."
        )
    empty, gain = worth[sizes == 0][0], worth[sizes == n][0] - worth[sizes == 0][0]
    inside = (sizes > 0) & (sizes < n)
    share = sizes[inside].double() / n
    root = torch.tensor([((n - 1) / (math.comb(n, s) * s * (n - s))) ** 0.5 for s in sizes[inside].tolist()]).double()
    centered = masks.cpu()[inside].double() - share[:, None]  # values minus their mean sum to 0
    right = worth[inside] - empty - gain * share
    return gain / n + torch.linalg.pinv(root[:, None] * centered) @ (root * right)
