"""NormCap: shortens updates that are longer than a multiple of the cohort's median length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
from annotated_types import Gt

from flsv.filters.base import UpdateFilter
from flsv.filters.cohort import Cohort
from flsv.functional.clipping import length_factors, shortened
from flsv.functional.distances import distances
from flsv.personalization import Personalizer
from flsv.utilities.errors import ConfigurationError


class NormCap(UpdateFilter):
    """Shortens updates above a bound, keeping their direction, for metrics and aggregator.

    So there is little to gain by sending a multiple of one's update, see :mod:`flsv.functional.clipping`. It is
    for federations without a personalizer, and for metrics that ask no client to evaluate models.

    Args:
        cap: the longest update, in medians of its cohort's.

    Raises:
        ConfigurationError: a cap that is not positive; lengths that have no meaning beside the rest of the loop.

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
            raise RuntimeError("updates have a length where everybody starts from what the server sends.")
        cut = cohort.num_parameters
        origin = torch.stack(starts) if cohort.common_start is None else cohort.common_start
        factors = length_factors(distances(cohort.matrix[:, :cut], origin[..., :cut]), self.cap)
        return replace(cohort, matrix=shortened(cohort.matrix, origin, factors, cut))
