"""KernelSHAP of given coalitions: the additive game that is closest to them.

Lundberg and Lee, "A Unified Approach to Interpreting Model Predictions", NeurIPS 2017, theorem 2. The Shapley values
solve, over all coalitions S but nobody and everybody, with the weights of the Shapley kernel,

    min_phi sum_S w(S) [U(S) - U(empty) - sum_{i in S} phi_i]^2    s.t.  sum_i phi_i = U(N) - U(empty),
    w(S) = (n - 1) / (binom(n, |S|) |S| (n - |S|)).

Here the sum is over those coalitions that are given. ``regression_shapley`` draws its coalitions itself, in pairs, and
has a standard error; with coalitions that nobody has drawn there is none. It assumes nothing of the game, not even that
close coalitions are worth about the same, and so it is what a fit that does assume is compared with.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kernel_shap(masks: Tensor, utilities: Tensor) -> Tensor:
    """KernelSHAP's values of some coalitions' utilities.

    Args:
        masks: bool ``[K, n]``, distinct, nobody and everybody among them.
        utilities: ``[K]``.

    Returns:
        Float64 ``[n]``; they sum to U(everybody) - U(nobody). The least squares' solution closest to equal values where
        the coalitions leave more than one.

    Raises:
        ValueError: no nobody or everybody, or shapes that do not fit.

    Example:
        With each player alone and everybody but one it is the mean of both marginal contributions, all of them moved by
        as much as lets them add up. With all coalitions it is the Shapley value.

        >>> from flsv.functional import few_coalitions
        >>> few_coalitions(3).int().tolist()
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 1, 1], [1, 0, 1], [1, 1, 0]]
        >>> kernel_shap(few_coalitions(3), torch.tensor([0.0, 9, 1, 2, 3, 6, 5, 4])).round(decimals=6)
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
    centred = masks.cpu()[inside].double() - share[:, None]  # values minus their mean sum to 0
    right = worth[inside] - empty - gain * share
    return gain / n + torch.linalg.pinv(root[:, None] * centred) @ (root * right)
