"""Values: a metric's values of the clients after a round, with all that is known about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flsv.utilities.display import INTERVAL_LEVEL
from flsv.utilities.host_copies import to_host


@dataclass(frozen=True, eq=False)
class IntervalKind:
    """How 90 % intervals were computed, and so whether the values' standard errors follow from them.

    Args:
        freedom: the degrees of freedom, a number or ``[n]``, of Student's t, by whose quantile standard errors were
            multiplied. Infinite: of the normal distribution. None: the ends were computed in another way, such as by a
            bootstrap.

    Example:
        >>> low, high = torch.tensor([0.0, 1.0]), torch.tensor([2.0, 5.0])
        >>> IntervalKind(freedom=4).standard_error(low, high).round(decimals=2)
        tensor([0.4700, 0.9400])
        >>> IntervalKind(freedom=None).standard_error(low, high)
        tensor([nan, nan])
    """

    freedom: Tensor | float | None = math.inf

    def standard_error(self, low: Tensor, high: Tensor) -> Tensor:
        """Compute the standard errors ``[n]`` of values from the ends of their intervals. NaN: they are not known."""
        if self.freedom is None:
            return torch.full_like(low, torch.nan)
        from flsv.functional.intervals import t_quantile  # slow to import

        half_width = (high - low) / 2
        return half_width / t_quantile(INTERVAL_LEVEL, self.freedom)

    @property
    def common_freedom(self) -> int | None:
        """The smallest degrees of freedom of any value, with which all are drawn together. None: they are normal, or no
        standard errors are known."""
        if self.freedom is None:
            return None
        freedom = torch.as_tensor(self.freedom, dtype=torch.float64)
        is_known = freedom.isfinite() & (freedom >= 1)
        return int(freedom[is_known].min()) if is_known.any() else None

    def to_plain(self) -> Any:
        """Return the kind as it is in ``run.json``: ``"ends"``, degrees of freedom, or None for the normal kind."""
        if self.freedom is None:
            return "ends"
        freedom = torch.as_tensor(self.freedom, dtype=torch.float64)
        return None if freedom.isinf().all() else freedom.tolist()

    @classmethod
    def from_plain(cls, plain: Any) -> IntervalKind:
        """Return the kind that :meth:`to_plain` has described. JSON has null in place of infinity."""
        if plain is None:
            return cls()
        if plain == "ends":
            return cls(freedom=None)
        if isinstance(plain, list):
            return cls(
                torch.tensor([math.inf if freedom is None else freedom for freedom in plain])
            )
        return cls(plain)


@dataclass(frozen=True, eq=False)
class Values:
    """A metric's values of n clients after a round. They are NaN for clients without a value.

    Example:
        >>> values = Values(torch.tensor([0.5, 1.0]), half_width=torch.tensor([0.25, 0.5]))
        >>> values.low, values.high
        (tensor([0.2500, 0.5000]), tensor([0.7500, 1.5000]))
        >>> bootstrap = torch.tensor([0.25, 0.5]), torch.tensor([0.75, 2.0])
        >>> Values(torch.tensor([0.5, 1.0]), ends=bootstrap).high
        tensor([0.7500, 2.0000])

    Raises:
        ValueError: ``half_width`` and ``ends`` are given, or the ends are not two tensors ``[n]``.
    """

    #: ``[n]``, or ``[n, M]`` by class or column.
    value: Tensor
    #: One number per client, ``[n]``. By default ``value``, or its mean over the columns.
    overall: Tensor = None  # type: ignore[assignment]  # __post_init__ sets it
    #: Half the widths ``[n]`` of 90 % intervals for the mean values over many seeds, standard errors times a quantile.
    #: None: they are not known, or the intervals are :attr:`ends`.
    half_width: Tensor | None = None
    #: The degrees of freedom, a number or ``[n]``, of Student's t whose quantile this is. Infinite: a normal quantile.
    freedom: Tensor | float = math.inf
    #: The lower and the upper ends ``[n]`` of 90 % intervals that are computed in another way, such as by a bootstrap.
    #: Nothing else follows from them: shares by these values have no intervals.
    ends: tuple[Tensor, Tensor] | None = None
    #: Further numbers, ``[n]`` or of the whole federation ``[]``, by name.
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    #: Facts that matter for a payment, such as where utilities come from. None: the metric has none.
    evidence: Mapping[str, Any] | None = None
    #: Why there are no values. None: there are.
    missing: str | None = None
    #: Function that returns the values on each validation sample. None: they are not known. It is not pickled.
    case_values: Callable[[], Any] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.overall is None:
            overall = self.value.mean(-1) if self.value.ndim == 2 else self.value
            object.__setattr__(self, "overall", overall)
        if self.ends is None:
            return
        if self.half_width is not None:
            raise ValueError(
                "Values have half_width or ends, but both were given. Pass half_width=None."
            )
        shapes = [list(end.shape) for end in self.ends]
        expected = list(self.overall.shape)
        if shapes != [expected, expected]:
            raise ValueError(f"expected ends, two tensors {expected}, but got tensors {shapes}.")

    def __getstate__(self) -> dict[str, Any]:
        """Return the state to pickle or copy, without the outputs that ``case_values`` holds."""
        return {**vars(self), "case_values": None}

    @property
    def by_class(self) -> Tensor | None:
        """The values by class or column, ``[n, M]``. None: there is one value per client."""
        return self.value if self.value.ndim == 2 else None

    @property
    def low(self) -> Tensor | None:
        """The lower ends ``[n]`` of the intervals."""
        if self.ends is not None:
            return self.ends[0]
        return None if self.half_width is None else self.overall - self.half_width

    @property
    def high(self) -> Tensor | None:
        """The upper ends ``[n]`` of the intervals."""
        if self.ends is not None:
            return self.ends[1]
        return None if self.half_width is None else self.overall + self.half_width

    @property
    def interval_kind(self) -> IntervalKind:
        """How the intervals were computed."""
        return IntervalKind(freedom=self.freedom if self.ends is None else None)

    def columns(self) -> dict[str, Tensor]:
        """Return the columns ``value``, ``low`` and ``high`` of a table of values whose intervals are known."""
        assert self.low is not None
        assert self.high is not None
        return {"value": self.overall, "low": self.low, "high": self.high}

    @property
    def error_bars(self) -> tuple[Tensor, Tensor] | None:
        """Both ends ``[n]`` of error bars for a picture: those of the intervals or, without these, of one standard
        error. None for values by class, or if neither is known."""
        if self.value.ndim != 1:
            return None
        if self.ends is not None:
            return self.ends
        half_length = self.half_width
        if half_length is None:
            half_length = self.diagnostics.get("stderr")
        if half_length is None:
            return None
        return self.value - half_length, self.value + half_length

    def without(self, reason: str) -> Values:
        """Return NaN in place of the values, with the reason."""
        return Values(torch.full_like(self.value, torch.nan), missing=reason)

    def record(self) -> dict[str, Any]:
        """Return the facts for ``run.json``, with the values on each validation sample."""
        if self.evidence is None:
            return {}
        record: dict[str, Any] = {}
        if self.missing is not None:
            record["why_no_values"] = self.missing
        record.update(self.evidence)
        record["case_values"] = None
        if self.case_values is not None:
            record["case_values"] = self.case_values()
        return record

    def state_dict(self) -> dict[str, Any]:
        """Return the arguments of equal values without evidence, for a checkpoint."""
        state: dict[str, Any] = {
            "value": self.value,
            "overall": self.overall,
            "half_width": self.half_width,
            "diagnostics": dict(self.diagnostics),
            "missing": self.missing,
        }
        if (
            self.interval_kind.to_plain() is not None
        ):  # earlier versions have written normal intervals only
            state["freedom"] = self.freedom
            state["ends"] = self.ends
        return state

    def tensors(self) -> list[Tensor]:
        """Return the tensors to which :meth:`map` applies a function."""
        tensors = [self.value, self.overall, *self.diagnostics.values()]
        if self.half_width is not None:
            tensors.append(self.half_width)
        if self.ends is not None:
            tensors += self.ends
        return tensors

    def map(self, function: Callable[[Tensor], Tensor]) -> Values:
        """Return equal values in which each tensor is replaced by the function's result for it."""
        half_width = self.half_width
        if half_width is not None:
            half_width = function(half_width)
        ends = self.ends
        if ends is not None:
            low, high = ends
            ends = function(low), function(high)
        return replace(
            self,
            value=function(self.value),
            overall=function(self.overall),
            half_width=half_width,
            ends=ends,
            diagnostics={name: function(number) for name, number in self.diagnostics.items()},
        )


def on_cpu(values: Mapping[str, Values]) -> dict[str, Values]:
    """Return copies of values by name, as float64 on the host. All are copied at once, since each copy waits for the
    device."""
    tensors = [tensor for of_metric in values.values() for tensor in of_metric.tensors()]
    host_tensors = dict(zip(tensors, to_host(tensors)))  # a tensor is equal to itself alone

    def host_copy(tensor: Tensor) -> Tensor:
        # A copy, because metrics change their states in place.
        return host_tensors[tensor].to(torch.float64, copy=True)

    return {name: of_metric.map(host_copy) for name, of_metric in values.items()}
