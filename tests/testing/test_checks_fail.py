"""Each check can fail: a part with one fault is found by the check of that fault."""

from __future__ import annotations

from typing import Any

import faulty_metrics
import faulty_parts
import pytest
from own_cases import PersonalizerCase

from flsv.aggregation import FedAvg
from flsv.errors import ConfigurationError
from flsv.testing import check_metric, check_source, parametrize_with_checks
from flsv.testing.checks import Case, PartCheck, same
from flsv.testing.metric import MetricCase
from flsv.testing.source import SourceCase
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase

METRICS: list[tuple[str, Any, dict[str, Any]]] = [
    ("is_one", FedAvg(), {}),
    ("asks_for_what_there_is", faulty_metrics.AsksForColors(), {}),
    ("one_row_per_client", faulty_metrics.OneNumber(), {}),
    ("never_seen_is_nan", faulty_metrics.BeginsWithZero(), {}),
    ("clients_permuted", faulty_metrics.ByPlace(), {}),
    ("inputs_stay", faulty_metrics.InPlace(), {}),
    ("inputs_stay", faulty_metrics.Throws(), {}),
    ("reset_forgets", faulty_metrics.Counts(), {}),
    ("forward_counts_once", faulty_metrics.Sums(), {}),
    ("parts_merge", faulty_metrics.Sums(), {}),
    ("copies_go_on", faulty_metrics.Forgets(), {}),
    ("resumes_to_the_bit", faulty_metrics.Counts(), {}),
    ("any_precision", faulty_metrics.Single(), {}),
    ("any_precision", faulty_metrics.HalfAgain(), {}),
    ("states_move", faulty_metrics.KeepsScale(), {}),
    ("guide_says_the_unit", faulty_metrics.NoUnit(), {}),
    ("resumes_in_a_fit", faulty_metrics.LargeClientsOnly(), {}),
    ("resumes_in_a_fit", faulty_metrics.Counts(), {}),
]
AGGREGATORS: list[tuple[str, Any, dict[str, Any]]] = [
    ("is_one", faulty_metrics.Norm(), {}),
    ("pickles", faulty_parts.Nameless(), {}),
    ("weights_are_given", faulty_parts.GivesNan(), {}),
    ("clients_permuted_in_a_fit", faulty_parts.FirstOnly(), {}),
    ("state_is_saved", faulty_parts.KeepsItself(), {}),
    ("resumes_in_a_fit", faulty_parts.CountsRounds(), {}),
]
ALGORITHMS: list[tuple[str, Any, dict[str, Any]]] = [
    ("reports_are_declared", faulty_parts.Twice(), {}),
    ("trains_alone", faulty_parts.Tires(), {}),
    ("sides_are_apart", faulty_parts.Knows(), {}),
    ("sides_are_apart", faulty_parts.TooSoon(), {}),
]
SOURCES: list[tuple[str, Any, dict[str, Any]]] = [
    ("matches_its_kind", faulty_parts.Greedy(), {}),
    ("opens_samples", faulty_parts.Noisy(), {}),
    ("opens_the_same_again", faulty_parts.Shuffles(), {}),
    ("is_dealt_out", faulty_parts.Ragged(), {}),
    ("broken_ones_are_refused", faulty_parts.Numbers(), {"broken": [range(3)]}),
]
TABLES: dict[type[Case], list[tuple[str, Any, dict[str, Any]]]] = {
    MetricCase: METRICS,
    AggregatorCase: AGGREGATORS,
    ClientAlgorithmCase: ALGORITHMS,
    SourceCase: SOURCES,
}
FAULTS = [(kind, *fault) for kind, faults in TABLES.items() for fault in faults]
FAULTS.append((PersonalizerCase, "vmap_is_equal", faulty_parts.StartsFromTheLast(), {}))


def case_of(kind: Any, part: Any, options: dict[str, Any]) -> Case:
    return kind(part, range(12), **options) if kind is SourceCase else kind(part, **options)


@pytest.mark.parametrize(
    ("kind", "name", "part", "options"), FAULTS, ids=[f"{kind.__name__}-{name}" for kind, name, _, _ in FAULTS]
)
def test_a_fault_is_found(kind: Any, name: str, part: Any, options: dict[str, Any]) -> None:
    case = case_of(kind, part, options)
    check = next(check for check in case.checks if check.__name__ == name)
    with pytest.raises(AssertionError, match=rf"(?s)fails {name}: got .*\. "):
        PartCheck(case, check)()


def test_every_check_is_here() -> None:
    every = {check.__name__ for kind in TABLES for check in kind.checks}
    assert every == {name for _, name, _, _ in FAULTS}


@parametrize_with_checks([faulty_metrics.Norm()])
def test_without_the_fault_they_pass(check: PartCheck) -> None:
    check()


def test_a_source_without_fault_passes() -> None:
    check_source(faulty_parts.Numbers(), range(12))


def test_a_failure_that_is_expected() -> None:
    check_metric(faulty_metrics.NoUnit(), expected_failures={"guide_says_the_unit": "it has none"})
    with pytest.raises(AssertionError, match="passes guide_says_the_unit: take it out of expected_failures"):
        check_metric(faulty_metrics.Norm(), expected_failures={"guide_says_the_unit": "it has none"})
    with pytest.raises(ConfigurationError, match=r"expected_failures=\['guide'\]: Norm has the checks \['is_one', "):
        check_metric(faulty_metrics.Norm(), expected_failures={"guide": "it has none"})


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"expected an object of Metric, Aggregator, ClientAlgorithm\."):
        parametrize_with_checks([3])


def test_only_nan_is_nan() -> None:
    nan = float("nan")
    assert same({"a": [nan, 1.0]}, {"a": [nan, 1.0]})
    assert not same(nan, 1.0)
    assert not same([1.0], [nan], rtol=0.1)
