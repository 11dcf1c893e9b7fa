"""Every metric of ``flsv.metrics`` passes the checks of :mod:`flsv.testing`."""

import pytest
from testing.metric_cases import METRIC_CASES, METRICS, checks_of_metric
from testing.part_cases import parametrize_checks
from torchmetrics import Metric

from benchmark.registry import SampleCount, TrainingLoss
from flsv import metrics
from flsv.metrics import ClassSpecificShapley
from helpers import refused

OF_THE_BENCHMARK = [checks_of_metric(SampleCount()), checks_of_metric(TrainingLoss())]
#: That train federations, or compute values more than once.
SHARED = (
    "vmap_is_equal",
    "remote_is_equal",
    "odd_rounds_have_values",
    "equal_clients_are_equal",
    "one_row_per_client",
    "resumes",
    "merges",
    "places_do_not_count",
    "inference_mode_is_no_matter",
    "inputs_stay",
    "wrong_labels_are_worth_less",
    "no_samples_are_worth_nothing",
)


@pytest.mark.by_turn
@parametrize_checks([[*METRICS, *OF_THE_BENCHMARK]], SHARED)
def test_every_metric_passes_the_checks_for_metrics(check):
    check()


@pytest.mark.skipif(
    not hasattr(Metric, "merge_state"), reason="torchmetrics before 1.5 cannot merge"
)
@pytest.mark.parametrize("name", ["CosineGradientShapley", "OneRoundShapley"])
def test_metrics_that_depend_on_all_rounds_are_not_merged(name):
    case = METRIC_CASES[name]

    with pytest.raises(RuntimeError, match="full_state_update"):
        case.updated_by_half().merge_state(case.updated_by_half())


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
            f"tests/testing/metric_cases.py: add to METRICS of({name}(...))"
        )
