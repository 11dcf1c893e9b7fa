"""OutlierFilter: a filter that warns of clients whose models are not finite, or whose updates are far too large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from flsv.core.strategy import FederationInfo
from flsv.filters.base import LARGE_AVERAGED, LARGE_EXCLUDED, NOT_FINITE, Cohort, UpdateFilter
from flsv.functional.outliers import MAX_Z_SCORE, drowning_updates, large_updates
from flsv.utilities.declared import Positive
from flsv.utilities.errors import ConfigurationError

#: What becomes of a far too large update.
CONSEQUENCES = {
    LARGE_EXCLUDED: "excluded from the round.",
    LARGE_AVERAGED: (
        "the update is aggregated, since exclude=True is not set, but not measured: this round does not count for the "
        "client's value."
    ),
}


class OutlierFilter(UpdateFilter):
    """Filter that warns of non-finite or far too large updates. It may exclude them.

    An update is too large if both its norm and its norm per local step are outliers: a client with more data takes more
    steps, but the number of steps is only the client's report. By default a too large update is aggregated, but hidden
    from the metrics, for which the client was absent in that round. ``loop.named`` counts such rounds by client. A
    client that is hidden in all rounds has no value.

    An update so large that rounding would lose the other updates in a sum with it is always excluded from the round,
    also in a federation without an ``OutlierFilter``, see :func:`flsv.functional.outliers.drowning_updates`.

    Args:
        threshold: modified z-score above which an update is too large, see
            :func:`flsv.functional.outliers.large_updates`. If None, an update is too large only if rounding would lose
            the others.
        exclude: whether to exclude too large updates from their round. If the aggregator's weights come from a metric,
            such updates are always excluded.

    Raises:
        ConfigurationError: the threshold is not positive, or ``exclude`` is set without a threshold.

    Example:
        >>> from flsv import FederatedLoop
        >>> loop = FederatedLoop(filters=[OutlierFilter(exclude=True)])
    """

    failures: ClassVar = {
        NOT_FINITE: "returned a model with NaN or infinite entries",
        **dict.fromkeys(CONSEQUENCES, "sent an update far larger than the cohort's"),
    }
    may_change = True
    bounds = False
    rules: ClassVar = (
        (
            lambda a: a.threshold is not None or not a.exclude,
            "exclude=True needs a threshold. Remove threshold=None.",
        ),
    )

    def __init__(self, threshold: Positive | None = MAX_Z_SCORE, exclude: bool = False) -> None:
        self.threshold = threshold
        self.exclude = exclude
        self._must_exclude = False
        self._last_aggregated = ""  # a text on the outliers that were last aggregated

    @property
    def excludes(self) -> bool:
        return self.exclude or self._must_exclude

    def set_up(self, federation: FederationInfo) -> None:
        # An aggregator with weights from a metric has no weight for an update that is not measured.
        self._must_exclude = (
            not self.exclude and federation.strategies["aggregator"].metric is not None
        )
        self._last_aggregated = ""

    def apply(self, cohort: Cohort) -> Cohort:
        """Exclude updates that are too large, or hide them from the metrics, with a warning."""
        is_drowning = drowning_updates(cohort.norms, cohort.model_norm)  # [k], as all masks below
        is_large = is_drowning | self._are_outliers(cohort)
        # An update in whose sum the others would be lost is always excluded.
        is_excluded = is_large if self.excludes else is_drowning
        ids = torch.tensor(cohort.ids, dtype=torch.long)
        excluded = ids[is_large & is_excluded].tolist()
        unmeasured = ids[is_large & ~is_excluded].tolist()
        sentences = [
            *self._warnings_of_broken(cohort),
            *self._warnings_of_large(cohort, excluded, LARGE_EXCLUDED),
            *self._warnings_of_large(cohort, unmeasured, LARGE_AVERAGED),
        ]
        checked_cohort = replace(cohort, unmeasured=unmeasured)
        return checked_cohort.warn(*sentences).keep(~is_excluded)

    def may_exclude(self, norms: Tensor, model_norm: float) -> bool:
        """Return whether :meth:`apply` may exclude an update, given the norms ``[k]`` of a round's updates and that of
        the model. False is certain, whatever the numbers of steps are.
        """
        is_excluded = drowning_updates(norms, model_norm)
        if self.excludes and self.threshold is not None:
            is_excluded |= large_updates(norms, self.threshold)
        return bool(is_excluded.any())

    def _are_outliers(self, cohort: Cohort) -> Tensor:
        # An outlier is long for the cohort, also by step of training.
        norms = cohort.norms
        if self.threshold is None:
            return torch.zeros_like(norms, dtype=torch.bool)
        num_steps = [update.num_steps for update in cohort.updates]
        steps = torch.tensor(num_steps, dtype=torch.float64)
        norms_by_step = norms / steps.clamp_min(1)
        is_outlier_by_step = large_updates(norms_by_step, self.threshold)
        return large_updates(norms, self.threshold) & is_outlier_by_step

    def _warnings_of_broken(self, cohort: Cohort) -> list[str]:
        broken = cohort.broken
        round_number = cohort.round_index + 1
        num_clients = len(broken) + len(cohort.updates)
        most_are_broken = len(broken) > num_clients / 2
        if most_are_broken:
            failure = self.failures[NOT_FINITE]  # "returned a model with ..."
            return [
                f"in round {round_number} {len(broken)} of {num_clients} clients {failure}: excluded from the round. "
                f"With so many, the cause is the model that they were sent. {self.hint()}"
            ]
        if not self.notices.is_first(NOT_FINITE, broken):
            return []
        description = self.notices.describe_failure(NOT_FINITE, broken)
        return [f"{description} in round {round_number}: excluded from the round. {self.hint()}"]

    def _warnings_of_large(self, cohort: Cohort, outliers: list[int], failure: str) -> list[str]:
        if not outliers:
            return []
        is_first = self.notices.is_first(failure, outliers)
        description = (
            f"{self.notices.describe_failure(failure, outliers)} in round {cohort.round_index + 1} "
            f"({_described_norms(cohort, outliers)})"
        )
        if failure == LARGE_AVERAGED:
            self._last_aggregated = description  # for the hint of a later round
        if not is_first:
            return []
        return [f"{description}: {CONSEQUENCES[failure]}"]

    def hint(self) -> str:
        if self._last_aggregated:
            return f"The cause may be an earlier round: {self._last_aggregated}."
        return "Try a lower learning rate or gradient_clip_val, and look for NaN in the data."


def _described_norms(cohort: Cohort, clients: Sequence[int]) -> str:
    norm_by_client = dict(zip(cohort.ids, cohort.norms.tolist()))
    norms = ", ".join(f"{norm_by_client[client]:.3g}" for client in clients)
    nonzero_norms = cohort.norms[cohort.norms > 0]
    median = nonzero_norms.quantile(0.5).item()
    return f"norm {norms}; median {median:.3g}"


def with_finite_check(filters: Sequence[UpdateFilter]) -> tuple[UpdateFilter, ...]:
    """Return ``filters`` with an ``OutlierFilter(threshold=None)`` in front, unless an ``OutlierFilter`` is among them.

    The added filter warns of clients whose models are not finite, and excludes updates so large that rounding would
    lose the others.

    Raises:
        ConfigurationError: an ``OutlierFilter`` is not the first filter, or two filters are of one class.
    """
    filter_classes = [type(update_filter) for update_filter in filters]
    if len(set(filter_classes)) < len(filter_classes):
        raise ConfigurationError(
            f"filters={list(filters)} has two filters of the same class. Keep one of them."
        )
    checks_finiteness = [issubclass(kind, OutlierFilter) for kind in filter_classes]
    comes_later = any(checks_finiteness[1:])
    if comes_later:
        raise ConfigurationError(
            f"filters={list(filters)}: OutlierFilter must see updates as they were sent. Put it before the others."
        )
    if any(checks_finiteness):
        return tuple(filters)
    finite_check = OutlierFilter(threshold=None)
    return (finite_check, *filters)
