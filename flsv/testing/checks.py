"""Checks of parts under test, and the functions that run them."""
# A case is an object under test (a "part") with all that its checks need. A check's docstring, with advice for the
# part's author, is printed if the check fails.

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flsv.configuration.identity import described
from flsv.utilities.errors import ConfigurationError

Check = Callable[[Any], None]


class Case:
    """An object under test, with everything that its checks need."""

    checks: Sequence[Check] = ()

    def __init__(self, part: Any, expected_failures: Mapping[str, str] | None = None) -> None:
        self.part = part
        self.expected_failures = dict(expected_failures or {})

    @property
    def name(self) -> str:
        """Return the name of the object under test."""
        return (
            getattr(self.part, "__name__", None)
            or type(getattr(self.part, "func", self.part)).__name__
        )

    def new(self) -> Any:
        """Return a new copy of the object under test in its initial state."""
        return copy.deepcopy(self.part)


@dataclass(frozen=True)
class PartCheck:
    """One check of one object under test. A call runs it."""

    case: Case
    check: Check

    def __call__(self) -> None:
        what = f"{self.case.name} fails {self.check.__name__}"
        why = self.case.expected_failures.get(self.check.__name__)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # warnings of tiny fits
                self.check(self.case)
        except Exception as error:
            if why is not None:
                return
            expected = " ".join((self.check.__doc__ or "").split())
            if isinstance(error, AssertionError):
                raise AssertionError(f"{what}: got {error}. {expected}") from error.__cause__
            raise AssertionError(
                f"{what}: got {type(error).__name__}: {error}. {expected}"
            ) from error
        if why is not None:
            raise AssertionError(
                f"{self.case.name} passes {self.check.__name__}: take it out of expected_failures ({why})."
            )

    def __str__(self) -> str:
        """Return the names of the part and the check, for pytest."""
        return f"{self.case.name}-{self.check.__name__}"


def checks_of(case: Case, more: Sequence[Check] = ()) -> list[PartCheck]:
    """Return all checks of a case, and the checks ``more``, as callables."""
    checks = [*case.checks, *more]
    unknown = sorted(case.expected_failures.keys() - {check.__name__ for check in checks})
    if unknown:
        names = [check.__name__ for check in checks]
        raise ConfigurationError(
            f"expected_failures={unknown}: {case.name} has the checks {names}."
        )
    return [PartCheck(case, check) for check in checks]


def ensure(holds: object, got: object) -> None:
    """Raise AssertionError with the message ``got`` unless ``holds``."""
    if not holds:
        raise AssertionError(str(got))


def equal(one: Any, other: Any, rtol: float | None = None) -> bool:
    """Return whether nested values are equal, where NaN equals NaN."""
    if isinstance(one, float) and isinstance(other, float):
        one, other = torch.tensor(one), torch.tensor(other)
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and _same_tensors(one, other, rtol)
    if isinstance(one, Mapping):
        alike = isinstance(other, Mapping) and one.keys() == other.keys()
        return alike and all(equal(value, other[name], rtol) for name, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(equal(a, b, rtol) for a, b in zip(one, other))
    return bool(one == other)


def _same_tensors(one: Tensor, other: Tensor, rtol: float | None) -> bool:
    if one.shape != other.shape or (rtol is None and one.dtype != other.dtype):
        return False
    bound = rtol or 0.0
    return torch.allclose(
        one.cpu().double(), other.cpu().double(), rtol=bound, atol=bound, equal_nan=True
    )


def refused(call: Callable[[], Any]) -> bool:
    """Return whether ``call`` raises ValueError, of which ConfigurationError is a subclass."""
    try:
        call()
    except ValueError:
        return True
    return False


def saved(state: Any) -> Any:
    """Save a state as Lightning does, and return it loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@contextmanager
def untouched_rngs(who: str) -> Iterator[None]:
    """Raise AssertionError if the code within this context draws from torch's global random generator."""
    before = torch.get_rng_state()
    yield
    ensure(
        torch.equal(torch.get_rng_state(), before),
        f"{who} that draws from torch's global random generator",
    )


def is_one(case: Any) -> None:
    """Write a subclass of the base class of its kind."""
    ensure(isinstance(case.part, case.base), f"no {case.base.__name__}")


def pickles(case: Case) -> None:
    """Check that the part can be copied and pickled, as for ranks, and that the result has the part's arguments. Define
    its class and functions at the top of a module, and store each argument as the attribute of its name."""
    part = case.new()
    for other in (pickle.loads(pickle.dumps(part)), case.new()):
        ensure(described(other) == described(part), f"{described(other)} of {described(part)}")
