"""pFedSV's comparison at the size of a test, and its report on made-up results."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

ROOT = os.environ.get("FLSV_DATA_ROOT")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return importlib.import_module("pfedsv_table")


@pytest.fixture(autouse=True)
def seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # to be restored: seed_everything sets it


RING = torch.eye(10) + torch.eye(10).roll(1, 1)  # each client shares a class with the one before and the one after
TRUTH = RING @ RING.T > 0


def made_up(tool: ModuleType, accuracy: float, relevance: Tensor | None = None, trained: float | None = None):  # type: ignore[no-untyped-def]
    values = {"received": torch.full((10,), accuracy), "trained": torch.full((10,), trained or accuracy)}
    downloads = torch.cat([torch.full((2, 10), 5.0), torch.full((18, 10), 2.0)])
    return tool.Result(values, RING * 50, relevance, downloads, 1.5)


def results(tool: ModuleType, ours: float, scores: Tensor, late: int = 2):  # type: ignore[no-untyped-def]
    """All pairs are looked at in round ``late``, with these scores."""
    relevance = scores.expand(20, 10, 10).clone()
    relevance[: late - 1] = float("nan")
    setting = tool.DEFAULT[0]
    made = {}
    for seed in (0, 1):
        made[tool.Job(setting, "Separate", seed)] = made_up(tool, 0.9)
        made[tool.Job(setting, "FedAvg", seed)] = made_up(tool, 0.5, trained=0.91)
        made[tool.Job(setting, "pFedSV", seed)] = made_up(tool, ours, relevance)
    return made


def test_checks_that_are_met(tool: ModuleType) -> None:
    made = results(tool, 0.95, TRUTH.float() - 0.5)
    text = tool.checks(made, tool.DEFAULT)
    assert text.count("**met**") == 4
    assert "not met" not in text
    assert "pFedSV above FedAvg+FT: **met** (95.00 ± 0.00 against 91.00 ± 0.00)" in text
    assert "above pFedSV (95.00): none" in text


def test_checks_that_are_not(tool: ModuleType) -> None:
    made = results(tool, 0.905, -TRUTH.float(), late=4)  # 10 clients, 2 relevant, k = 5: the bound is 3 rounds
    text = tool.checks(made, tool.DEFAULT)
    assert text.count("**not met**") == 3
    assert "pFedSV above Separate: **met**" in text
    assert "pFedSV above FedAvg+FT: **not met**" in text
    assert "rounds: **not met** (0.000, 0.000)" in text
    assert "bound: **not met** (0 of 20 clients)" in text
    assert "above pFedSV (90.50): FedAvg+FT 91.00" in text


def test_discovery(tool: ModuleType) -> None:
    relevance = torch.full((3, 10, 10), float("nan"))
    relevance[1:, 0] = 1.0  # client 0 has looked at everybody after the second round
    relevance[0, 1, [0, 2]] = -1.0  # client 1 at its two after the first
    relevance[:, 2, 1] = 1.0  # client 2 at one of them only
    found = tool.discovery(made_up(tool, 0.9, relevance), tool.DEFAULT[0])
    assert found[:3] == [(2, 3), (1, 3), (None, 3)]


def test_report(tool: ModuleType) -> None:
    made = results(tool, 0.95, TRUTH.float() - 0.5)
    made[tool.Job(tool.DEFAULT[0], "pFedSV", 0, 2.0)] = made_up(tool, 0.6)
    text = tool.report(made, tool.DEFAULT)
    assert "| pFedSV (received) | **95.00 ± 0.00** | - |" in text
    assert "| FedAvg+FT (trained) | 91.00 ± 0.00 | - |" in text
    assert "| pathological, MNIST, 10 clients, pFedSV | 1.00 ± 0.00 | 1.00 ± 0.00 | 100 % | 0 % | 2 | 3 |" in text
    assert "| pFedSV | 2 | 11.48 | 60.00 ± 0.00 |" in text  # gaussian_epsilon's own example
    assert tool.figure_7(made, tool.DEFAULT[0]) is not None
    assert tool.figure_7({}, tool.DEFAULT[0]) is None


def test_communication(tool: ModuleType) -> None:
    """LeNet-5: 20 models up; down 2 x 5 + 18 x 2 = 46, of which, with a shared extractor, 20 extractors."""
    text = tool.pfedsv_communication.report(torch.cat([torch.full((2, 3), 5), torch.full((18, 3), 2)]))
    row = next(line for line in text.splitlines() if line.startswith("| LeNet-5 |"))
    size, head = 44426, 84 * 10 + 10
    both, dynamic, fixed, fedavg = 20 * size + 20 * (size - head) + 46 * head, 66 * size, 120 * size, 40 * size
    expected = [f"{number / 1e6:.2f}" for number in (both, dynamic, fixed, fixed, fedavg, fedavg)]
    assert [cell.strip() for cell in row.split("|")][5:11] == expected


def test_the_full_preset_is_the_papers(tool: ModuleType) -> None:
    settings = tool.full()
    assert len(settings) == 16
    assert {(s.clients, s.cohort, s.rounds) for s in settings} == {(10, None, 20), (100, 10, 100)}
    assert {(s.source, s.lr) for s in settings} == {
        ("mnist", 0.01),
        ("fashion_mnist", 0.01),
        ("cifar10", 0.1),
        ("cifar100", 0.1),
    }
    assert all(s.network == "mcmahan_cnn" and s.samples is None and s.local_epochs == 5 for s in settings)


def test_everyone_at_last(tool: ModuleType) -> None:
    federation = sys.modules["pfedsv_federation"]
    sampler, draw = federation.EveryoneAtLast(2, rounds=3), torch.Generator().manual_seed(0)
    assert [len(sampler.sample(7, {}, draw, index)) for index in range(3)] == [2, 2, 7]


@pytest.mark.skipif(ROOT is None or not Path(ROOT, "MNIST").is_dir(), reason="FLSV_DATA_ROOT has no MNIST")
def test_jobs(tool: ModuleType) -> None:
    tiny = replace(tool.DEFAULT[0], samples=1000, rounds=2, local_epochs=1, network="softmax")
    few = replace(tiny, cohort=3)
    jobs = [tool.Job(tiny, "pFedSV", 0), tool.Job(tiny, "FedEM", 0), tool.Job(tiny, "FedAvg", 0, 1.0)]
    jobs += [tool.Job(few, "pFedMe", 0)]
    made = {job: tool.run(job, ROOT) for job in jobs}
    for result in made.values():
        assert result.accuracy["received"].shape == result.accuracy["trained"].shape == (10,)
        assert result.class_counts.sum() == 200
    ours = made[jobs[0]]
    assert ours.relevance is not None
    assert ours.relevance.shape == (2, 10, 10)
    assert (ours.downloads[0] == 6).all()  # the first model, too
    assert (made[jobs[2]].downloads == 1).all()
    assert (made[jobs[3]].downloads.sum(1) == torch.tensor([3.0, 10.0])).all()
    assert "| pFedSV (received) |" in tool.report(made, [tiny, few])
