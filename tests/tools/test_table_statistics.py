"""Paired comparisons against SciPy and by hand."""

from __future__ import annotations

import math

import pytest
from scipy import stats
from table_statistics import against, against_best, best_other, gather, means, over_columns, paired

OURS = {0: 61.0, 1: 64.5, 2: 62.0, 3: 66.0, 4: 63.5}
OTHER = {0: 60.0, 1: 62.0, 2: 61.5, 3: 63.0, 4: 62.0}


def test_interval_and_p_are_scipys() -> None:
    found = paired(OURS, OTHER)
    test = stats.ttest_rel(list(OURS.values()), list(OTHER.values()))
    interval = test.confidence_interval(0.95)
    assert (found.low, found.high, found.p) == pytest.approx((interval.low, interval.high, test.pvalue))
    assert found.pairs == 5
    assert found.verdict == "better"
    assert paired(OTHER, OURS).verdict == "worse"


def test_interval_by_hand() -> None:
    """Differences 1, 3: mean 2, standard error 1, and t of one degree of freedom is 12.706 at 97.5 %."""
    found = paired({0: 2.0, 1: 5.0}, {0: 1.0, 1: 2.0})
    assert (found.mean, found.low, found.high) == pytest.approx((2.0, 2 - 12.7062, 2 + 12.7062), abs=1e-4)
    assert found.verdict == "not told apart"


def test_pairs_are_the_seeds_that_both_have() -> None:
    """In another order, and with one more seed on each side."""
    shuffled = {seed: OTHER[seed] for seed in (3, 1, 4, 0, 2)} | {9: 0.0}
    assert paired({**OURS, 7: 100.0}, shuffled) == paired(OURS, OTHER)


def test_pairing_matters() -> None:
    """Rows whose spreads overlap, and whose difference is nearly the same in each seed."""
    low = {0: 10.0, 1: 50.0, 2: 90.0}
    assert paired({seed: value + 1 + seed / 10 for seed, value in low.items()}, low).verdict == "better"


@pytest.mark.parametrize(("ours", "pairs"), [({}, 0), ({0: 1.0}, 1), ({0: float("nan"), 1: 2.0}, 1)])
def test_nothing_is_claimed_of_too_few(ours: dict[int, float], pairs: int) -> None:
    found = paired(ours, {0: 0.0, 1: 0.0})
    assert found.pairs == pairs
    assert math.isnan(found.low)
    assert found.verdict == "not told apart"


def test_equal_differences() -> None:
    assert paired({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0}).verdict == "not told apart"
    assert paired({0: 1.5, 1: 2.5}, {0: 1.0, 1: 2.0}).verdict == "better"


def test_bootstrap() -> None:
    """Percentiles of the means: within the range of the differences, around their mean."""
    found = paired(OURS, OTHER, "bootstrap")
    assert 0.5 <= found.low < found.mean < found.high <= 3.0
    assert found.high - found.low < paired(OURS, OTHER).high - paired(OURS, OTHER).low
    assert paired(OURS, OTHER, "bootstrap") == found


TABLE = {
    "noise": {"FedAvg": OTHER, "RFA": dict.fromkeys(range(5), 50.0), "AFedSV": OURS, "AFedSV+": OURS},
    "tail": {"FedAvg": {0: 1.0, 1: 2.0}, "RFA": {0: 2.0, 1: 3.5}, "AFedSV": {0: 2.5, 1: 3.5}},
}


def test_the_best_other_row_is_named() -> None:
    assert best_other(TABLE["noise"], ("AFedSV", "AFedSV+")) == "FedAvg"
    assert best_other(TABLE["tail"], ("AFedSV", "AFedSV+")) == "RFA"
    assert best_other({"AFedSV": OURS}, ("AFedSV",)) is None
    lines = against_best(TABLE, ["AFedSV", "AFedSV+"]).splitlines()
    assert lines[2].startswith("| AFedSV | **+1.70 [")
    assert "against FedAvg | +0.25 [" in lines[2]
    assert lines[2].endswith("against RFA |")
    assert lines[3].endswith("| - |")
    assert "against RFA" in against_best(TABLE, ["AFedSV"], others=["RFA"]).splitlines()[2].split("|")[2]


def test_means_and_all_others() -> None:
    lines = means(TABLE, ["FedAvg", "AFedSV", "missing"]).splitlines()
    assert lines[2:] == ["| FedAvg | 61.7 ± 1.1 | 1.5 ± 0.7 |", "| AFedSV | **63.4 ± 2.0** | **3.0 ± 0.7** |"]
    assert "| **+1.70 [" in against(TABLE, "AFedSV", ["FedAvg"])


def test_gather() -> None:
    results = {("a", "x", 0): {"accuracy": 1.0}, ("a", "x", 1): {"accuracy": 2.0}, ("b", "y", 0): {"accuracy": 3.0}}
    assert gather(results, lambda r: r["accuracy"]) == {"x": {"a": {0: 1.0, 1: 2.0}}, "y": {"b": {0: 3.0}}}


def test_the_mean_over_columns_takes_only_whole_rows_and_seeds() -> None:
    table = {
        "a": {"x": {0: 1.0, 1: 2.0, 2: 3.0}, "y": {0: 0.0}},
        "b": {"x": {0: 3.0, 2: 5.0}, "z": {0: 1.0}},
    }
    assert over_columns(table, "both") == {"both": {"x": {0: 2.0, 2: 4.0}}}
    assert over_columns({"a": table["a"]}, "both") == {}
