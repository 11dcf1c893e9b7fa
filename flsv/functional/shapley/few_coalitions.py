"""Shapley values from a handful of coalitions: a regression on membership and on shares of an average.

Training a federation again for every coalition costs 2^n trainings. This asks for n + 2 of them (nobody, everybody,
each player alone) or 2 n + 2 (everybody but one, besides) and fits to what they came to

    U(S) = c + sum_i z_i a_i + sum_i (z_i / |S|) b_i,

z_i the membership of player i. The first part is what a player adds; the second is what an average of models does, in
which a player's share shrinks as others join. The Shapley value is linear in the game, so that of the fitted game is
exact:

    SV_i = a_i + (H_n / n) b_i - (H_n - 1) / (n (n - 1)) sum_{j != i} b_j,      H_n = 1 + 1/2 + ... + 1/n,

(``v_j(S) = z_j / |S|`` gives j itself H_n / n and takes (H_n - 1) / (n (n - 1)) from each other). What the fit leaves
of U(everybody) - U(nobody) is dealt out equally, so that the values add up to it. Where all 2^n coalitions are known,
nothing is fitted: the values are exact.

This is no paper's method. It is Bayesian linear regression (MacKay, "Bayesian Interpolation", Neural Computation 4(3),
1992): a and b have a common prior variance each, scaled as in ``surrogate_shapley``, noise and signal are set by
marginal likelihood. The standard errors are the posterior's: what these coalitions leave open *if the game is of this
form*. A game that is not, such as one in which two players are worth something together only, is outside of them.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.functional.shapley.estimate import ShapleyEstimate
from flsv.functional.shapley.exact import exact_shapley
from flsv.functional.shapley.game import check_num_players

Which = Literal["singles", "leave-one-out", "both", "all"]

_PENALTIES = 10.0 ** torch.arange(-8, 2.5, 0.5, dtype=torch.float64)
_CONSTANT = 100.0  # prior variance of c, in units of the utilities' variance: vague


def few_coalitions(num_players: int, which: Which = "both") -> Tensor:
    """The coalitions to ask for, bool ``[K, n]``: nobody and everybody first.

    Args:
        num_players: n.
        which: ``"singles"``: each player alone, n + 2 in all. ``"leave-one-out"``: everybody but one, likewise.
            ``"both"``: 2 n + 2. ``"all"``: all 2^n.

    Raises:
        ConfigurationError: something else.

    Example:
        >>> few_coalitions(3, "singles").int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1]]
        >>> len(few_coalitions(3)), len(few_coalitions(3, "all"))
        (8, 8)
    """
    check_num_players(num_players)
    if which not in ("singles", "leave-one-out", "both", "all"):
        raise ConfigurationError(f"which={which!r}: expected singles, leave-one-out, both or all.")
    ends = torch.arange(2)[:, None].expand(2, num_players).bool()
    one = torch.eye(num_players, dtype=torch.bool)
    parts = {"singles": [one], "leave-one-out": [~one], "both": [one, ~one]}
    if which == "all":
        numbers = torch.arange(2**num_players)
        parts["all"] = [(numbers[:, None] >> torch.arange(num_players) & 1).bool()]
    masks = torch.cat([ends, *parts[which]])
    first = {tuple(mask): place for place, mask in reversed(list(enumerate(masks.tolist())))}
    return masks[sorted(first.values())]


def few_coalitions_shapley(masks: Tensor, utilities: Tensor, noise: float | None = None) -> ShapleyEstimate:
    """Shapley values of the regression that fits some coalitions' utilities.

    Args:
        masks: bool ``[K, n]``, distinct, nobody and everybody among them, such as :func:`few_coalitions` gives.
        utilities: ``[K]`` or ``[K, M]``, a game per column.
        noise: standard deviation of a utility from one training to the next, in its unit, where it is known: the fit
            then leaves no less. None: by marginal likelihood.

    Returns:
        ``values`` and ``stderr``, float64 ``[n]`` or ``[n, M]``; ``evaluations`` K.

    Raises:
        ValueError: shapes that do not fit, utilities that are not finite, coalitions twice, or no nobody or everybody.

    Example:
        A game of this form is known from 2 n + 2 coalitions:

        >>> masks = few_coalitions(4)
        >>> gains = torch.tensor([1.0, 2, 3, 6]).double()
        >>> utilities = masks.double() @ gains / masks.sum(1).clamp_min(1) + masks.sum(1)
        >>> few_coalitions_shapley(masks, utilities).values
        tensor([0.5278, 1.1389, 1.7500, 3.5833], dtype=torch.float64)
    """
    columns = torch.as_tensor(utilities).detach().cpu().double()
    flat = columns.ndim == 1
    columns = columns[:, None] if flat else columns
    _check(masks, columns)
    n = masks.shape[1]
    if len(masks) == 2**n:
        table = dict(zip(map(tuple, masks.tolist()), columns))
        known = exact_shapley(lambda rows: torch.stack([table[tuple(row)] for row in rows.tolist()]), n)
        exact, spread = (part[:, 0] if flat else part for part in (known.values, known.stderr))
        return ShapleyEstimate(exact, spread, len(masks))
    solved = [_solve(masks.cpu(), column, noise) for column in columns.T]
    values, stderr = (torch.stack(part, dim=1) for part in zip(*solved))
    first, last = (int((masks.sum(1) == size).int().argmax()) for size in (0, n))
    values = values + (columns[last] - columns[first] - values.sum(0)) / n
    return ShapleyEstimate(values[:, 0] if flat else values, stderr[:, 0] if flat else stderr, len(masks))


def _features(masks: Tensor) -> tuple[Tensor, Tensor]:
    """``[K, 2 n]``, membership and shares, and their Shapley values ``[n, 2 n]``."""
    z, n = masks.double(), masks.shape[1]
    shares = z / z.sum(1, keepdim=True).clamp_min(1)
    harmonic = float((1 / torch.arange(1, n + 1, dtype=torch.float64)).sum())
    own, other = harmonic / n, -(harmonic - 1) / (n * max(n - 1, 1))
    eye = torch.eye(n, dtype=torch.float64)
    return torch.cat([z, shares], 1), torch.cat([eye, other * (1 - eye) + own * eye], 1)


def _solve(masks: Tensor, utilities: Tensor, noise: float | None) -> tuple[Tensor, Tensor]:
    """Posterior mean and standard deviation ``[n]`` of the fitted game's Shapley values."""
    features, shapley = _features(masks)
    n, mean, scale = masks.shape[1], utilities.mean(), float(utilities.std())
    if scale <= 1e-12 * (1 + abs(float(mean))):  # all coalitions are worth the same
        nothing = torch.zeros(n, dtype=torch.float64)
        return nothing, nothing
    y = (utilities - mean) / scale
    # Each part's kernel has unit variance over the coalitions, as in surrogate_shapley.
    prior = torch.ones(2 * n, dtype=torch.float64)
    for part in (slice(0, n), slice(n, 2 * n)):
        gram = features[:, part] @ features[:, part].T
        prior[part] = 1 / (gram.diagonal().mean() - gram.mean()).clamp_min(1e-12)
    kernel = (features * prior) @ features.T + _CONSTANT
    eigenvalues, vectors = torch.linalg.eigh(kernel)
    penalties = _PENALTIES
    shrunk = eigenvalues.clamp_min(0)[None] + penalties[:, None]
    signal = ((vectors.T @ y).square()[None] / shrunk).mean(1).clamp_min(1e-12)
    loss = signal.log() + shrunk.log().mean(1)
    if noise is not None:
        # A ridge penalty is the noise's variance in units of the signal's.
        loss = torch.where(penalties * signal * scale**2 >= noise**2, loss, torch.inf)
        loss[-1] = loss[-1].nan_to_num(posinf=torch.finfo(torch.float64).max)
    at = int(loss.argmin())
    inverse = (vectors / shrunk[at]) @ vectors.T
    weights = prior[:, None] * features.T @ inverse  # [2n, K]
    coefficients = weights @ y
    posterior = torch.diag(prior) - weights @ (features * prior)
    variance = signal[at] * (shapley @ posterior * shapley).sum(1).clamp_min(0)
    return scale * shapley @ coefficients, scale * variance.sqrt()


def _check(masks: Tensor, columns: Tensor) -> None:
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
