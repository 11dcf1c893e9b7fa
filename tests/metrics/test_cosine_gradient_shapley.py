"""CosineGradientShapley against the paper's formulas: floor, absent and late clients, and in a loop."""

from pathlib import Path
from typing import Any

import pytest
import torch

from flsv import FederatedLoop
from flsv.aggregation import CGSV
from flsv.functional.cgsv import updated_reputation
from flsv.metrics import CosineGradientShapley
from helpers.fits import fit


def reputation_by_hand(
    updates: torch.Tensor,
    reputation: torch.Tensor | None,
    alpha: float,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """The reputations after a round as in the paper; reputations of None remember nothing, as in the authors' code."""
    u = updates.double() / (updates.double().norm(dim=1, keepdim=True) + 1e-7)
    shares = reputation if weights is None else weights
    aggregate = shares.double() / shares.double().sum() @ u
    phi = u @ aggregate / (u.norm(dim=1) * aggregate.norm())
    memory = 0 if reputation is None else alpha * reputation.double() / reputation.double().sum()
    after = (memory + (1 - alpha) * phi).clamp_min(1e-3)
    return after / after.sum()


def test_reputations_have_a_floor_and_sum_to_one() -> None:
    reputation = None
    for _ in range(50):
        reputation = updated_reputation(
            reputation, torch.tensor([1.0, 1, 1, 1, -1]), alpha=0.5, floor=0.01
        )
        assert reputation.sum().item() == pytest.approx(1)
    assert 0 < reputation[4] < 0.011
    for wrong, message in (
        (torch.tensor([-1.0, 1.0]), "not negative"),
        (torch.zeros(2), "not all 0"),
    ):
        with pytest.raises(ValueError, match=message):
            updated_reputation(wrong, torch.ones(2))


def test_cohort_redistributes_its_reputation_and_absent_clients_keep_theirs() -> None:
    metric = CosineGradientShapley(num_clients=4, alpha=0.5)
    samples = torch.tensor([1, 1, 2])
    metric.update(torch.tensor([0, 1, 3]), torch.eye(3), samples)
    before = metric.compute()
    assert before[2].isnan()
    assert before[3] > before[0]  # the data shares weigh in the first aggregate
    assert before.nansum().item() == pytest.approx(1)
    metric.update(
        torch.tensor([0, 1]),
        torch.tensor([[1.0, 0], [-1.0, 0.1]]),
        samples[:2],
        torch.tensor([0.7, 0.3]),
    )
    after = metric.compute()
    torch.testing.assert_close(after[3], before[3])
    torch.testing.assert_close(after[:2].sum(), before[:2].sum())
    assert after[0] > after[1]


def test_zero_updates_have_cosine_0_and_a_newcomer_gets_the_mean() -> None:
    metric = CosineGradientShapley(num_clients=3, alpha=0.99)
    metric.update(torch.arange(2), torch.zeros(2, 2), torch.full((2,), 10))
    assert metric.diagnostics()["phi"][:2].tolist() == [0, 0]
    assert metric.compute()[:2].tolist() == [0.5, 0.5]
    metric.update(torch.tensor([0, 1]), torch.eye(2), torch.tensor([3, 1]))
    metric.update(torch.tensor([2]), torch.ones(1, 2), torch.tensor([500]))
    assert metric.compute()[2].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("init", ["zero", "shares"])
def test_cgsv_metric_is_updated_after_aggregation_with_its_weights(
    tmp_path: Path, init: Any
) -> None:
    seen: list[tuple[Any, torch.Tensor | None]] = []

    class Watch(CGSV):
        def aggregate(self, round: Any, contributions: Any) -> Any:
            seen.append((round, contributions.get("cgsv")))
            return super().aggregate(round, contributions)

    loop = FederatedLoop(
        Watch(scale=0.5), {"cgsv": CosineGradientShapley(alpha=0.7, init=init)}, seed=1
    )
    fit(loop, tmp_path, rounds=3)
    shares = seen[0][0].num_samples / seen[0][0].num_samples.sum()
    reputation = shares if init == "shares" else None
    for r, (round, before) in enumerate(seen):
        if r == 0:
            assert before is None
        else:
            torch.testing.assert_close(before, reputation.float())
        cut = round.space.num_parameters
        weights = None if r else shares
        updates = round.client_updates[:, :cut]
        reputation = reputation_by_hand(updates, reputation, 0.7, weights)
    torch.testing.assert_close(loop.contributions["cgsv"], reputation.float())
