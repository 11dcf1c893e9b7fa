"""CGSV's equations against NumPy written from the paper."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flsv.functional import cosine_gradient_shapley
from flsv.functional.agreement import aggregate_updates, cohort_reputation


def by_hand(d: np.ndarray, r: np.ndarray, alpha: float, scale: float, floor: float) -> tuple[np.ndarray, np.ndarray]:
    u = np.stack([scale * row / (np.linalg.norm(row) + 1e-7) for row in d])
    u_n = sum(weight * row for weight, row in zip(r, u))
    phi = np.array([row @ u_n / (np.linalg.norm(row) * np.linalg.norm(u_n)) for row in u])
    r = np.maximum(alpha * r + (1 - alpha) * phi, floor)
    return phi, r / r.sum()


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("scale", [0.15, 1.0])
def test_rounds_as_in_the_paper(alpha: float, scale: float) -> None:
    rng = np.random.default_rng(0)
    expected = np.array([0.4, 0.3, 0.2, 0.1])
    reputation = torch.tensor(expected)
    common = rng.normal(size=30)
    for _ in range(5):
        updates = rng.normal(size=(4, 30)) + np.outer([2, 1, 0, -1], common)
        phi, expected = by_hand(updates, expected, alpha, scale, 1e-3)
        now, reputation = cosine_gradient_shapley(torch.tensor(updates), reputation, alpha=alpha, scale=scale)
        np.testing.assert_allclose(now.numpy(), phi, rtol=1e-6)
        np.testing.assert_allclose(reputation.numpy(), expected, rtol=1e-6)


def authors_round(
    rs: np.ndarray, shard_sizes: np.ndarray, d: np.ndarray, alpha: float, first: bool
) -> tuple[np.ndarray, np.ndarray]:
    """One pass of the authors' main loop, in NumPy: FedAvg's weights in the first round, reputations from 0."""
    u = np.stack([row / (np.linalg.norm(row) + 1e-7) for row in d])
    aggregate = (shard_sizes / shard_sizes.sum() if first else rs) @ u
    phis = u @ aggregate / np.linalg.norm(aggregate) / np.linalg.norm(u, axis=1)
    rs = np.clip(alpha * rs + (1 - alpha) * phis, 1e-3, None)
    return phis, rs / rs.sum()


def test_the_first_round_has_nothing_to_remember() -> None:
    """Whatever alpha: phi / sum(phi), with data shares in the aggregate, as in the authors' code."""
    rng = np.random.default_rng(1)
    sizes, expected = np.array([70.0, 10, 10, 10, 10]), np.zeros(5)
    reputation = None
    for r in range(4):
        updates = rng.normal(size=(5, 30)) + 0.5
        phi, expected = authors_round(expected, sizes, updates, 0.95, first=r == 0)
        weights = torch.tensor(sizes / sizes.sum()) if r == 0 else None
        now, reputation = cosine_gradient_shapley(torch.tensor(updates), reputation, weights=weights)
        np.testing.assert_allclose(now.numpy(), phi, rtol=1e-6)
        np.testing.assert_allclose(reputation.numpy(), expected, rtol=1e-6)
        if r == 0:
            np.testing.assert_allclose(expected, phi / phi.sum())


def test_lengths_do_not_matter_and_nothing_is_zero() -> None:
    updates = torch.randn(3, 20)
    phi, reputation = cosine_gradient_shapley(updates)
    longer, same = cosine_gradient_shapley(updates * torch.tensor([[1.0], [7.0], [100.0]]), scale=3.0)
    torch.testing.assert_close(longer, phi)
    torch.testing.assert_close(same, reputation)
    updates[1] = 0
    phi, reputation = cosine_gradient_shapley(updates)
    assert phi[1] == 0
    assert reputation.isfinite().all()
    phi, reputation = cosine_gradient_shapley(torch.zeros(2, 5))
    assert phi.tolist() == [0, 0]
    assert reputation.tolist() == [0.5, 0.5]


def test_the_floor_holds_and_reputations_sum_to_one() -> None:
    updates = torch.cat([torch.ones(4, 3), -torch.ones(1, 3)])
    reputation = None
    for _ in range(50):
        _, reputation = cosine_gradient_shapley(updates, reputation, alpha=0.5, floor=0.01)
        assert reputation.sum().item() == pytest.approx(1)
    assert 0 < reputation[4] < 0.011


def test_scale_is_only_a_scale() -> None:
    a = cosine_gradient_shapley(torch.eye(3), torch.tensor([2.0, 1.0, 1.0]))[1]
    torch.testing.assert_close(a, cosine_gradient_shapley(torch.eye(3), torch.tensor([0.5, 0.25, 0.25]))[1])


def test_weights_replace_the_reputations_in_the_aggregate() -> None:
    phi, _ = cosine_gradient_shapley(torch.eye(2), torch.tensor([0.5, 0.5]), weights=torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(phi, torch.tensor([1.0, 0.0]))


def test_the_aggregate_is_no_longer_than_scale() -> None:
    updates = torch.randn(6, 40) * torch.logspace(-3, 3, 6)[:, None]
    weights = torch.full((6,), 1 / 6)
    assert aggregate_updates(updates, weights, 0.5).norm() <= 0.5
    assert aggregate_updates(updates[:1].repeat(6, 1), weights, 0.5).norm() == pytest.approx(0.5, rel=1e-3)


def test_newcomers() -> None:
    ids, samples = torch.tensor([2, 0]), torch.tensor([30, 10])
    assert cohort_reputation(None, ids, samples).tolist() == [0.75, 0.25]
    assert cohort_reputation(torch.full((3,), float("nan")), ids, samples).tolist() == [0.75, 0.25]
    held = torch.tensor([0.5, 1.5, float("nan")])
    assert cohort_reputation(held, ids, samples).tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client_updates": torch.zeros(3)}, r"client_updates \[k, P\]"),
        ({"reputation": torch.ones(3)}, r"reputation \[2\], got \[3\]"),
        ({"weights": torch.ones(3)}, r"weights \[2\], got \[3\]"),
        ({"reputation": torch.tensor([-1.0, 1.0])}, "not negative"),
        ({"reputation": torch.zeros(2)}, "not all 0"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"scale": 0.0}, "scale=0.0.*above 0"),
        ({"floor": 0.0}, "floor=0.0.*above 0"),
    ],
)
def test_errors(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosine_gradient_shapley(**{"client_updates": torch.ones(2, 3), **arguments})
