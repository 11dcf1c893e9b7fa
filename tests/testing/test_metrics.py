"""Every metric of ``flsv.metrics`` passes the checks of :mod:`flsv.testing`."""

import pytest
from torchmetrics import Metric

from benchmark.registry import SampleCount, TrainingLoss
from flsv import metrics
from flsv.metrics import ClassSpecificShapley
from flsv.testing import fits
from flsv.testing.metric import results_of
from flsv.testing.rounds import HALF, ROUND_INDICES
from helpers import refused
from helpers.metric_cases import METRIC_CASES, METRICS, checks_of_metric
from helpers.part_cases import parametrize_checks

OF_THE_BENCHMARK = [checks_of_metric(SampleCount()), checks_of_metric(TrainingLoss())]
#: That train federations, or compute values more than once.
SHARED = (
    "vmap_is_equal",
    "remote_is_equal",
    "odd_rounds_have_values",
    "equal_clients_are_equal",
    "one_row_per_client",
    "resumes",
    "inference_mode_is_no_matter",
    "inputs_stay",
    "wrong_labels_are_worth_less",
    "no_samples_are_worth_nothing",
)


@parametrize_checks([[*METRICS, *OF_THE_BENCHMARK]], SHARED)
def test_every_metric_passes_the_checks_for_metrics(check):
    check()


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(Metric, "merge_state"), reason="torchmetrics before 1.5 cannot merge"
)
def test_merged_metrics_are_as_one_but_those_that_depend_on_the_order_of_rounds():
    refusing = set()
    for name, case in METRIC_CASES.items():
        if case.part.full_state_update:
            metric = case.updated_by_half()
            with pytest.raises(RuntimeError, match="full_state_update"):
                metric.merge_state(case.updated_by_half())
            refusing.add(name)
            continue
        metric = case.updated(ROUND_INDICES[HALF:-1])
        metric.merge_state(case.updated_by_half())
        case.updated(ROUND_INDICES[-1:], metric)  # intervals are of the last update
        fits.expect_same(results_of(metric), case.results(), rtol=1e-4)

    assert refusing == {"CosineGradientShapley", "OneRoundShapley"}


@pytest.mark.skipif(
    not hasattr(Metric, "merge_state"), reason="torchmetrics before 1.5 cannot merge"
)
def test_metrics_with_other_arguments_are_not_merged():
    metric = ClassSpecificShapley(num_clients=2, num_classes=2)
    slower_metric = ClassSpecificShapley(num_clients=2, num_classes=2, momentum=0.25)

    with refused("cannot be merged"):
        metric.merge_state(slower_metric)


def test_every_exported_metric_is_checked():
    assert len(METRIC_CASES) > 15
    for name in {*metrics.__all__} - {"ContributionMetric"}:
        assert name in METRIC_CASES, (
            f"tests/helpers/metric_cases.py: add to METRICS of({name}(...))"
        )
