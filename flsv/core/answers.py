"""Numbers: what a remote client's answers and reports must be. They are checked where they arrive."""

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
    """Return the lowest and the highest value of a score, given its name or a measure of its own."""
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
        whole: whether all numbers must be whole, as those that are used as an index.
        rule: a further condition on the tensor or number. None: there is none.

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
            raise ValueError("its numbers do not fit together")

    def _checked_tensor(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise ValueError(f"expected a tensor, not {value!r:.80}")
        if value.dtype != self.kind or value.shape != self.shape:
            raise ValueError(
                f"expected {self.kind} {list(self.shape)}, not {value.dtype} {list(value.shape)}"
            )
        return value


@dataclass(frozen=True)
class AnsweringClient:
    """What the server knows about a client that it asks.

    Args:
        num_samples: the client's number of samples by split.
        num_classes: M, the number of classes. None if there are none.
        model: function that returns the global model ``[P]``. A client's models have its shape and dtype.
    """

    num_samples: Mapping[str, int]
    num_classes: int | None
    model: Callable[[], Tensor]


#: The fewest samples, in total or of a class, about which a client answers.
MIN_HELD_OUT = 5

NumbersOfRound = int | Callable[[int, int], int]
"""How many numbers a client answers to a question in a round at most, if need be as a function of the run's numbers of
clients and of classes."""
Expectation = Callable[..., Numbers]
"""Function from an :class:`AnsweringClient` and a question's other arguments to what the answer must be."""


def declare_answer(
    question: Callable[..., Any],
    expectation: Expectation,
    numbers: NumbersOfRound = 1,
) -> None:
    """Declare what a question's answer must be.

    Args:
        question: the function that runs at the client.
        expectation: function with the question's parameters, but for an :class:`AnsweringClient` in place of the
            client's data. It returns the :class:`Numbers` that the answer must be.
        numbers: how many numbers a client answers in a round at most, which are rounded to three significant digits. A
            function of the numbers of clients and of classes, if these decide it. 0: the answer is a model of the
            server's, which is neither rounded nor counted.

    Example:
        >>> def count_samples(local):
        ...     return int(local.class_counts.sum())
        >>> declare_answer(
        ...     count_samples,
        ...     lambda client: Numbers(int, lowest=0, highest=client.num_samples["train"]),
        ... )
        >>> expected_answer(count_samples)(AnsweringClient({"train": 9}, 2, lambda: torch.zeros(5))).highest
        9
    """
    vars(question)["expected_answer"] = expectation
    vars(question)["numbers_of_round"] = numbers


def numbers_of_round(question: Callable[..., Any], num_clients: int, num_classes: int) -> int:
    """Return how many numbers a client answers in a round at most, as :func:`declare_answer` has stored it."""
    numbers: NumbersOfRound = getattr(question, "numbers_of_round", 1)
    return numbers(num_clients, num_classes) if callable(numbers) else numbers


def as_answered(question: Callable[..., Any], answer: Any) -> Any:
    """Return an answer as it leaves a client: of a declared question in three significant digits."""
    while isinstance(question, partial):
        question = question.func
    if getattr(question, "numbers_of_round", 0) == 0:
        return answer
    return to_three_digits(answer)


def expected_answer(question: Callable[..., Any]) -> Expectation | None:
    """Return the expectation that :func:`declare_answer` has stored for a question, or None."""
    while isinstance(question, partial):
        question = question.func
    expectation: Expectation | None = getattr(question, "expected_answer", None)
    return expectation
