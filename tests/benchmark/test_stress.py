"""What a client gains that cheats."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_federation import small

from flsv.benchmark.federation import Federation
from flsv.benchmark.page import stress_markdown as markdown
from flsv.benchmark.registry import entry
from flsv.benchmark.stress import CHEATS, SAFEGUARDS, Trial, gain, stress
from flsv.errors import ConfigurationError
from flsv.filters import OutlierFilter, SampleCap
from flsv.personalization import Standalone


def trial(before: float, after: float) -> Trial:
    return Trial("f", 0, 0, {"m": before}, {"m": after}, 0.0, 0, 0)


def test_a_gain_is_the_mean_of_paired_differences_with_students_interval() -> None:
    found = gain([trial(0.1, 0.3), trial(0.2, 0.3), trial(0.3, float("nan"))], "m")
    assert (found.before, found.after, found.points) == pytest.approx((15, 30, 15))
    # t(0.95, 1 degree) = 6.3138; the differences are 20 and 10, their standard error 5.
    assert found.interval == pytest.approx(6.3138 * 5, rel=1e-4)
    assert found.trials == 2
    assert gain([trial(0.1, 0.3)], "other").trials == 0


def test_cheats_change_one_client_and_keep_what_there_is() -> None:
    federation = small()
    samples = federation.datamodule().num_samples
    for name, cheat in CHEATS.items():
        cheated = cheat.apply(federation, 0)
        after = cheated.datamodule().num_samples
        if name == "collusion":
            assert after.tolist() == [int(samples[:2].sum())] * 2 + samples[2:].tolist()
            continue
        assert torch.equal(after[1:3], samples[1:]), name
        attacks = cheated.attackers()
        assert attacks[0].clients == [2]
        if len(attacks) > 1:
            assert attacks[1].clients == [0, *cheat.together(0, 3)]
            assert torch.equal(after, samples)


def test_counting_samples_pays_whoever_counts_twice(tmp_path: Path) -> None:
    said: list[str] = []
    arguments = [{"small": small()}, dict([entry("size")]), ["sybils", "duplication"], ["none", "uniform"]]
    trials = stress(*arguments, seeds=1, attackers_each=1, folder=tmp_path, say=said.append)
    counts = small().datamodule().num_samples.double()
    own, total = counts[0], counts.sum()
    for cheat, times in (("sybils", 2), ("duplication", 3)):
        (one,) = trials[cheat, "none"]
        assert one.client == 0
        assert one.before["size"] == pytest.approx(float(own / total), abs=1e-6)
        assert one.after["size"] == pytest.approx(float(times * own / (total + (times - 1) * own)), abs=1e-6)
    assert len(said) == 6
    page = markdown(trials, ["size"])
    assert "The best cheat, and what a safeguard leaves of it" in page
    assert "| none | " in page.partition("## What a safeguard costs where nobody cheats")[2]
    assert "| duplication | has each of its samples three times | uniform |" in page
    again = stress(*arguments, seeds=1, attackers_each=1, folder=tmp_path, say=said.append)
    assert len(said) == 6  # all was there
    for key, (one,) in trials.items():
        (read,) = again[key]
        assert read.cost == pytest.approx(one.cost, abs=1e-5)  # six digits are kept
        assert read.utility == pytest.approx(one.utility, abs=1e-5)
        assert replace(read, cost=one.cost, before=one.before, after=one.after, utility=one.utility) == one
        for mine, theirs in ((read.before, one.before), (read.after, one.after)):
            assert mine == pytest.approx(theirs, abs=1e-5)


def test_what_is_kept_of_other_settings_is_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    def gained(federation: Federation) -> float:
        trials = stress(
            {"small": federation}, dict([entry("size")]), ["duplication"], ["claims"],
            seeds=1, attackers_each=1, folder=tmp_path, say=said.append,
        )  # fmt: skip
        return trials["duplication", "claims"][0].after["size"]

    first = gained(small())
    monkeypatch.setitem(SAFEGUARDS, "claims", {"filters": [OutlierFilter(), SampleCap(9.0)]})  # of the same name
    assert gained(small()) > first + 0.05
    assert len(said) == 4
    assert gained(replace(small(), root="elsewhere", title="of another title")) > first + 0.05
    assert len(said) == 4
    gained(replace(small(), rounds=1))
    assert len(said) == 6


def test_two_that_collude_are_counted_together_and_a_cap_takes_the_gain_of_duplication(tmp_path: Path) -> None:
    trials = stress(
        {"small": small()},
        dict([entry("size")]),
        ["collusion", "duplication"],
        ["none", "claims"],
        seeds=1,
        attackers_each=1,
        folder=tmp_path,
        say=lambda text: None,
    )
    counts = small().datamodule().num_samples.double()
    (one,) = trials["collusion", "none"]
    both = float(counts[:2].sum())
    assert one.before["size"] == pytest.approx(both / float(counts.sum()), abs=1e-6)
    assert one.after["size"] == pytest.approx(2 * both / (2 * both + float(counts[2:].sum())), abs=1e-6)
    (free,), (capped,) = trials["duplication", "none"], trials["duplication", "claims"]
    assert capped.after["size"] - capped.before["size"] < (free.after["size"] - free.before["size"]) / 2


def test_what_a_safeguard_costs_is_of_the_honest_runs_each_counted_once() -> None:
    runs = [(0, 0.9, 1.0), (0, 0.9, 1.0), (1, 0.5, 0.0)]
    trials = {
        ("scaling", guard): [
            Trial("f", seed, 0, {"m": 0.1}, {"m": 0.2}, 0.0, 0, 0, utility - off, {"m": rank}, warned=1)
            for seed, utility, rank in runs
        ]
        for guard, off in (("none", 0.0), ("claims", 0.1))
    }
    page = markdown(trials, ["m"])
    assert "| safeguard | utility of the model | `m` | warned of |" in page
    assert "| none | 0.700 | 0.50 | 2 |" in page
    assert "| claims | 0.600 | 0.50 | 2 |" in page
    assert "| `m` | scaling | +10.0 ± 0.0 | +10.0 ± 0.0 | scaling +10.0 ± 0.0 |" in page


def test_who_splits_its_samples_gains_nothing_under_values_weighed_by_samples(tmp_path: Path) -> None:
    names = ["cssv", "flsv.metrics.ClassSpecificShapley(weighting='samples')"]
    entries = dict(entry(name) for name in names)
    federation = small(rounds=4, attacks=[], bad={})
    trials = stress(
        {"small": federation}, entries, ["split_sybils"], ["none"], seeds=1, attackers_each=1, folder=tmp_path, say=len
    )
    (one,) = trials["split_sybils", "none"]
    plain, weighed = (one.after[name] - one.before[name] for name in entries)
    assert plain > 0.05
    assert weighed < plain / 4
    counts = federation.datamodule().num_samples.double()
    assert one.before[list(entries)[1]] == pytest.approx(float(counts[0] / counts.sum()), abs=0.1)


def test_a_false_report_pays_where_clients_judge_models(tmp_path: Path) -> None:
    federation = small()
    federation = replace(federation, data={**federation.data, "splits": {"client_val": 0.3}})
    entries = dict([entry("flsv.metrics.ContributionEstimation"), entry("size")])
    trials = stress(
        {"small": federation}, entries, ["reports"], ["none"], seeds=1, attackers_each=1, folder=tmp_path, say=len
    )
    (one,) = trials["reports", "none"]
    assert one.after["ContributionEstimation"] > one.before["ContributionEstimation"] + 0.01
    assert one.after["size"] == one.before["size"]
    assert one.cost == 0


def test_two_that_send_the_opposite_are_paid_for_it_unless_updates_are_bounded(tmp_path: Path) -> None:
    proportions = {"class_path": "flsv.data.SizePartitioner", "init_args": {"proportions": [1] * 8, "seed": 1}}
    federation = small(rounds=5, attacks=[], bad={})
    federation = replace(federation, data={**federation.data, "partitioner": proportions})
    entries, guards = dict([entry("cssv")]), ["none", "claims", "all"]
    found = stress(
        {"small": federation}, entries, ["flip"], guards, seeds=1, attackers_each=1, folder=tmp_path, say=len
    )
    free, bounded, guarded = (found["flip", guard][0] for guard in guards)
    gains = [each.after["cssv"] - each.before["cssv"] for each in (free, bounded, guarded)]
    assert free.before["cssv"] == pytest.approx(0.25, abs=0.1)
    assert gains[0] > 0.3
    assert max(gains[1:]) < gains[0] / 3
    assert free.cost > 2 * max(bounded.cost, 0)
    assert (free.noticed, guarded.after["cssv"]) == (0, 0)


def test_a_cheat_that_a_federation_refuses_is_left_out_and_said(tmp_path: Path) -> None:
    said: list[str] = []
    options = {"personalizer": Standalone()}
    found = stress(
        {"small": small()}, dict([entry("size")]), ["flip", "duplication"], ["none"],
        seeds=1, attackers_each=1, options=options, folder=tmp_path, say=said.append,
    )  # fmt: skip
    assert found["flip", "none"] == []
    assert len(found["duplication", "none"]) == 1
    assert any("flip of 0, is left out: " in line and "everybody starts from the global model" in line for line in said)
    assert "| flip | " in markdown(found, ["size"])


def test_unknown_cheats() -> None:
    with pytest.raises(ConfigurationError, match="there is no 'bribe': expected one of scaling"):
        stress({}, {}, ["bribe"])
