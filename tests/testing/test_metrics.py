"""Every metric of ``flsv.metrics`` passes the checks of :mod:`flsv.testing`."""

from __future__ import annotations

import pytest
from dealt_checks import dealt
from metric_table import CASES, METRICS

from flsv import metrics
from flsv.benchmark.registry import SampleCount, TrainingLoss
from flsv.testing import PartCheck, checks_of
from flsv.testing.checks import refused
from flsv.testing.metric_case import EVERY, HALF, MetricCase

OF_THE_BENCHMARK = [checks_of(SampleCount()), checks_of(TrainingLoss())]
#: That train federations; the first and the last look at the same one.
IN_FITS = ("appears_in_a_fit", "vmap_is_equal", "remote_is_equal", "resumes_in_a_fit")


@dealt([[*METRICS, *OF_THE_BENCHMARK]], IN_FITS)
def test_metrics(check: PartCheck) -> None:
    check()


@pytest.mark.skipif(not CASES["LeaveOneOut"].can_merge, reason="torchmetrics before 1.5 cannot merge")
def test_only_one_game_for_a_whole_run_cannot_be_put_together() -> None:
    def merge(case: MetricCase) -> None:
        later = case.fed(EVERY[HALF:])
        later.merge_state(case.half())

    assert {name for name, case in CASES.items() if refused(lambda case=case: merge(case))} == {"OneRoundShapley"}


def test_all_metrics_are_here() -> None:
    assert {*CASES, "ContributionMetric"} == set(metrics.__all__)
