"""CGSV's reputations over rounds, whole and partial participation, in and out of a loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from toys import fit

from flsv.aggregation import CGSV, FedAvg
from flsv.errors import ConfigurationError
from flsv.functional import cosine_gradient_shapley
from flsv.loop import FederatedLoop
from flsv.metrics import CosineGradientShapley
from flsv.sampling import UniformSampler


def test_full_participation_is_the_papers_recursion() -> None:
    metric = CosineGradientShapley(num_clients=3, alpha=0.8)
    samples, ids = torch.tensor([50, 30, 20]), torch.arange(3)
    reputation = samples / samples.sum()
    for r in range(5):
        updates = torch.randn(3, 40, generator=torch.Generator().manual_seed(r)) + torch.tensor([[1.0], [0.0], [-0.5]])
        phi, reputation = cosine_gradient_shapley(updates, reputation, alpha=0.8)
        metric.update(ids, updates, samples)
        torch.testing.assert_close(metric.compute(), reputation.float())
        torch.testing.assert_close(metric.diagnostics()["phi"], phi)
    assert metric.compute().argsort(descending=True).tolist() == [0, 1, 2]


def test_the_cohort_shares_out_what_it_has_and_others_keep_theirs() -> None:
    metric = CosineGradientShapley(num_clients=4, alpha=0.5)
    samples = torch.tensor([1, 1, 2])
    metric.update(torch.tensor([0, 1, 3]), torch.eye(3), samples)
    before = metric.compute()
    assert before[2].isnan()
    assert before[3] > before[0]
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


def test_in_a_loop_it_is_updated_after_aggregation_with_the_weights_used(tmp_path: Path) -> None:
    seen: list[tuple[Any, torch.Tensor | None]] = []

    class Watch(CGSV):
        def aggregate(self, round: Any, contributions: Any) -> Any:
            seen.append((round, contributions.get("cgsv")))
            return super().aggregate(round, contributions)

    loop = FederatedLoop(Watch(scale=0.5), {"cgsv": CosineGradientShapley(alpha=0.7)}, seed=1)
    fit(loop, tmp_path, rounds=3)
    reputation = seen[0][0].num_samples / seen[0][0].num_samples.sum()
    for r, (round, before) in enumerate(seen):
        if r == 0:
            assert before is None
        else:
            torch.testing.assert_close(before, reputation.float())
        cut = round.space.num_parameters
        _, reputation = cosine_gradient_shapley(round.client_updates[:, :cut], reputation, alpha=0.7)
    torch.testing.assert_close(loop.contributions["cgsv"], reputation.float())


def test_partial_participation_in_a_loop(tmp_path: Path) -> None:
    loop = FederatedLoop(FedAvg(), {"cgsv": CosineGradientShapley()}, sampler=UniformSampler(2), seed=3)
    fit(loop, tmp_path, rounds=6)
    assert loop.contributions["cgsv"].sum().item() == pytest.approx(1)


def test_states_survive() -> None:
    metric = CosineGradientShapley(num_clients=2)
    metric.update(torch.arange(2), torch.randn(2, 5), torch.tensor([1, 2]))
    other = CosineGradientShapley(num_clients=2)
    other.load_state_dict(metric.state_dict())
    assert torch.equal(other.compute(), metric.compute())
    metric.reset()
    assert metric.compute().isnan().all()


def test_forward_gives_this_rounds_value_and_goes_on() -> None:
    updates = [torch.randn(2, 5) for _ in range(2)]
    metric, plain = CosineGradientShapley(num_clients=2, alpha=0.5), CosineGradientShapley(num_clients=2, alpha=0.5)
    for each in updates:
        now = metric(torch.arange(2), each, torch.tensor([1, 1]))
        alone = CosineGradientShapley(num_clients=2, alpha=0.5)
        alone.update(torch.arange(2), each, torch.tensor([1, 1]))
        torch.testing.assert_close(now, alone.compute())
        plain.update(torch.arange(2), each, torch.tensor([1, 1]))
    torch.testing.assert_close(metric.compute(), plain.compute())


def test_errors() -> None:
    with pytest.raises(ConfigurationError, match=r"alpha=1"):
        CosineGradientShapley(alpha=1.0)
    with pytest.raises(ConfigurationError, match=r"floor=0"):
        CosineGradientShapley(floor=0)
    metric = CosineGradientShapley(num_clients=2)
    with pytest.raises(ValueError, match=r"client_updates \[k=2, P\], got \[3, 5\]"):
        metric.update(torch.arange(2), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="client_ids must lie"):
        metric.update(torch.tensor([2]), torch.zeros(1, 5))
