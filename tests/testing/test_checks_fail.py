"""Each check can fail: a part with one fault is found by the check of that fault."""

from __future__ import annotations

from typing import Any

import faulty_metrics
import faulty_parts
import pytest

from flsv.aggregation import FedAvg
from flsv.errors import ConfigurationError
from flsv.metrics import LeaveOneOut
from flsv.sampling import UniformSampler
from flsv.testing import check_metric, checks_of, parametrize_with_checks
from flsv.testing.checks import Case, PartCheck, same
from flsv.testing.games import EstimatorCase
from flsv.testing.metric_case import MetricCase
from flsv.testing.source import SourceCase
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase, PersonalizerCase, SamplerCase
from flsv.testing.uploads import FilterCase, UploadCase

METRICS: list[tuple[str, Any, dict[str, Any]]] = [
    ("is_one", FedAvg(), {}),
    ("asks_for_what_there_is", faulty_metrics.AsksForColours(), {}),
    ("one_row_per_client", faulty_metrics.OneNumber(), {}),
    ("never_seen_is_nan", faulty_metrics.BeginsWithZero(), {}),
    ("clients_permuted", faulty_metrics.ByPlace(), {}),
    ("rounds_are_counted", faulty_metrics.CountsTwice(), {}),
    ("inputs_stay", faulty_metrics.InPlace(), {}),
    ("inputs_stay", faulty_metrics.Throws(), {}),
    ("reset_forgets", faulty_metrics.Counts(), {}),
    ("forward_counts_once", faulty_metrics.Sums(), {}),
    ("parts_merge", faulty_metrics.Sums(), {}),
    ("copies_go_on", faulty_metrics.Forgets(), {}),
    ("resumes_to_the_bit", faulty_metrics.Counts(), {}),
    ("processes_agree", faulty_metrics.Sums(), {}),
    ("ranks_agree", faulty_metrics.OwnClientsOnly(), {}),
    ("any_precision", faulty_metrics.Single(), {}),
    ("any_precision", faulty_metrics.HalfAgain(), {}),
    ("inference_mode_is_no_matter", faulty_metrics.Remembers(), {}),
    ("states_move", faulty_metrics.KeepsScale(), {}),
    ("bad_clients_are_refused", faulty_metrics.TakesOneRow(), {}),
    ("guide_says_the_unit", faulty_metrics.NoUnit(), {}),
    ("intervals_are_of_the_rounds", faulty_metrics.OtherFold(), {}),
    ("intervals_are_of_the_rounds", faulty_metrics.Silent(), {}),
    ("settings_are_described", faulty_metrics.ForgetsPower(), {}),
    ("axioms_hold", faulty_metrics.Squared(), {"axioms": ["efficiency"]}),
    ("axioms_hold", LeaveOneOut(), {"axioms": ["efficiency"]}),
    ("appears_in_a_fit", faulty_metrics.LargeClientsOnly(), {}),
    ("resumes_in_a_fit", faulty_metrics.Counts(), {}),
]
AGGREGATORS: list[tuple[str, Any, dict[str, Any]]] = [
    ("is_one", faulty_metrics.Norm(), {}),
    ("pickles", faulty_parts.Nameless(), {}),
    ("repr_is_code", faulty_parts.OwnWords(), {}),
    ("settings_are_described", faulty_parts.ForgetsTemperature(), {}),
    ("weights_are_given", faulty_parts.GivesNan(), {}),
    ("clients_permuted_in_a_fit", faulty_parts.FirstOnly(), {}),
    ("state_is_saved", faulty_parts.KeepsItself(), {}),
    ("resumes_in_a_fit", faulty_parts.CountsRounds(), {}),
]
PERSONALIZERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("starts_are_models", faulty_parts.Restless(), {}),
    ("vmap_is_equal", faulty_parts.StartsFromTheLast(), {}),
]
SAMPLERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("draws_clients", faulty_parts.Descending(3), {}),
    ("probabilities_are_true", faulty_parts.Certain(3), {}),
    ("probabilities_are_true", faulty_parts.Overstated(3), {}),
    ("small_federations_are_refused", faulty_parts.Unchecked([0, 3]), {}),
]
ALGORITHMS: list[tuple[str, Any, dict[str, Any]]] = [
    ("reports_are_declared", faulty_parts.Twice(), {}),
    ("trains_alone", faulty_parts.Tires(), {}),
    ("sides_are_apart", faulty_parts.Knows(), {}),
    ("sides_are_apart", faulty_parts.TooSoon(), {}),
    ("remote_is_equal", faulty_parts.TooSoon(), {}),
]
UPLOADS: list[tuple[str, Any, dict[str, Any]]] = [
    ("gives_an_update", faulty_parts.Doubles(), {}),
    ("seed_decides", faulty_parts.Shaky(), {}),
    ("clients_are_apart", faulty_parts.Remembers(), {}),
    ("traffic_is_a_size", faulty_parts.Weightless(), {}),
]
FILTERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("gives_a_cohort", faulty_parts.Nobody(), {}),
    ("order_does_not_matter", faulty_parts.FirstTwo(), {}),
    ("one_client_stays", faulty_parts.NotAlone(), {}),
]
ESTIMATORS: list[tuple[str, Any, dict[str, Any]]] = [
    ("gives_an_estimate", faulty_parts.gives_a_tensor, {}),
    ("counts_its_evaluations", faulty_parts.miscounts, {}),
    ("small_budgets_are_refused", faulty_parts.needs_no_budget, {}),
    ("generator_decides", faulty_parts.throws, {}),
    ("one_player_takes_all", faulty_parts.two_at_least, {}),
    ("values_are_known", faulty_parts.halves, {}),
    ("bad_games_are_refused", faulty_parts.swallows, {}),
    ("axioms_hold", faulty_parts.halves, {"axioms": ["efficiency"]}),
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
    PersonalizerCase: PERSONALIZERS,
    SamplerCase: SAMPLERS,
    ClientAlgorithmCase: ALGORITHMS,
    UploadCase: UPLOADS,
    FilterCase: FILTERS,
    EstimatorCase: ESTIMATORS,
    SourceCase: SOURCES,
}
FAULTS = [(kind, *fault) for kind, faults in TABLES.items() for fault in faults]


