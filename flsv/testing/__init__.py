"""Checks of your own parts, like scikit-learn's ``check_estimator``.

>>> from flsv.aggregation import FedAvg, TrimmedMean
>>> check_aggregator(FedAvg(server_lr=0.5))

If a check fails, it raises an ``AssertionError`` with the name of the check, the result and advice:

>>> check_aggregator(TrimmedMean(trim=0.34))  # doctest: +ELLIPSIS
Traceback (most recent call last):
...
AssertionError: TrimmedMean fails equal_clients_weigh_the_same: got ...

With pytest, :func:`parametrize_with_checks` makes a separate test of every check.

Tier: provisional.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torchmetrics import Metric

from flsv.aggregation import Aggregator
from flsv.sampling import ClientSampler
from flsv.testing.checks import Case, PartCheck, checks_of
from flsv.testing.metric import MetricCase
from flsv.testing.rounds import Given
from flsv.testing.samplers import SamplerCase
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase
from flsv.training.algorithms import ClientAlgorithm
from flsv.utilities.errors import ConfigurationError

__all__ = [
    "check_aggregator",
    "check_client_algorithm",
    "check_metric",
    "check_sampler",
    "parametrize_with_checks",
]


def check_metric(metric: Metric, *, given: Given | None = None, **options: Any) -> None:
    """Check a contribution metric on four prepared rounds and in tiny fits.

    Each argument of the metric's ``update`` has to be named after a field of :class:`flsv.Round` or a key of ``given``.

    Args:
        metric: the metric, constructed without ``num_clients`` and ``num_classes``, which the checks set.
        given: ``{argument: function}`` for the arguments of ``update`` that are no fields of a round, such as clients'
            reports. Each function gets the :class:`flsv.Round` and returns the argument's value.
        options: ``expected_failures``, ``{check: reason}`` for checks that the metric cannot pass, ``module``, a
            function that returns the LightningModule of the fits, and arguments of the :class:`flsv.FederatedLoop`.

    Raises:
        AssertionError: a check fails.

    Example:
        >>> from flsv.metrics import LeaveOneOut
        >>> check_metric(LeaveOneOut())
    """
    _run(MetricCase(metric, given=given, **options))


def check_aggregator(aggregator: Aggregator, **options: Any) -> None:
    """Check an aggregator in tiny fits.

    Args:
        aggregator: the aggregator. The checks add a metric that it reads by name, unless ``metrics={...}`` among
            ``options`` has it.
        options: ``expected_failures``, ``module`` and arguments of the loop, see :func:`check_metric`.

    Raises:
        AssertionError: a check fails.
    """
    _run(AggregatorCase(aggregator, **options))


def check_client_algorithm(algorithm: ClientAlgorithm, **options: Any) -> None:
    """Check a client algorithm in tiny fits.

    Args:
        algorithm: the client algorithm.
        options: ``expected_failures``, ``module`` and arguments of the loop, see :func:`check_metric`.

    Raises:
        AssertionError: a check fails.
    """
    _run(ClientAlgorithmCase(algorithm, **options))


def check_sampler(sampler: ClientSampler, **options: Any) -> None:
    """Check a sampler in prepared rounds and tiny fits.

    Args:
        sampler: the sampler. It has to be able to draw from five clients and from four.
        options: ``expected_failures``, ``module`` and arguments of the loop, see :func:`check_metric`.

    Raises:
        AssertionError: a check fails.
    """
    _run(SamplerCase(sampler, **options))


def parametrize_with_checks(parts: Iterable[Any], **options: Any) -> Any:
    """Return a decorator that runs a pytest test once for each ``check``.

    Args:
        parts: the metrics, aggregators, client algorithms and samplers to check.
        options: options for all parts, see :func:`check_metric`.

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

    checks: list[PartCheck] = []
    for part in parts:
        checks += checks_of(_case_of(part, **options))
    return pytest.mark.parametrize("check", checks, ids=str)


def _case_of(part: Any, **options: Any) -> Case:
    case_types: tuple[Any, ...] = (
        MetricCase,
        AggregatorCase,
        ClientAlgorithmCase,
        SamplerCase,
    )
    for case_type in case_types:
        if isinstance(part, case_type.base):
            return case_type(part, **options)
    raise ConfigurationError(
        f"parametrize_with_checks([{part!r}]): expected an object of Metric, Aggregator, ClientAlgorithm, "
        "ClientSampler."
    )


def _run(case: Case) -> None:
    for check in checks_of(case):
        check()
