"""A metric's pictures over a run: the same scale in all of them, so that one after the other they are an animation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torchmetrics import Metric

from flsv.drawing import label_text

#: Pictures of a metric in a run, unless something else is asked for; TensorBoard keeps as many.
PICTURES = 10


def due(round_index: int, rounds: int | None, every: int | None) -> bool:
    """Whether figures are drawn after this round.

    Args:
        round_index: from 0.
        rounds: of the run; None or -1: nobody knows.
        every: rounds between two pictures; 0: none; None: ten in the run.

    Example:
        >>> [index for index in range(25) if due(index, 25, None)]
        [2, 5, 8, 11, 14, 17, 20, 23, 24]
    """
    known = rounds is not None and rounds > 0
    if every is None:
        every = -(-rounds // PICTURES) if known else PICTURES  # type: ignore[operator]
    return bool(every) and ((known and round_index + 1 == rounds) or (round_index + 1) % every == 0)


class FixedScale:
    """The limits of a metric's pictures: 1, 2 or 5 times a power of ten, and never beyond the metric's own bounds.

    Nobody knows the largest value of a run in advance. So the limits hold all values seen so far, in the pictures or
    between them, and are widened only when a value lies beyond.

    Args:
        lower: the least value that there can be; None: there is none.
        upper: the largest.

    Example:
        >>> scale = FixedScale(None, 1.0)
        >>> scale.include(Tensor([0.013, float("nan")]))
        >>> scale.limits
        (0.0, 0.02)
        >>> scale.include(Tensor([-0.03, 0.7]))
        >>> scale.limits
        (-0.05, 1.0)
    """

    def __init__(self, lower: float | None = None, upper: float | None = None) -> None:
        self._lower, self._upper = lower, upper
        self._least = self._most = 0.0

    def include(self, values: Any) -> None:
        """These, an array or a tensor, have to fit in; NaN and infinity do not count."""
        values = np.asarray(values)
        finite = values[np.isfinite(values)]
        if len(finite):
            self._least = min(self._least, float(finite.min()))
            self._most = max(self._most, float(finite.max()))

    @property
    def limits(self) -> tuple[float, float]:
        """Lower and upper; 0 is within."""
        low, high = -round_up(-self._least), round_up(self._most)
        low = low if self._lower is None else max(low, min(self._lower, 0.0))
        high = high if self._upper is None else min(high, max(self._upper, 0.0))
        return (low + 0.0, high) if high > low else (0.0, 1.0)


def round_up(value: float) -> float:
    """To 1, 2 or 5 times a power of ten; 0 stays.

    Example:
        >>> round_up(0.013), round_up(0.5), round_up(730)
        (0.02, 0.5, 1000.0)
    """
    if value <= 0:
        return 0.0
    exponent = math.floor(math.log10(value))
    steps = (float(f"{step}e{power}") for power in (exponent, exponent + 1) for step in (1, 2, 5))
    return next(step for step in steps if step >= value)


def draw(metric: Metric, name: str, value: Tensor, round_index: int, **style: Any) -> tuple[Any, Any]:
    """The metric's own picture, in whatever style its ``plot`` takes.

    Args:
        metric: draws itself.
        name: its name in the run.
        value: what it gave.
        round_index: in the title.
        style: keywords of :meth:`flsv.metrics.ContributionMetric.plot`; what a ``plot`` does not take is left out.
    """
    known: Mapping[str, Any] = inspect.signature(metric.plot).parameters
    figure, axis = metric.plot(value, **{key: value for key, value in style.items() if key in known})
    axis.set_title(f"{label_text(name)}, round {round_index}")
    return figure, axis