def case_of(kind: Any, part: Any, options: dict[str, Any]) -> Case:
    return kind(part, range(12), **options) if kind is SourceCase else kind(part, **options)


@pytest.mark.parametrize(
    ("kind", "name", "part", "options"), FAULTS, ids=[f"{kind.__name__}-{name}" for kind, name, _, _ in FAULTS]
)
def test_a_fault_is_found(kind: Any, name: str, part: Any, options: dict[str, Any]) -> None:
    case = case_of(kind, part, options)
    check = next(check for check in case.checks if check.__name__ == name)
    with pytest.raises(AssertionError, match=rf"(?s)fails {name}: expected .*\. |fails {name}: expected no error"):
        PartCheck(case, check)()


def test_every_check_is_here() -> None:
    every = {check for kind in TABLES for check in kind.checks}
    found = {name for _, name, _, _ in FAULTS}
    assert {check.__name__ for check in every} <= found
    with_faults = {(kind, name) for kind, name, _, _ in FAULTS}
    once = [check for check in every if sum(check in kind.checks for kind in TABLES) == 1]
    for kind in TABLES:
        assert {(kind, check.__name__) for check in once if check in kind.checks} <= with_faults


@parametrize_with_checks([faulty_metrics.Norm(), checks_of(faulty_parts.Numbers(), range(12))])
def test_without_the_fault_they_pass(check: PartCheck) -> None:
    check()


def test_a_failure_that_is_expected() -> None:
    check_metric(faulty_metrics.NoUnit(), expected_failures={"guide_says_the_unit": "it has none"})
    with pytest.raises(AssertionError, match="passes guide_says_the_unit: take it out of expected_failures"):
        check_metric(faulty_metrics.Norm(), expected_failures={"guide_says_the_unit": "it has none"})
    with pytest.raises(ConfigurationError, match=r"expected_failures=\['guide'\]: Norm has the checks \['is_one', "):
        check_metric(faulty_metrics.Norm(), expected_failures={"guide": "it has none"})


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"expected an object of Metric, Aggregator, .* or an estimator"):
        checks_of(3)
    with pytest.raises(ConfigurationError, match=r"axioms=\['fairness'\]: there are \['efficiency', "):
        check_metric(LeaveOneOut(), axioms=["fairness"])
    with pytest.raises(AssertionError, match="plays no game: its update names no utility"):
        check_metric(faulty_metrics.Norm(), axioms=["efficiency"])


def test_names_for_pytest() -> None:
    checks = [*checks_of(UniformSampler(2)), *checks_of(UniformSampler(3))]
    mark = parametrize_with_checks([checks[:2], checks[-1:]])
    assert mark.kwargs["ids"] == ["UniformSampler-is_one", "UniformSampler-pickles", "UniformSampler2-resumes_in_a_fit"]


def test_only_nan_is_nan() -> None:
    nan = float("nan")
    assert same({"a": [nan, 1.0]}, {"a": [nan, 1.0]})
    assert not same(nan, 1.0)
    assert not same([1.0], [nan], rtol=0.1)
