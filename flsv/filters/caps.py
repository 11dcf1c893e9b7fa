"""NormCap and SampleCap: bounds on what a client claims, the length of its update and its number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from annotated_types import Gt
from torch import Tensor

from flsv.filters.base import UpdateFilter
from flsv.filters.cohort import Cohort
from flsv.functional.distances import distances
from flsv.personalization import Personalizer
from flsv.utilities.errors import ConfigurationError


def length_factors(norms: Tensor, cap: float) -> Tensor:
    """Compute the factor by which each update has to be multiplied so that its length is at most a bound.

    Args:
        norms: the updates' lengths, ``[k]``, not negative.
        cap: the bound, as a multiple of the median of the finite lengths above 0.

    Returns:
        float64 ``[k]`` in (0, 1], on the CPU: min(1, cap median / norm); 1 for a length that is 0 or not finite.

    Example:
        >>> length_factors(torch.tensor([1.0, 2.0, 8.0, 0.0]), cap=2.0)
        tensor([1.0000, 1.0000, 0.5000, 1.0000], dtype=torch.float64)
    """
    norms = norms.detach().cpu().double()
    known = (norms > 0) & norms.isfinite()
    factors = torch.ones_like(norms)
    if known.any():
        factors[known] = (cap * norms[known].quantile(0.5) / norms[known]).clamp_max(1)
    return factors


def capped_samples(num_samples: Tensor, cap: float | None) -> Tensor:
    """Cap the numbers of samples that clients report.

    Args:
        num_samples: the reported numbers, integers ``[k]``.
        cap: the bound, as a multiple of the median of ``num_samples``; the product is rounded up. None: no bound.

    Returns:
        The capped numbers, ``[k]``, in the dtype of ``num_samples``.

    Example:
        >>> capped_samples(torch.tensor([10, 20, 90]), cap=1.5)
        tensor([10, 20, 30])
    """
    if cap is None or not len(num_samples):
        return num_samples
    bound = (cap * num_samples.double().quantile(0.5)).ceil()
    return num_samples.clamp_max(bound.to(num_samples.dtype))


def scale_updates(rows: Tensor, start: Tensor, factors: Tensor, end: int) -> Tensor:
    """Multiply the updates of models by factors.

    Args:
        rows: the k trained models, ``[k, P]``; not changed.
        start: the model from which all of them started, ``[P]``, or ``[k, P]`` with one per model.
        factors: the factor of each model's update (model minus start), ``[k]``.
        end: the number of parameters, which come first in a row; the buffers after them are not scaled.

    Returns:
        The models with scaled updates, ``[k, P]``; ``rows`` itself if all factors are 1. A model whose factor is 1 does
        not change in any bit.

    Example:
        >>> scale_updates(torch.tensor([[3.0, 7.0], [2.0, 7.0]]), torch.ones(2), torch.tensor([0.5, 1.0]), end=1)
        tensor([[2., 7.],
                [2., 7.]])
    """
    changed = (factors != 1).nonzero().flatten().tolist()
    if not changed:
        return rows
    result, starts = rows.clone(), start.expand_as(rows)
    for i in changed:
        own = starts[i, :end]
        result[i, :end].sub_(own).mul_(float(factors[i])).add_(own)
    return result


class NormCap(UpdateFilter):
    """Filter that shortens updates longer than a bound and keeps their direction.

    The filter limits the influence of a client that multiplies its update, see :mod:`flsv.filters.caps`. It
    cannot be combined with a personalizer, or with a metric for which clients evaluate models on their own samples.

    Args:
        cap: the greatest length of an update, as a multiple of the median length in the cohort.

    Raises:
        ConfigurationError: the cap is not positive, or the loop has a personalizer or such a metric.

    Example:
        >>> NormCap(1.25)
        NormCap(cap=1.25)
    """

    excludes = False
    compares = "lengths of updates"

    def __init__(self, cap: Annotated[float, Gt(0), "It is a number of medians, such as 1.5."]) -> None:
        self.cap = cap

    def check(self, personalizer: Personalizer | None, evaluating: Sequence[str]) -> None:
        super().check(personalizer, evaluating)
        if evaluating:
            raise ConfigurationError(
                f"FederatedLoop(filters=[{self}]): metrics {list(evaluating)} let clients take their own updates out "
                "of the aggregate, in which they may be shorter than they know. Leave one of them out."
            )

    def apply(self, cohort: Cohort) -> Cohort:
        starts = [start for start in cohort.starts if start is not None]
        if len(starts) < len(cohort.updates):
            raise RuntimeError("updates have a known length only if the server knows all start points.")
        cut = cohort.num_parameters
        origin = torch.stack(starts) if cohort.common_start is None else cohort.common_start
        factors = length_factors(distances(cohort.matrix[:, :cut], origin[..., :cut]), self.cap)
        return replace(cohort, matrix=scale_updates(cohort.matrix, origin, factors, cut))


class SampleCap(UpdateFilter):
    """Filter that caps the numbers of samples that clients report, see :mod:`flsv.filters.caps`.

    Args:
        cap: the greatest number of samples, as a multiple of the cohort's median number; the product is rounded up to
            an integer.

    Raises:
        ConfigurationError: the cap is not positive.

    Example:
        >>> SampleCap(1.25)
        SampleCap(cap=1.25)
    """

    excludes = False

    def __init__(self, cap: Annotated[float, Gt(0), "It is a number of medians, such as 1.5."]) -> None:
        self.cap = cap

    def apply(self, cohort: Cohort) -> Cohort:
        return replace(cohort, num_samples=capped_samples(cohort.num_samples, self.cap))
