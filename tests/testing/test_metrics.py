"""Every metric of ``flsv.metrics`` passes the checks of :mod:`flsv.testing`."""

from flsv import metrics
from flsv.benchmark.registry import SampleCount, TrainingLoss
from flsv.testing.checks import PartCheck
from helpers.metric_cases import METRIC_CASES, METRICS, checks_of_metric
from helpers.part_cases import parametrize_checks

OF_THE_BENCHMARK = [checks_of_metric(SampleCount()), checks_of_metric(TrainingLoss())]
#: That train federations.
IN_FITS = ("vmap_is_equal", "remote_is_equal", "resumes_in_a_fit", "validation_is_declared")


@parametrize_checks([[*METRICS, *OF_THE_BENCHMARK]], IN_FITS)
def test_every_metric_passes_the_checks_for_metrics(check: PartCheck) -> None:
    check()


def test_every_exported_metric_is_checked() -> None:
    assert len(METRIC_CASES) > 15
    for name in {*metrics.__all__} - {"ContributionMetric"}:
        assert name in METRIC_CASES, (
            f"tests/helpers/metric_cases.py: add to METRICS of({name}(...))"
        )
