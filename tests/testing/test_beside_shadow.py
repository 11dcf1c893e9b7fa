"""Every part of a federation works beside ShadowShapley, or is refused with a reason."""

import inspect

import pytest
from testing.metric_cases import METRICS, OwnMetricCase
from testing.part_cases import FilterCase
from testing.test_parts import PARTS

import flsv.contrib
from flsv.aggregation import Aggregator
from flsv.contrib import InRunShapley, InRunValues
from flsv.filters import UpdateFilter
from flsv.metrics import ContributionMetric, ShadowShapley
from flsv.personalization import Personalizer
from flsv.testing.checks import equal
from flsv.testing.strategies import AggregatorCase, ClientAlgorithmCase
from flsv.training.algorithms import ClientAlgorithm
from helpers import refused

CASES_OF_CONTRIBUTED = {
    Aggregator: AggregatorCase,
    ClientAlgorithm: ClientAlgorithmCase,
    ContributionMetric: OwnMetricCase,
    UpdateFilter: FilterCase,
}
#: What contributed parts need beside them.
NEEDED_PARTS = {
    "InRunShapley": {"client_algorithm": InRunValues()},
    "InRunValues": {"metrics": {"in_run": InRunShapley()}},
}
OWN_STARTS = "a start point of its own"
DRAWN_BY_VALUES = "cannot draw cohorts for a coalition"
#: Why coalitions cannot be trained with a part.
REASONS = {
    "DomainRelevance": OWN_STARTS,  # by the personalizer that it needs
    "FedRep": "a part of each model stays at the clients",
    "FixedCohort": "never draws the clients",
    "GaussianPrivacy": "noise would be spent",
    "InnerProductManipulation": "compare the updates of one cohort",
    "PowerOfChoice": DRAWN_BY_VALUES,
    "ShapleyImportanceSampler": DRAWN_BY_VALUES,
    "SoftmaxSampler": DRAWN_BY_VALUES,
}


def contributed_cases():
    for name in flsv.contrib.__all__:
        contributed = getattr(flsv.contrib, name)
        for base, make_case in CASES_OF_CONTRIBUTED.items():
            if inspect.isclass(contributed) and issubclass(contributed, base):
                yield make_case(contributed(), **NEEDED_PARTS.get(name, {}))


def parametrize_cases():
    cases = [*contributed_cases()]
    for rows in (*PARTS, METRICS):
        cases += [checks[0].case for checks in rows if checks[0].case.name != "ShadowShapley"]
    rows = [pytest.param(case, id=f"{index}-{case.name}") for index, case in enumerate(cases)]
    return pytest.mark.parametrize("case", rows)


def fit_with_shadow(case):
    """Fit a round with a part and ShadowShapley."""
    metrics = dict(case.make().metrics)
    metrics.pop("epsilon", None)  # which the loop adds
    metrics["shadow"] = ShadowShapley(coalitions="singles")
    return case.fit(case.make(metrics=metrics), rounds=1)


@pytest.mark.by_turn
@pytest.mark.slow
@parametrize_cases()
def test_coalitions_are_trained_beside_a_part_or_refused_with_a_reason(case):
    reason = REASONS.get(case.name)
    if isinstance(case.part, Personalizer):
        reason = OWN_STARTS
    if reason is not None:
        with refused(f".*{reason}"):
            fit_with_shadow(case)
        return

    fit = fit_with_shadow(case)

    values = fit.loop.values["shadow"]
    assert values.missing is None
    assert values.value.isfinite().any()
    alone = case.fit(case.make(), rounds=1)
    assert equal(fit.models, alone.models)
    for name, contribution in alone.loop.contributions.items():
        assert equal(fit.loop.contributions[name], contribution)
