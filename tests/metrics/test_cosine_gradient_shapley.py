"""CGSV's reputations over rounds, whole and partial participation, in and out of a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import fit

from flsv.aggregation import CGSV
from flsv.functional.agreement import updated_reputation
from flsv.loop import FederatedLoop
from flsv.metrics import CosineGradientShapley


def by_hand(
    updates: torch.Tensor,
    reputation: torch.Tensor | None,
    alpha: float = 0.95,
    weights: torch.Tensor | None = None,
    floor: float = 1e-3,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A round as in the paper; reputations of None remember nothing, as in the authors' code."""
    u = updates.double() / (updates.double().norm(dim=1, keepdim=True) + 1e-7)
    shares = reputation if weights is None else weights
    aggregate = shares.double() / shares.double().sum() @ u
    phi = u @ aggregate / (u.norm(dim=1) * aggregate.norm())
    memory = 0 if reputation is None else alpha * reputation.double() / reputation.double().sum()
    after = (memory + (1 - alpha) * phi).clamp_min(floor)
    return phi, after / after.sum()


def test_lengths_do_not_matter_and_nothing_is_zero() -> None:
    def values(updates: torch.Tensor) -> tuple[list[float], list[float]]:
        metric = CosineGradientShapley(num_clients=len(updates))
        metric.update(torch.arange(len(updates)), updates, torch.full((len(updates),), 10))
        return metric.diagnostics()["phi"].tolist(), metric.compute().tolist()

    updates = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    for found, expected in zip(values(updates * torch.tensor([[1.0], [7.0], [100.0]])), values(updates)):
        assert found == pytest.approx(expected, rel=1e-5)
    updates[1] = 0
    assert values(updates)[0][1] == 0
    assert values(torch.zeros(2, 5)) == ([0, 0], [0.5, 0.5])


def test_the_floor_holds_and_reputations_sum_to_one() -> None:
    reputation = None
    for _ in range(50):
        reputation = updated_reputation(reputation, torch.tensor([1.0, 1, 1, 1, -1]), alpha=0.5, floor=0.01)
        assert reputation.sum().item() == pytest.approx(1)
    assert 0 < reputation[4] < 0.011
    for wrong, message in ((torch.tensor([-1.0, 1.0]), "not negative"), (torch.zeros(2), "not all 0")):
        with pytest.raises(ValueError, match=message):
            updated_reputation(wrong, torch.ones(2))


def alike(rho: float, n: int) -> torch.Tensor:
    """n updates of length 1, any two of which have the cosine rho."""
    return torch.cat([(1 - rho) ** 0.5 * torch.eye(n), torch.full((n, 1), rho**0.5)], dim=1)


@pytest.mark.parametrize(("init", "first"), [("zero", 0.447), ("shares", 0.617)])
def test_the_first_round_remembers_nothing_or_the_shares(init: Any, first: float) -> None:
    """One client with seven times the others' data: by hand from the cosines of updates that are all equally alike."""
    rho, sizes = 0.133, torch.tensor([70, 10, 10, 10, 10])
    metric = CosineGradientShapley(num_clients=5, init=init)
    metric.update(torch.arange(5), alike(rho, 5), sizes, sizes / sizes.sum())
    own, other = (7 + 4 * rho), (1 + 10 * rho)  # |u_N| phi, times 11
    length = (53 + (121 - 53) * rho) ** 0.5
    phi = torch.tensor([own, other, other, other, other]) / length
    expected = phi / phi.sum() if init == "zero" else (w := 0.95 * sizes / sizes.sum() + 0.05 * phi) / w.sum()
    torch.testing.assert_close(metric.compute(), expected, rtol=1e-5, atol=1e-6)
    assert metric.compute()[0].item() == pytest.approx(first, abs=1e-3)


def test_full_participation_is_the_papers_recursion() -> None:
    metric = CosineGradientShapley(num_clients=3, alpha=0.8, init="shares")
    samples, ids = torch.tensor([50, 30, 20]), torch.arange(3)
    reputation = samples / samples.sum()
    for r in range(5):
        updates = torch.randn(3, 40, generator=torch.Generator().manual_seed(r)) + torch.tensor([[1.0], [0.0], [-0.5]])
        phi, reputation = by_hand(updates, reputation, alpha=0.8)
        metric.update(ids, updates, samples)
        torch.testing.assert_close(metric.compute(), reputation.float())
        torch.testing.assert_close(metric.diagnostics()["phi"], phi.float())
    assert metric.compute().argsort(descending=True).tolist() == [0, 1, 2]


def test_the_cohort_shares_out_what_it_has_and_others_keep_theirs() -> None:
    metric = CosineGradientShapley(num_clients=4, alpha=0.5)
    samples = torch.tensor([1, 1, 2])
    metric.update(torch.tensor([0, 1, 3]), torch.eye(3), samples)
    before = metric.compute()
    assert before[2].isnan()
    assert before[3] > before[0]  # the data shares weigh in the first aggregate
    assert before.nansum().item() == pytest.approx(1)
    metric.update(torch.tensor([0, 1]), torch.tensor([[1.0, 0], [-1.0, 0.1]]), samples[:2], torch.tensor([0.7, 0.3]))
    after = metric.compute()
    torch.testing.assert_close(after[3], before[3])
    torch.testing.assert_close(after[:2].sum(), before[:2].sum())
    assert after[0] > after[1]


def test_a_newcomer_starts_from_the_mean() -> None:
    metric = CosineGradientShapley(num_clients=3, alpha=0.99)
    metric.update(torch.tensor([0, 1]), torch.eye(2), torch.tensor([3, 1]))
    metric.update(torch.tensor([2]), torch.ones(1, 2), torch.tensor([500]))
    assert metric.compute()[2].item() == pytest.approx(1 / 3)


@pytest.mark.parametrize("init", ["zero", "shares"])
def test_in_a_loop_it_is_updated_after_aggregation_with_the_weights_used(tmp_path: Path, init: Any) -> None:
    seen: list[tuple[Any, torch.Tensor | None]] = []

    class Watch(CGSV):
        def aggregate(self, round: Any, contributions: Any) -> Any:
            seen.append((round, contributions.get("cgsv")))
            return super().aggregate(round, contributions)

    loop = FederatedLoop(Watch(scale=0.5), {"cgsv": CosineGradientShapley(alpha=0.7, init=init)}, seed=1)
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
        _, reputation = by_hand(updates, reputation, alpha=0.7, weights=weights)
    torch.testing.assert_close(loop.contributions["cgsv"], reputation.float())
