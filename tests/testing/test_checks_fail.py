"""Each check can fail: a part with one fault is found by the check of that fault."""

import pytest
from testing import faulty_parts
from testing.part_cases import PersonalizerCase, expect_the_same

from flsv.aggregation import FedAvg
from flsv.testing import check_part, parametrize_with_checks
from flsv.testing.checks import PartCheck, equal
from flsv.testing.metric import CHECKS_OF_CLAIMS, MetricCase
from flsv.testing.rounds import COHORTS, LEARNING_KINDS, PreparedRounds
from flsv.testing.samplers import SamplerCase
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase, odd_rounds_end
from flsv.utilities.errors import ConfigurationError
from helpers import refused

TABLES = {
    MetricCase: faulty_parts.METRICS,
    AggregatorCase: faulty_parts.AGGREGATORS,
    ClientAlgorithmCase: faulty_parts.ALGORITHMS,
    SamplerCase: faulty_parts.SAMPLERS,
}
FAULTS = [(kind, *fault) for kind, faults in TABLES.items() for fault in faults]
FAULTS.append((PersonalizerCase, "vmap_is_equal", faulty_parts.StartsFromTheLast()))


@pytest.mark.by_turn
@pytest.mark.fast_rows("Sampler*", "*-resumes", "*-learns", "*-trains_alone")
@pytest.mark.parametrize(
    ("kind", "name", "part"),
    FAULTS,
    ids=[f"{kind.__name__}-{name}" for kind, name, _ in FAULTS],
)
def test_each_check_fails_for_the_part_with_its_fault(kind, name, part):
    case = kind(part)
    check = next(check for check in case.checks if check.__name__ == name)
    with pytest.raises(AssertionError, match=rf"(?s)fails {name}: got .*\. "):
        PartCheck(case, check)()


def test_every_check_has_a_part_with_its_fault():
    every = {check.__name__ for checks in CHECKS_OF_CLAIMS.values() for check in checks}
    for kind in TABLES:
        every.update(check.__name__ for check in kind.checks)
    with_a_fault = {name for _, name, _ in FAULTS}

    assert every == with_a_fault - {"vmap_is_equal"}  # of the tests alone


def test_a_claim_that_does_not_exist_is_refused():
    with refused(r"FaultyNorm: claims = \['truth'\], expected"):
        check_part(faulty_parts.faulty(faulty_parts.Norm, claims=("truth",)))


@pytest.mark.by_turn
@pytest.mark.fast_rows
@parametrize_with_checks([faulty_parts.Norm()])
def test_checks_pass_for_the_metric_without_a_fault(check):
    check()


def test_checks_pass_for_an_aggregator_that_trusts_nobody():
    PartCheck(AggregatorCase(faulty_parts.FLTrust()), odd_rounds_end)()


@pytest.mark.slow
def test_expected_failure_of_a_part_with_its_fault_is_allowed():
    check_part(faulty_parts.COUNTS, expected_failures={"resumes": "meant", "merges": "meant"})


@pytest.mark.slow
def test_expected_failure_that_passes_or_does_not_exist_is_refused():
    faultless = faulty_parts.Norm()

    with pytest.raises(AssertionError, match="passes inputs_stay: take it out"):
        check_part(faultless, expected_failures={"inputs_stay": "meant"})

    with refused(r"expected_failures=\['guide'\]: Norm has the checks"):
        check_part(faultless, expected_failures={"guide": "meant"})


def test_object_that_is_no_part_has_no_checks():
    with refused(r"3 has no checks: expected an object of Metric, "):
        check_part(3)


def test_a_refusal_that_nobody_has_declared_is_a_failure():
    def refuse(loop):
        raise ConfigurationError("not in this loop.")

    case = AggregatorCase(FedAvg())
    with pytest.raises(AssertionError, match=r"refusal: not in this loop\."):
        expect_the_same(case, refuse, rounds=1, rtol=0.0)


@pytest.mark.parametrize("kind", [None, *LEARNING_KINDS])
def test_prepared_rounds_of_each_kind_end_after_the_last_cohort(kind):
    rounds = PreparedRounds(kind=kind)

    with pytest.raises(IndexError):
        rounds[len(COHORTS)]


def test_equal_takes_nan_as_equal_only_to_nan():
    nan = float("nan")
    assert equal({"a": [nan, 1.0]}, {"a": [nan, 1.0]})
    assert not equal(nan, 1.0)
    assert not equal([1.0], [nan], rtol=0.1)
