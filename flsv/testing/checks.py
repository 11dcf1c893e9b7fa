"""Checks of parts under test, and the functions that run them."""
# A case is an object under test (a "part") with all that its checks need. A check's docstring, with advice for the
# part's author, is printed if the check fails.

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.testing import assert_close

from flsv.configuration.identity import described
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import are_equal

Check = Callable[[Any], None]


class Case:
    """An object under test, with everything that its checks need."""

    checks: Sequence[Check] = ()
    #: Base class of such objects.
    base: type

    def __init__(self, part: Any, expected_failures: Mapping[str, str] | None = None) -> None:
        self.part = part
        self.expected_failures = dict(expected_failures or {})

    @property
    def name(self) -> str:
        """Return the name of the object under test."""
        return type(self.part).__name__

    def new(self) -> Any:
        """Return a new copy of the object under test in its initial state."""
        return copy.deepcopy(self.part)


@dataclass(frozen=True)
class PartCheck:
    """One check of one object under test. A call runs it."""

    case: Case
    check: Check

    def __call__(self) -> None:
        check_name = self.check.__name__
        expected_failure = self.case.expected_failures.get(check_name)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of tiny fits
                self.check(self.case)
        except Exception as error:
            if expected_failure is not None:
                return
            result = str(error)
            if not isinstance(error, AssertionError):
                result = f"{type(error).__name__}: {error}"
            advice = self.check.__doc__ or ""
            advice_in_one_line = " ".join(advice.split())
            raise AssertionError(
                f"{self.case.name} fails {check_name}: got {result}. {advice_in_one_line}"
            ) from error
        if expected_failure is not None:
            raise AssertionError(
                f"{self.case.name} passes {check_name}: take it out of expected_failures ({expected_failure})."
            )

    def __str__(self) -> str:
        """Return the names of the part and the check, for pytest."""
        return f"{self.case.name}-{self.check.__name__}"


def checks_of(case: Case) -> list[PartCheck]:
    """Return all checks of a case, as callables."""
    names = [check.__name__ for check in case.checks]
    unknown = sorted(case.expected_failures.keys() - set(names))
    if unknown:
        raise ConfigurationError(
            f"expected_failures={unknown}: {case.name} has the checks {names}."
        )
    return [PartCheck(case, check) for check in case.checks]


def ensure(holds: object, got: object) -> None:
    """Raise AssertionError with the message ``got`` unless ``holds``."""
    if not holds:
        raise AssertionError(str(got))


def equal(
    value: Any,
    expected: Any,
    rtol: float | None = None,
) -> bool:
    """Return whether nested values are equal, bitwise or up to ``rtol``. NaN equals NaN."""
    if rtol is None:
        return are_equal(value, expected)
    try:
        assert_close(
            value,
            expected,
            rtol=rtol,
            atol=rtol,
            equal_nan=True,
            check_device=False,
            check_dtype=False,
        )
    except AssertionError:
        return False
    return True


@contextmanager
def untouched_rngs(subject: str) -> Iterator[None]:
    """Raise AssertionError if the code within this context draws from torch's global random generator."""
    initial_state = torch.get_rng_state()
    yield
    is_untouched = torch.equal(torch.get_rng_state(), initial_state)
    ensure(is_untouched, f"{subject} that draws from torch's global random generator")


def pickles(case: Case) -> None:
    """Check that the part can be copied and pickled, as for ranks, and that the result has the part's arguments. Define
    its class and functions at the top of a module, and store each argument as the attribute of its name."""
    part = case.new()
    expected = described(part)
    unpickled = pickle.loads(pickle.dumps(part))
    for duplicate in (unpickled, case.new()):
        description = described(duplicate)
        ensure(description == expected, f"{description} of {expected}")
