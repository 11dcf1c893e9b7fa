"""Checks of your own parts, like scikit-learn's ``check_estimator``.

>>> from flsv.aggregation import FedAvg, TrimmedMean
>>> check_part(FedAvg(server_lr=0.5))

If a check fails, it raises an ``AssertionError`` with the name of the check, the result and advice:

>>> check_part(TrimmedMean(trim=0.34))  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
AssertionError: TrimmedMean fails equal_clients_weigh_the_same: got ...

With pytest, :func:`parametrize_with_checks` makes a separate test of every check.

Tier: provisional.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flsv.testing.checks import Case, checks_of
from flsv.testing.metric import MetricCase
from flsv.testing.samplers import SamplerCase
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase
from flsv.utilities.errors import ConfigurationError

__all__ = ["check_part", "parametrize_with_checks"]

_CASE_TYPES: tuple[Any, ...] = (MetricCase, AggregatorCase, ClientAlgorithmCase, SamplerCase)


def check_part(part: Any, **options: Any) -> None:
    """Check a metric, an aggregator, a client algorithm or a sampler, in prepared rounds and tiny fits.

    Args:
        part: the part. A metric is constructed without ``num_clients`` and ``num_classes``, which the checks set, and
            each argument of its ``update`` has to be named after a field of :class:`flsv.Round` or a key of ``given``.
            A sampler has to be able to draw from five clients and from four. A metric that another part reads by name
            is added, unless ``metrics={...}`` among ``options`` has it.
        options: ``expected_failures``, ``{check: reason}`` for checks that the part cannot pass, ``module``, a function
            that returns the LightningModule of the fits, and arguments of the :class:`flsv.FederatedLoop`. For a metric
            also ``given``, ``{argument: function}`` for the arguments of ``update`` that are no fields of a round, such
            as clients' reports: each function gets the :class:`flsv.Round` and returns the argument's value.

    Raises:
        AssertionError: a check fails.
        ConfigurationError: the part is of none of these kinds.

    Example:
        >>> from flsv.metrics import LeaveOneOut
        >>> check_part(LeaveOneOut())
    """
    for check in checks_of(_case_of(part, **options)):
        check()


def parametrize_with_checks(parts: Iterable[Any], **options: Any) -> Any:
    """Return a decorator that runs a pytest test once for each ``check``.

    Args:
        parts: the metrics, aggregators, client algorithms and samplers to check.
        options: options for all parts, see :func:`check_part`.

    Returns:
        The decorator.

    Raises:
        ConfigurationError: a part is of none of these kinds.

    Example:
        >>> from flsv.aggregation import ShapleyWeighted
        >>> from flsv.metrics import LeaveOneOut
        >>> @parametrize_with_checks([LeaveOneOut(), ShapleyWeighted("loo")], metrics={"loo": LeaveOneOut()})
        ... def test_my_parts(check):
        ...     check()
    """
    import pytest

    checks = []
    for part in parts:
        checks += checks_of(_case_of(part, **options))
    return pytest.mark.parametrize("check", checks, ids=str)


def _case_of(part: Any, **options: Any) -> Case:
    for case_type in _CASE_TYPES:
        if isinstance(part, case_type.base):
            return case_type(part, **options)
    raise ConfigurationError(
        f"{part!r} has no checks: expected an object of Metric, Aggregator, ClientAlgorithm, ClientSampler."
    )
