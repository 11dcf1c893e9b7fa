"""GTG-Shapley: its truncations, and when it stops."""

import torch
from functional.shapley.games import accuracy_table, rng, table_game

from flsv.functional import (
    exact_shapley,
    gtg_shapley,
)
from flsv.functional.shapley.permutation import _converged


def test_gtg_skips_a_round_whose_gain_is_below_the_truncation() -> None:
    table = accuracy_table(6)
    gain = float((table[-1] - table[0]).abs() / max(abs(table[-1]), abs(table[0])))
    skipped = gtg_shapley(table_game(table), 6, round_truncation=gain + 1e-9)
    assert skipped.evaluations == 2
    assert (skipped.values == 0).all()
    assert skipped.stderr.isnan().all()
    assert gtg_shapley(table_game(table), 6, round_truncation=gain - 1e-3, generator=rng()).evaluations > 2


def test_within_round_truncation_saves_evaluations_and_stays_close() -> None:
    def utility(masks: torch.Tensor) -> torch.Tensor:
        return 7 * (1 - 0.4 ** masks.sum(dim=1).double())

    short = gtg_shapley(utility, 12, truncation=0.05, convergence=None, budget=2000, generator=rng())
    assert (short.values - exact_shapley(utility, 12).values).abs().max() < 7 * 0.06
    assert short.evaluations < 1000  # 2000 without


def test_gtg_convergence_stops_after_the_minimum_number_of_permutations() -> None:
    def additive(masks: torch.Tensor) -> torch.Tensor:
        return masks.double() @ torch.arange(1, 31, dtype=torch.float64)

    estimate = gtg_shapley(additive, 30, generator=rng(), budget=10_000)
    assert estimate.evaluations <= 2 + 30 * 29
    torch.testing.assert_close(estimate.values, torch.arange(1, 31, dtype=torch.float64))
    assert not _converged(torch.ones(29, 3, 1), 0.05)
    assert _converged(torch.ones(30, 3, 1), 0.05)
    alternating = torch.tensor([1.0, -1.0]).repeat(20).view(40, 1, 1).expand(40, 3, 1)
    assert not _converged(alternating, 0.05)
