"""Lower confidence bounds of means over rounds."""

from __future__ import annotations

import torch
from scipy.special import ndtri, stdtrit
from torch import Tensor

from flsv.arguments import check_number


def lower_bound(
    count: Tensor, mean: Tensor, squares: Tensor, stderr: Tensor | None = None, confidence: float = 0.9
) -> Tensor:
    r"""One-sided lower confidence bound of the mean of a few independent values.

    .. math:: \bar x - t_{c-1}(\text{confidence})\, s / \sqrt c, \qquad s^2 = \frac1{c-1} \sum (x - \bar x)^2

    with Student's t for c values. A single value has no spread: of it its own standard error is taken off, times the
    normal quantile.

    Args:
        count: ``[...]`` whole numbers, c; where it is 0 the bound is NaN.
        mean: ``[...]``.
        squares: ``[...]``, the sum of the squared deviations from the mean.
        stderr: ``[...]``, of single values; NaN and None count as 0.
        confidence: in [0.5, 1).

    Returns:
        float64 ``[...]``.

    Raises:
        ConfigurationError: confidence outside [0.5, 1).

    Example:
        >>> two_rounds = torch.tensor([2]), torch.tensor([0.5]), torch.tensor([0.02])
        >>> lower_bound(*two_rounds, confidence=0.9)
        tensor([0.1922], dtype=torch.float64)
    """
    check_number("lower_bound", "confidence", confidence, least=0.5, below=1)
    count, mean, squares = count.cpu().double(), mean.cpu().double(), squares.cpu().double()
    freedom = (count - 1).clamp_min(1)
    quantile = torch.from_numpy(stdtrit(freedom.numpy(), confidence)).reshape(count.shape)
    spread = quantile * (squares.clamp_min(0) / freedom / count.clamp_min(1)).sqrt()
    single = (
        torch.zeros_like(mean) if stderr is None else float(ndtri(confidence)) * stderr.cpu().double().nan_to_num(0)
    )
    bound = mean - torch.where(count > 1, spread, single)
    return bound.masked_fill(count == 0, torch.nan)
