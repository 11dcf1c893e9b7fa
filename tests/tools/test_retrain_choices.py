"""The choices of ``flsv retrain`` on games that are known."""

from __future__ import annotations

import pytest
import retrain_choices
import torch
from retrain_choices import DESIGNS, FITS, WEIGHTS, hints_of, of_sizes, scores, tables, visits

from flsv.benchmark.truth import Truth, exact_truth
from flsv.functional import few_coalitions


def game(clients: int, seed: int, noise: float) -> Truth:
    """Three seeds of additive values, of which the last client's is below 0, with noise on every coalition."""
    draw = torch.Generator().manual_seed(seed)
    gains = torch.arange(1.0, clients + 1).double().roll(seed)
    gains[-1] = -1
    masks = (torch.arange(2**clients)[:, None] >> torch.arange(clients) & 1).double()
    table = masks @ gains + noise * torch.randn(3, 2**clients, generator=draw, dtype=torch.float64)
    return exact_truth((100, 101, 102), table)


def test_designs_are_those_of_the_command() -> None:
    for which, sizes in (("singles", (1,)), ("leave-one-out", (-1,)), ("both", (1, -1))):
        ours, theirs = (set(map(tuple, m.tolist())) for m in (of_sizes(5, sizes), few_coalitions(5, which)))  # type: ignore[arg-type]
        assert ours == theirs
    assert len(of_sizes(6, (1, 2))) == 2 + 6 + 15
    assert len(of_sizes(4, (1, 2, -1))) == 16
    equal = torch.full((6,), 10)
    costs = {name: visits(of_sizes(6, sizes), equal) for name, sizes in DESIGNS.items()}
    assert costs == {
        "each alone": 2,
        "all but one": 6,
        "each alone, all but one": 7,
        "each alone, pairs": 7,
        "each alone, pairs, all but one": 12,
    }


def test_an_additive_game_is_told_by_its_singles_and_a_hint_that_knows_it_helps() -> None:
    exact, noisy = game(5, 1, 0.0), game(5, 2, 2.0)
    right = scores(exact, [])
    for design in DESIGNS:
        rank, error = right[design, "KernelSHAP", 0.0]
        assert (rank, error) == (pytest.approx(1), pytest.approx(0, abs=1e-9))
    assert set(right) == {(d, fit, 0.0) for d in DESIGNS for fit in FITS} | {("all 2^n", "exact", 0.0)}
    hinted = scores(noisy, [noisy.values.mean(0)])
    alone = [hinted["each alone", "the fit", weight] for weight in WEIGHTS]
    assert alone[-1][1] < alone[0][1]
    assert alone[-1][0] > alone[0][0]


def test_the_report() -> None:
    found = {}
    for seed in range(3):
        truth = game(4, seed, 0.3)
        found[f"game {seed}"] = truth, torch.tensor([10, 20, 30, 40]), scores(truth, [truth.values.mean(0)])
    text = "\n\n".join(tables(found))
    assert "With the hint, 3 federations, by its weight:" in text
    assert "| each alone | 100 |" in text
    assert "| all 2^n | 8.0 |" in text
    without = {name: (truth, samples, scores(truth, [])) for name, (truth, samples, _) in found.items()}
    assert "hint" not in "\n\n".join(tables(without))


def test_hints_that_lack_a_client_are_left_out() -> None:
    told = {"here": {"0": {0: 1.0, 1: 2.0}, "1": {0: 1.0}, "2": {0: float("nan"), 1: 0.0}}}
    assert [each.tolist() for each in hints_of(told, "here", 2)] == [[1.0, 2.0]]
    assert retrain_choices.hints_of(told, "there", 2) == []
