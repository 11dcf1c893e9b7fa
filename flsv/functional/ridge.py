r"""Ridge regression from sums over samples: a coalition's fit takes the sum of its members' statistics and one solve.

Let the m samples of a client have features in the rows of Phi ``[m, r + 1]``, whose last column is 1, and targets in
the rows of Y ``[m, M]``; for M classes, 1 at the sample's class and 0 elsewhere. The ridge fit of the pooled samples of
a coalition S (Hoerl and Kennard 1970), whose intercept is not penalized, is

.. math:: W_S = \Bigl(\sum_{i \in S} \Phi_i^T \Phi_i + \lambda D\Bigr)^{-1} \sum_{i \in S} \Phi_i^T Y_i,

where D is the identity with a 0 at the intercept. Only the two sums depend on the clients' samples.
"""

from __future__ import annotations

import torch
from torch import Tensor


def principal_axes(x: Tensor, components: int) -> tuple[Tensor, Tensor]:
    """Compute the first principal axes of samples, scaled so that the projected samples have a total variance of 1.

    The same ridge penalty then suits samples of any scale.

    Args:
        x: ``[m, d]``, the samples.
        components: the largest number of axes. Axes without variance are left out.

    Returns:
        The samples' mean, float64 ``[d]``, and r axes, float64 ``[r, d]``: ``(x - mean) @ axes.T`` are the features.

    Example:
        >>> x = torch.tensor([[0.0, 1.0], [4.0, 1.0], [2.0, 1.0]])
        >>> mean, axes = principal_axes(x, components=2)
        >>> ((x - mean) @ axes.T).flatten().abs()
        tensor([1.2247, 1.2247, 0.0000], dtype=torch.float64)
    """
    x = x.double()
    mean = x.mean(0)
    _, lengths, axes = torch.linalg.svd(x - mean, full_matrices=False)
    kept = int((lengths[:components] > 1e-6 * lengths.max().clamp_min(1e-12)).sum()) if len(lengths) else 0
    scale = len(x) ** 0.5 / lengths[:kept].norm() if kept else 1.0
    return mean, axes[:kept] * scale


def ridge_statistics(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the two sums over samples from which :func:`ridge_weights` fits a regression.

    Samples with a feature or target that is not finite are left out.

    Args:
        features: ``[m, r]``, the samples' features, without the constant.
        targets: ``[m, M]``, the samples' targets y.

    Returns:
        With phi a sample's r features followed by 1: the sum of phi phi^T, float64 ``[r + 1, r + 1]``, whose last entry
        is the number of samples; and the sum of phi y^T, float64 ``[r + 1, M]``.

    Example:
        >>> ridge_statistics(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]]))
        (tensor([[10.,  4.],
                [ 4.,  2.]], dtype=torch.float64), tensor([[14.],
                [ 6.]], dtype=torch.float64))
    """
    finite = features.isfinite().all(1) & targets.isfinite().all(1)
    phi, y = with_constant(features[finite].double()), targets[finite].double()
    return phi.T @ phi, phi.T @ y


def with_constant(features: Tensor) -> Tensor:
    """Append a column of ones to features ``[m, r]``."""
    return torch.cat([features, features.new_ones(len(features), 1)], 1)


def ridge_weights(gram: Tensor, moments: Tensor, penalty: float) -> Tensor:
    """Fit K ridge regressions, one for each of K sets of samples, from the sums of :func:`ridge_statistics`.

    Args:
        gram: float64 ``[K, r + 1, r + 1]``, each set's sum of phi phi^T.
        moments: float64 ``[K, r + 1, M]``, each set's sum of phi y^T.
        penalty: lambda, above 0; the intercept, the last of the r + 1 weights, is not penalized.

    Returns:
        The weights, float64 ``[K, r + 1, M]``; 0 for a set without samples.

    Example:
        >>> gram, moments = ridge_statistics(torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [4.0]]))
        >>> ridge_weights(gram[None], moments[None], penalty=2.0).flatten()
        tensor([0.5000, 2.0000], dtype=torch.float64)
    """
    diagonal = torch.full(gram.shape[:2], float(penalty), dtype=gram.dtype)
    diagonal[:, -1] = (gram[:, -1, -1] == 0).to(gram.dtype)  # without samples the matrix would be singular
    return torch.linalg.solve(gram + torch.diag_embed(diagonal), moments)
