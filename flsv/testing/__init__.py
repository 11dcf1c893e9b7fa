"""Checks of parts of one's own, as scikit-learn's ``check_estimator``: metrics, aggregators, client algorithms and
sources of data.

>>> from flsv.aggregation import FedAvg
>>> check_aggregator(FedAvg(server_lr=0.5))

A part that does not pass raises an ``AssertionError`` that says which check, what was found, what was expected and what
to do:

>>> check_metric(FedAvg())
Traceback (most recent call last):
...
AssertionError: FedAvg fails is_one: got no Metric. Write a subclass of the base class of its kind.

With pytest every check is a test of its own: :func:`parametrize_with_checks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torchmetrics import Metric

from flsv.aggregation import Aggregator
from flsv.data.sources.source import Source
from flsv.testing.checks import Case, PartCheck, checks_of
from flsv.testing.fits import AggregatorCase, ClientAlgorithmCase
from flsv.testing.metric import Given, MetricCase
from flsv.testing.source import SourceCase
from flsv.training.algorithms import ClientAlgorithm
from flsv.utilities.errors import ConfigurationError

__all__ = ["check_aggregator", "check_client_algorithm", "check_metric", "check_source", "parametrize_with_checks"]


def check_metric(metric: Metric, *, given: Given | None = None, **options: Any) -> None:
    """Check a contribution metric.

    It is fed four rounds, of which the names of its ``update``'s arguments are parts, and takes part in tiny fits.

    Args:
        metric: made without ``num_clients`` and ``num_classes``.
        given: what ``update`` names and a round does not have by itself, such as what clients report: name to a
            function of the :class:`flsv.Round`.
        options: ``expected_failures``, by the name of a check why the metric cannot pass it; ``module``, which makes
            the LightningModule of the fits; and other arguments of the :class:`flsv.FederatedLoop`.

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
        aggregator: a metric that it reads by name is there; one of its own goes into ``metrics={...}``.
        options: see :func:`check_metric`.

    Raises:
        AssertionError: a check fails.
    """
    _run(AggregatorCase(aggregator, **options))


def check_client_algorithm(algorithm: ClientAlgorithm, **options: Any) -> None:
    """Check a client algorithm in tiny fits.

    Args:
        algorithm: what clients do differently when they train.
        options: see :func:`check_metric`.

    Raises:
        AssertionError: a check fails.
    """
    _run(ClientAlgorithmCase(algorithm, **options))


def check_source(source: Source, given: Any, *, broken: Sequence[Any] = (), **options: Any) -> None:
    """Check a kind of source of data.

    Args:
        source: with ``match`` and ``open``.
        given: what it opens: the ``Path`` of a file or folder that is there, a name, or an object.
        broken: what is of its kind and cannot be opened.
        options: ``expected_failures``, see :func:`check_metric`; and further arguments of the
            :class:`flsv.FederatedDataModule` that deals it out, such as ``labels``.

    Raises:
        AssertionError: a check fails.
    """
    _run(SourceCase(source, given, broken=broken, **options))


def parametrize_with_checks(parts: Iterable[Any], **options: Any) -> Any:
    """A pytest decorator: a test with the argument ``check`` becomes one test for each check of each part.

    Args:
        parts: metrics, aggregators and client algorithms.
        options: of all of them, see :func:`check_metric`.

    Raises:
        ConfigurationError: there are no checks of such a part.

    Example:
        >>> from flsv.aggregation import ShapleyWeighted
        >>> from flsv.metrics import LeaveOneOut
        >>> @parametrize_with_checks([LeaveOneOut(), ShapleyWeighted("loo")], metrics={"loo": LeaveOneOut()})
        ... def test_my_parts(check):
        ...     check()
    """
    import pytest

    checks: list[PartCheck] = [check for part in parts for check in checks_of(_case_of(part, **options))]
    return pytest.mark.parametrize("check", checks, ids=str)


def _case_of(part: Any, **options: Any) -> Case:
    cases: tuple[Any, ...] = (MetricCase, AggregatorCase, ClientAlgorithmCase)
    for case in cases:
        if isinstance(part, case.base):
            return case(part, **options)
    raise ConfigurationError(
        f"parametrize_with_checks([{part!r}]): expected an object of Metric, Aggregator, ClientAlgorithm."
    )


def _run(case: Case) -> None:
    for check in checks_of(case):
        check()
