"""MeasuredMetric: what metrics have in common that evaluate models by a performance of the user's choice."""

from __future__ import annotations

from typing import Any

from torchmetrics import Metric

from flsv.errors import ConfigurationError
from flsv.games.performance import Mode, ModelScore, performance_of
from flsv.metrics.base import ContributionMetric


class MeasuredMetric(ContributionMetric):
    """Base class of metrics whose models are evaluated by a performance of the user's choice, or by classes."""

    performance: str | ModelScore

    def _measure(self, performance: str | Metric, mode: Mode | None, per_class: bool) -> None:
        """Take the arguments.

        Raises:
            ConfigurationError: a performance that there is not; values per class of another one than accuracy.
        """
        self.per_class = per_class
        self.performance = performance_of(self, performance, mode)
        if per_class and self.performance != "accuracy":
            of = performance if isinstance(performance, str) else self.performance
            raise ConfigurationError(
                f"{type(self).__name__}(performance={of!r}): values per class are those of the classes' accuracies. "
                "Leave performance out, or num_classes and per_class."
            )

    @property
    def measured_by(self) -> Any:
        """What models are measured by, see :meth:`flsv.Round.play`."""
        return "per_class_accuracy" if self.per_class else self.performance

    @property
    def unit(self) -> str:  # type: ignore[override]
        """Of a game's value."""
        if self.per_class:
            return "gain in a class's accuracy"
        if self.performance == "negative_loss":
            return "fall of the validation loss (nats)"
        title = self.performance if isinstance(self.performance, str) else self.performance.title
        return f"gain in {title.replace('_', ' ')}"
