"""Checks of samples and labels, and of the number of points that a client may return without revealing a sample.

Each of the S points that a client returns is a mean of m/S of its m samples. For S below m/2 the attack of
``docs/results/fedbary.md`` hardly finds a near copy of a sample.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor

from flsv.utilities.errors import ConfigurationError


def check_points(x: Tensor, name: str = "x") -> None:
    """Raise ConfigurationError unless ``x`` is a non-empty float tensor ``[m, d]`` of finite numbers."""
    if x.ndim != 2 or not x.is_floating_point():
        raise ConfigurationError(
            f"{name}: expected a float tensor [samples, features], got {list(x.shape)} of {x.dtype}. Flatten "
            f"images with {name}.flatten(1).float()."
        )
    if len(x) == 0:
        raise ConfigurationError(f"{name} is empty: a distribution needs at least one sample. Leave this side out.")
    bad = int((~torch.isfinite(x)).any(1).sum())
    if bad:
        raise ConfigurationError(
            f"{name}: {bad} of {len(x)} rows hold NaN or infinite values. Drop or impute them: they have no "
            f"distance to anything."
        )


def check_pair(x: Tensor, x2: Tensor, name: str = "x", name2: str = "x2") -> None:
    """Raise ConfigurationError unless both pass :func:`check_points` with as many features."""
    check_points(x, name)
    check_points(x2, name2)
    if x.shape[1] != x2.shape[1]:
        raise ConfigurationError(
            f"{name} has {x.shape[1]} features and {name2} has {x2.shape[1]}: both sides must use the same "
            f"features. Take the same pixels, projection or network for both."
        )


def check_labels(y: Tensor, x: Tensor, name: str = "y") -> None:
    """Raise ConfigurationError unless ``y`` has one integer class per row of ``x``."""
    if y.is_floating_point() or y.is_complex() or y.shape != x.shape[:1]:
        raise ConfigurationError(
            f"{name}: expected {len(x)} integer classes, one a sample, got {list(y.shape)} of {y.dtype}."
        )


def check_labeled(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor) -> None:
    """Raise ConfigurationError unless both sides are samples with classes."""
    check_pair(x, x2)
    check_labels(y, x)
    check_labels(y2, x2, "y2")


def safe_support(samples: int) -> int:
    """Return how many points a client may return: the largest integer below half of its samples."""
    return max(0, (samples - 1) // 2)


def check_support(support: int, samples: int, who: str = "the client") -> None:
    """Raise ConfigurationError unless every returned point is a mean of more than two samples."""
    if support <= safe_support(samples):
        return
    advice = f"Take support={safe_support(samples)} or less" if safe_support(samples) else "Leave it out"
    raise ConfigurationError(
        f"support={support}: {who} has {samples} samples, and half as many interpolated points and more give them away "
        f"(docs/results/fedbary.md). {advice}, or set allow_reconstruction=True."
    )


#: Types of arguments. ``Place``: the position between two measures, from 0 (the first) to 1 (the second). ``Exponent``:
#: that of the Wasserstein distance. ``Scaling``: the factor of the regularization from one stage to the next.
Place = Annotated[float, Gt(0), Lt(1), "0.5 is the middle of the geodesic."]
Exponent = Annotated[float, Ge(1)]
Scaling = Annotated[float, Gt(0), Lt(1)]
