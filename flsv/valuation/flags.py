"""Flags suspicious samples by their calibrated gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.errors import ConfigurationError

RULES = ("outlier", "positive")
DEVIATIONS = 4.5


def flag_samples(gradients: Tensor, rule: str = "outlier", y: Tensor | None = None) -> Tensor:
    """Flag samples by their calibrated gradients.

    ``"positive"`` is the rule of Li et al. (FedBary, CVPR 2024, section 4.3): harmful is what is above 0. Calibrated
    gradients sum to 0, so it flags about half of a client without a single bad sample; the paper's "as many positive
    gradients as noisy samples" holds for a large share of strong noise only. ``"outlier"`` takes the shortest interval
    that holds half of the samples for good ones, its median c for their centre and 1.4826 times the median distance
    below c for their deviation s, and flags what is above c + 4.5 s and above 0: bad samples lie above and so touch
    neither, up to half of the client. With ``y`` every class has a centre of its own, and all have one deviation.

    Args:
        gradients: ``[m]`` finite numbers, positive means harmful.
        rule: ``"outlier"`` or ``"positive"``.
        y: ``[m]`` classes, where gradients are relative to the class.

    Returns:
        bool ``[m]``.

    Raises:
        ConfigurationError: another rule.

    Example:
        >>> flag_samples(torch.tensor([-2.0, -1.0, -1.5, 0.5, 9.0, -1.2, -1.7]))
        tensor([False, False, False,  True,  True, False, False])
    """
    if rule not in RULES:
        raise ConfigurationError(f"rule={rule!r}: expected one of {RULES}.")
    if rule == "positive" or len(gradients) < 3:
        return gradients > 0 if rule == "positive" else torch.zeros_like(gradients, dtype=torch.bool)
    above, deviation = _above(gradients, y)
    return (above > DEVIATIONS * deviation) & (gradients > 0)


def deviations(gradients: Tensor, y: Tensor | None = None) -> Tensor:
    """Each gradient's distance above the centre c, in units of s, as the rule ``"outlier"`` uses them.

    Args:
        gradients: ``[m]`` finite numbers.
        y: ``[m]`` classes, each with a centre of its own.

    Returns:
        ``[m]``; infinite above and below where the deviation is 0, and 0 at the centre.

    Example:
        >>> deviations(torch.tensor([-2.0, -1.0, -1.5, 0.5, 9.0])).round(decimals=1)
        tensor([-0.7000,  0.7000,  0.0000,  2.7000, 14.2000])
    """
    above, deviation = _above(gradients, y)
    return torch.where(above == 0, above, above / deviation)


def _above(gradients: Tensor, y: Tensor | None) -> tuple[Tensor, Tensor]:
    """How far each gradient is above its centre, and the deviation of all."""
    above = gradients.clone()
    for label in [None] if y is None else y.unique():
        members = torch.ones_like(gradients, dtype=torch.bool) if y is None or label is None else y == label
        above[members] -= _centre(gradients[members])
    return above, 1.4826 * -above[above <= 0].median()


def _centre(values: Tensor) -> Tensor:
    """The median of the shortest interval that holds half of the values."""
    ordered = values.sort().values
    half = len(ordered) // 2 + 1
    first = int((ordered[half - 1 :] - ordered[: len(ordered) - half + 1]).argmin())
    return ordered[first : first + half].median()
