"""Every metric of ``flsv.metrics`` passes the checks of :mod:`flsv.testing`."""

from functools import partial

import pytest
from torchmetrics import Metric

from flsv import metrics
from flsv.benchmark.registry import SampleCount, TrainingLoss
from flsv.testing.checks import raises_value_error
from flsv.testing.metric import MetricCase
from flsv.testing.rounds import HALF, ROUND_INDICES
from helpers.metric_cases import METRIC_CASES, METRICS, checks_of_metric
from helpers.part_cases import parametrize_checks

OF_THE_BENCHMARK = [checks_of_metric(SampleCount()), checks_of_metric(TrainingLoss())]
#: That train federations.
IN_FITS = ("vmap_is_equal", "remote_is_equal", "resumes_in_a_fit", "validation_is_declared")


@parametrize_checks([[*METRICS, *OF_THE_BENCHMARK]], IN_FITS)
def test_every_metric_passes_the_checks_for_metrics(check):
    check()


@pytest.mark.skipif(
    not hasattr(Metric, "merge_state"), reason="torchmetrics before 1.5 cannot merge"
)
def test_only_metrics_that_depend_on_round_order_refuse_merging():
    refusing = set()
    for name, case in METRIC_CASES.items():
        if raises_value_error(partial(merge_halves, case)):
            refusing.add(name)

    assert refusing == {"CosineGradientShapley", "OneRoundShapley"}


def merge_halves(case: MetricCase) -> None:
    """Merge a metric of the first half of the rounds into one of the second half."""
    metric = case.updated(ROUND_INDICES[HALF:])
    metric.merge_state(case.updated_by_half())


def test_every_exported_metric_is_checked():
    assert len(METRIC_CASES) > 15
    for name in {*metrics.__all__} - {"ContributionMetric"}:
        assert name in METRIC_CASES, (
            f"tests/helpers/metric_cases.py: add to METRICS of({name}(...))"
        )
