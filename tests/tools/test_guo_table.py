"""Guo et al.'s comparison at the size of a test, its checks, and its report."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

NAMES = ("guo_table", "guo_federation", "guo_report")


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    """What the tool's files define."""
    parts = [vars(importlib.import_module(name)) for name in NAMES]
    return SimpleNamespace(**{name: value for part in parts for name, value in part.items()})


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


@pytest.fixture
def settings(tool: SimpleNamespace) -> dict[str, Any]:
    return {"softmax": tool.Setting("softmax", 150, 10, 0.1, rounds=2)}


def test_all_algorithms_in_one_scenario(tool: SimpleNamespace, settings: dict[str, Any]) -> None:
    results = tool.value_clients(("digits", "softmax", "biased", 0), settings=settings, root="data")
    assert {result.algorithm for result in results} == set(tool.ALGORITHMS)
    by_name = {result.algorithm: result for result in results}
    for result in results:
        assert len(result.values) == 5
        assert torch.tensor(result.values).isfinite().all()
        assert result.training > 0
        assert result.valuation > 0
    assert (by_name["exact"].coalitions, by_name["exact"].trainings) == (32, 30)
    assert by_name["K-subset"].trainings <= tool.K_SUBSET_BUDGET
    assert by_name["TMC"].trainings < 30
    assert by_name["OR"].coalitions == 32
    assert by_name["MR"].coalitions == by_name["TMR"].coalitions == by_name[tool.OURS].coalitions == 2 * 32
    rows = torch.tensor(by_name["MR"].rows)
    total, absolute = rows.sum(1, keepdim=True), rows.abs().sum(1, keepdim=True)
    shares = rows / torch.where(total < 1e-6, absolute, total)
    torch.testing.assert_close(torch.tensor(by_name["MR"].values), shares.sum(0))
    torch.testing.assert_close(torch.tensor(by_name["TMR"].values), 0.8 * shares[0] + 0.64 * shares[1])
    assert by_name["exact"].accuracy == by_name["MR"].accuracy
    # The grand coalition, retrained, is the FedAvg run: what all of them together gain is the same.
    assert sum(by_name["exact"].values) == pytest.approx(float(rows.sum()), abs=1e-6)
    text = tool.report({("digits", "softmax", "biased", 0): results}, {}, settings, 1)
    for algorithm in tool.ALGORITHMS:
        assert text.count(f"| {algorithm} |") == 2
    figure = tool.draw({("digits", "softmax", "biased", 0): results}, "digits")
    assert [len(ax.lines) for ax in figure.axes] == [6]


def test_without_retraining(tool: SimpleNamespace, settings: dict[str, Any]) -> None:
    cell = ("digits", "softmax", "noisy", 0)
    results = tool.value_clients(cell, settings=settings, root="data", retrain=False)
    assert not {result.algorithm for result in results} & set(tool.RETRAINING)


@pytest.mark.parametrize(
    ("scenario", "values", "met"),
    [
        ("same", [1.0, 0.95, 0.91, 1.0, 0.93], True),
        ("same", [1.0, 0.95, 0.89, 1.0, 0.93], False),
        ("same", [-0.1, 0.1, 0.1, 0.1, 0.1], False),
        ("same", [0.0] * 5, True),
        ("sizes", [0.1, 0.2, 0.3, 0.31, 0.5], True),
        ("sizes", [0.1, 0.3, 0.2, 0.4, 0.5], False),
        ("sizes", [0.1] * 5, False),
        ("noisy", [0.5, 0.4, 0.3, 0.2, 0.1], True),
        ("noisy", [0.5, 0.4, 0.4, 0.2, 0.1], False),
        ("mixtures", [0.3, 0.3, 0.3, 0.1, 0.01], True),
        ("mixtures", [0.3, 0.3, 0.3, 0.1, -0.01], False),
        ("biased", [0.10, 0.11, 0.12, 0.1, 0.5], True),
        ("biased", [0.10, 0.11, 0.15, 0.1, 0.5], False),
        ("biased", [0.10, 0.11, 0.12, 0.1, 0.05], False),
        ("biased", [-0.10, -0.11, -0.12, -0.1, 0.5], False),
    ],
)
def test_checks(tool: SimpleNamespace, scenario: str, values: list[float], met: bool) -> None:
    assert tool.check(scenario, values)[0] is met


def test_a_check_says_not_met_and_counts_the_seeds(tool: SimpleNamespace) -> None:
    runs = [[1.0] * 5, [1.0] * 5, [0.2, 1.0, 1.0, 1.0, 1.0]]
    assert tool.verdict("same", runs) == "not met: 27 % apart (2/3)"
    assert tool.verdict("sizes", [[0.1, 0.2, 0.3, 0.4, 0.5]]) == "met: 4 of 4 steps up (1/1)"
    cases = {}
    for source, good in (("mnist", True), ("fashion_mnist", False)):
        values = [0.2] * 5 if good else [0.1, 0.3, 0.2, 0.2, 0.2]
        result = tool.Result(tool.OURS, values, 0.9, 1.0, 1.0, 640, rows=[values])
        cases[source, "softmax", "same", 0] = [result]
    text = tool.report(cases, {}, tool.PRESETS, 1)
    assert f"| {tool.OURS} | 1 of 2 (1 of 2 runs) |" in text
    assert "not met: 67 % apart (0/1)" in text


def test_class_ordered_batches(tool: SimpleNamespace, settings: dict[str, Any]) -> None:
    data = tool.federated_data("digits", "same", settings["softmax"], 0, "data", tool.ClassOrdered)
    data.setup("fit")
    first, again = ([y for _, y in data.client_loader(2)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert (torch.cat(first).diff() >= 0).all()
    assert [len(y) for y in first] == [10, 10, 10]
    assert torch.equal(torch.bincount(torch.cat(first), minlength=10), data.class_counts[2])


def test_the_claim(tool: SimpleNamespace, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["guo_federation"], "CLAIM_SOURCE", "digits")
    claims = {
        claim: tool.claimed_accuracy(claim, settings=settings, root="data")
        for claim in [("softmax", "biased", name, rate, True, 0) for name in tool.AGGREGATORS for rate in (1.0, 1.5)]
    }
    assert len(set(claims.values())) > 1
    text = tool.report_claim(claims)
    assert text.count("| class-ordered |") == 4
    assert "softmax, biased" in text


def test_scenarios_are_those_of_the_files(tool: SimpleNamespace) -> None:
    setting = replace(tool.PRESETS["softmax"], total=500)
    sizes = tool.federated_data("digits", "sizes", setting, 1, "data")
    noisy = tool.federated_data("digits", "noisy", setting, 1, "data")
    for data in (sizes, noisy):
        data.setup("fit")
    assert sizes.num_samples.tolist() == [50, 75, 100, 125, 150]
    assert noisy.malicious == [1, 2, 3, 4]
    assert set(tool.SCENARIOS) == {path.stem.removeprefix("guo_") for path in tool.CONFIGS.glob("guo_*.yaml")}
    assert all(setting.rounds == 20 and setting.total is None for setting in tool.FULL.values())
