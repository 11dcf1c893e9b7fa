"""Numbers: declared types, shapes and ranges of a remote client's responses and reports, checked at the server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.utilities.plain_values import to_three_digits

#: The largest magnitude of a number that a client may send. Its square is finite in float32.
LARGEST_NUMBER = 1e18
#: The range of a score, by its name. Other scores may be any number.
SCORE_RANGES: Mapping[str, tuple[float, float]] = {
    "accuracy": (0.0, 1.0),
    "balanced_accuracy": (0.0, 1.0),
    "negative_loss": (-LARGEST_NUMBER, 0.0),
}


def range_of_score(performance: Any) -> tuple[float, float]:
    """Return the lowest and the highest value of a score, given its name or a :class:`flsv.scores.Measure`."""
    if isinstance(performance, str):
        return SCORE_RANGES.get(performance, (-LARGEST_NUMBER, LARGEST_NUMBER))
    return -LARGEST_NUMBER, LARGEST_NUMBER


@dataclass(frozen=True)
class Numbers:
    """Declaration of the numbers that a client sends: a tensor, or a single Python number.

    Args:
        kind: the tensor's dtype, or ``float`` or ``int`` for a Python number.
        shape: the tensor's shape.
        lowest: the smallest number allowed.
        highest: the largest number allowed.
        whole: whether all numbers must be whole, such as those that are used as an index.
        rule: a further condition on the tensor or number, or None.

    Example:
        >>> cluster = Numbers(torch.float64, lowest=0, highest=2, whole=True)
        >>> cluster.check(torch.tensor(1.0, dtype=torch.float64))
        >>> Numbers(torch.complex64).check(torch.tensor(1j))
        Traceback (most recent call last):
            ...
        ValueError: expected real numbers, not torch.complex64
        >>> cluster.check(torch.tensor(0.5, dtype=torch.float64))
        Traceback (most recent call last):
            ...
        ValueError: expected whole numbers
    """

    kind: torch.dtype | type[float] | type[int]
    shape: tuple[int, ...] = ()
    lowest: float = -LARGEST_NUMBER
    highest: float = LARGEST_NUMBER
    whole: bool = False
    rule: Callable[[Any], bool] | None = None

    def check(self, value: Any) -> None:
        """Raise ValueError unless ``value`` is as declared. All numbers must be finite."""
        if isinstance(self.kind, torch.dtype):
            numbers = self._checked_tensor(value)
        elif type(value) is self.kind:
            numbers = torch.tensor(value, dtype=torch.float64)
        else:
            raise ValueError(f"expected a number ({self.kind.__name__}), not {value!r:.80}")

        if numbers.is_complex():
            raise ValueError(f"expected real numbers, not {numbers.dtype}")
        is_in_range = (numbers >= self.lowest) & (numbers <= self.highest)  # False for NaN
        if not bool(is_in_range.all()):
            raise ValueError(f"expected numbers from {self.lowest:g} to {self.highest:g}")
        if self.whole and not torch.equal(numbers, numbers.round()):
            raise ValueError("expected whole numbers")
        if self.rule is not None and not self.rule(value):
            raise ValueError("expected numbers that are consistent with each other")

    def _checked_tensor(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise ValueError(f"expected a tensor, not {value!r:.80}")
        if value.dtype != self.kind or value.shape != self.shape:
            raise ValueError(
                f"expected {self.kind} {list(self.shape)}, not {value.dtype} {list(value.shape)}"
            )
        return value


@dataclass(frozen=True)
class RespondingClient:
    """The server's information about a client to which it sends a request.

    Args:
        num_samples: the client's number of samples by split.
        num_classes: M, the number of classes, or None.
        model: function that returns the global model ``[P]``. A client's models have its shape and dtype.
    """

    num_samples: Mapping[str, int]
    num_classes: int | None
    model: Callable[[], Tensor]


#: The smallest number of samples, in total or of a class, for which a client responds.
MIN_HELD_OUT = 5

NumbersOfRound = int | Callable[[int, int], int]
"""The largest number of values in a client's responses to a function in a round, or a function that computes it from
the run's numbers of clients and of classes."""
Expectation = Callable[..., Numbers]
"""Function from a :class:`RespondingClient` and a request's other arguments to the response's :class:`Numbers`."""


def declare_response(
    function: Callable[..., Any],
    expectation: Expectation,
    numbers: NumbersOfRound = 1,
) -> None:
    """Declare the type, shape and range of the responses to a function that runs at clients.

    Args:
        function: the function that runs at the client.
        expectation: function with the parameters of ``function``, with a :class:`RespondingClient` in place of the
            client's data. It returns the :class:`Numbers` of the response.
        numbers: the largest number of values that a client returns in a round, which are rounded to three significant
            digits, or a function that computes it from the numbers of clients and of classes. 0: the response is a
            model that the server sent, which is neither rounded nor counted.

    Example:
        >>> def count_samples(local):
        ...     return int(local.class_counts.sum())
        >>> declare_response(
        ...     count_samples,
        ...     lambda client: Numbers(int, lowest=0, highest=client.num_samples["train"]),
        ... )
        >>> expected_response(count_samples)(RespondingClient({"train": 9}, 2, lambda: torch.zeros(5))).highest
        9
    """
    vars(function)["expected_response"] = expectation
    vars(function)["numbers_of_round"] = numbers


def numbers_of_round(function: Callable[..., Any], num_clients: int, num_classes: int) -> int:
    """Return the largest number of values that a client returns in a round, see :func:`declare_response`."""
    numbers: NumbersOfRound = getattr(function, "numbers_of_round", 1)
    return numbers(num_clients, num_classes) if callable(numbers) else numbers


def rounded_response(function: Callable[..., Any], response: Any) -> Any:
    """Return a response as the client sends it: rounded to three significant digits for a declared function."""
    while isinstance(function, partial):
        function = function.func
    if getattr(function, "numbers_of_round", 0) == 0:
        return response
    return to_three_digits(response)


def expected_response(function: Callable[..., Any]) -> Expectation | None:
    """Return the expectation that :func:`declare_response` has stored for a function, or None."""
    while isinstance(function, partial):
        function = function.func
    expectation: Expectation | None = getattr(function, "expected_response", None)
    return expectation
