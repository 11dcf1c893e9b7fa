"""What a cohort's updates say of each other: outliers, copies, claims."""

import numpy as np
import pytest
import torch

from flsv.functional import distances as module
from flsv.functional.clipping import counted, length_factors, shortened
from flsv.functional.copies import alike, groups_of, similarities
from flsv.functional.distances import distances, weighted_mean
from flsv.functional.free_riders import echoes
from flsv.functional.isolated_groups import standing_apart
from flsv.functional.outliers import drowning_updates, large_updates


def test_the_score_is_that_of_iglewicz_and_hoaglin():
    rng = np.random.default_rng(0)
    logs = np.append(rng.normal(0, 1, 200), np.linspace(2, 8, 25))
    median = np.median(logs)
    z = 0.6745 * (logs - median) / np.median(np.abs(logs - median))
    assert 5 < (z > 3.5).sum() < 25
    assert large_updates(torch.from_numpy(np.exp(logs)), factor=1.0).tolist() == (z > 3.5).tolist()


@pytest.mark.parametrize("clients", [1, 2, 4, 101])
@pytest.mark.parametrize("size", [1e20, 3e38, float("inf")])
def test_what_overflows_is_found_in_any_cohort(clients, size):
    norms = torch.rand(clients, dtype=torch.float64) + 1
    norms[clients // 2] = size
    assert large_updates(norms).nonzero().flatten().tolist() == [clients // 2]


@pytest.mark.parametrize(
    "norms",
    [
        [],
        [1.0, 1000.0],  # who is wrong?
        [0.0, 0.0, 0.0, 1.0, 1.1],  # free riders make nobody an outlier
        [1.0, 1.0, 1.0, 4.0],  # MAD 0
        [1.0, 1.0001, 1.0002, 1.05],
        [2.0**i for i in range(12)],  # a cohort whose sizes differ
    ],
)
def test_no_false_alarm(norms):
    assert not large_updates(torch.tensor(norms)).any()


@pytest.mark.parametrize("model_norm", [0.0, 1.0, 1e4])
def test_what_drowns_is_what_a_sum_in_float32_has_nothing_else_beside(model_norm):
    rest = torch.tensor([1.0, 2.0, 0.5, 0.0])
    scale = max(1.0, model_norm)
    for size, drowns in ((4e6 * scale, False), (2e7 * scale, True)):
        norms = torch.cat([rest, torch.tensor([size])])
        assert drowning_updates(norms, model_norm).tolist() == [False] * 4 + [drowns]


@pytest.mark.parametrize("bad", [0.0, 1e30])
def test_similarities_equal_the_formula_written_out(bad: float) -> None:
    """Updates without a direction are no part of it."""
    updates = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    e = updates[:4].double().numpy()
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    e -= e.mean(0)
    expected = (e @ e.T) / np.outer(np.linalg.norm(e, axis=1), np.linalg.norm(e, axis=1))
    updates[4] = bad
    found = similarities(updates @ updates.T)
    np.testing.assert_allclose(found[:4, :4].numpy(), expected, atol=1e-6)
    assert not found[4].any()


def test_a_sum_of_two_updates_is_a_copy_of_neither() -> None:
    updates = torch.randn(80, 2000, generator=torch.Generator().manual_seed(3))
    updates[1] += 0.3 * updates[0]
    updates[2] = updates[0] + updates[1]
    updates[4] = updates[3] + 0.1 * updates[4]
    similar = similarities(updates @ updates.T)
    assert similar[2, :2].min() > 0.7
    assert groups_of(alike(similar)) == [[3, 4]]


def by_trying_all(similar: np.ndarray, gap: float) -> np.ndarray:
    """Every subset of two to k / 2 clients."""
    k = len(similar)
    found = np.zeros((k, k), dtype=bool)
    for mask in range(1, 2**k):
        members = [i for i in range(k) if mask >> i & 1]
        others = [i for i in range(k) if not mask >> i & 1]
        if not 2 <= len(members) <= k / 2:
            continue
        within = min(similar[i, j] for i in members for j in members if i != j)
        if within - max(similar[i, j] for i in members for j in others) >= gap:
            for i in members:
                for j in members:
                    found[i, j] = i != j
    return found


@pytest.mark.parametrize("seed", range(4))
def test_who_stands_apart_equals_trying_all_groups(seed: int) -> None:
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(8, 30))
    for copy in range(seed % 4):  # groups of up to four
        directions[7 - copy] = directions[0] + 0.3 * generator.normal(size=30)
    similar = np.corrcoef(directions)
    for gap in (0.1, 0.3, 0.6):
        found = standing_apart(torch.from_numpy(similar), gap).numpy()
        np.testing.assert_array_equal(found, by_trying_all(similar, gap))


def test_of_few_clients_nobody_stands_apart() -> None:
    similar = torch.full((7, 7), -0.5)
    similar[:3, :3] = 0.9
    assert groups_of(standing_apart(similar.fill_diagonal_(1), 0.4)) == [[0, 1, 2]]
    assert not standing_apart(similar[1:6, 1:6], 0.4).any()


def echoes_written_out(updates: np.ndarray, step: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """For each of the two means, of the updates' directions and the step's."""
    k = len(updates)
    lengths = np.linalg.norm(updates, axis=1)
    u, g = updates / lengths[:, None], step / np.linalg.norm(step)
    found = []
    for weights in (np.full(k, 1 / k), samples * lengths / (samples * lengths).sum()):
        c = k / (k + 1) * weights @ u + g / (k + 1)
        found.append([(d - c) @ (g - c) / np.linalg.norm(d - c) / np.linalg.norm(g - c) for d in u])
    return np.minimum(*np.array(found))


def test_echoes_equal_to_the_formula_written_out() -> None:
    draw = np.random.default_rng(0)
    updates, step, samples = draw.normal(size=(5, 9)), draw.normal(size=9), draw.integers(1, 50, 5)
    updates[2] = 0.3 * step
    mine = torch.from_numpy(updates), torch.from_numpy(step)
    found = echoes(mine[0] @ mine[0].T, mine[0] @ mine[1], float(mine[1] @ mine[1]), torch.from_numpy(samples)).numpy()
    np.testing.assert_allclose(found, echoes_written_out(updates, step, samples), atol=1e-12)
    assert found[2] == pytest.approx(1)
    assert found.argmax() == 2


@pytest.mark.parametrize("cap", [0.5, 1.25])
def test_no_length_is_above_the_bound_and_none_below_it_changes(cap: float) -> None:
    norms = torch.rand(9, generator=torch.Generator().manual_seed(0)) * 10
    bound = cap * np.median(norms.double().numpy())
    factors = length_factors(norms, cap)
    np.testing.assert_allclose((factors * norms.double()).numpy(), np.minimum(norms.double().numpy(), bound))


def test_samples_that_count() -> None:
    told = torch.tensor([30, 31, 31, 500])
    assert counted(told, None) is told
    assert counted(told, 1.25).tolist() == [30, 31, 31, 39]  # 1.25 * 31 = 38.75
    assert counted(told, 1.25).dtype == torch.int64


def test_models_are_moved_along_their_updates_and_buffers_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, start = torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)
    factors = torch.tensor([1.0, 0.5, 1.0, 0.25], dtype=torch.float64)
    result = shortened(rows, start, factors, end=5)
    assert torch.equal(result[[0, 2]], rows[[0, 2]])
    assert torch.equal(result[:, 5], rows[:, 5])
    expected = start + factors[:, None] * (rows.double() - start)
    torch.testing.assert_close(result[:, :5].double(), expected[:, :5])
    # Starts of their own give the same.
    torch.testing.assert_close(shortened(rows, start.expand(4, 6).clone(), factors, end=5), result)
    assert shortened(rows, start, torch.ones(4), end=5) is rows


@pytest.mark.parametrize("block", [1 << 20, 12])
def test_distances_against_numpy(monkeypatch, block):
    monkeypatch.setattr(module, "CPU_BLOCK", block)
    torch.manual_seed(0)
    points = torch.randn(5, 17)
    for origin in (torch.randn(17), torch.randn(5, 17)):
        expected = np.linalg.norm(points.double().numpy() - origin.double().numpy(), axis=1)
        np.testing.assert_allclose(distances(points, origin), expected, rtol=1e-14)
    weights = torch.rand(5)
    expected = weights.double().numpy() @ points.double().numpy()
    np.testing.assert_allclose(weighted_mean(points, weights), expected, rtol=1e-13)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 3e38), (torch.float64, 1e300), (torch.float32, 1e-40)])
def test_neither_overflow_nor_underflow(dtype, size):
    points = torch.full((2, 17), size, dtype=dtype)
    points[1] = 0
    found = distances(points, -points)
    assert found[0].item() == pytest.approx(2 * points[0, 0].item() * 17**0.5, rel=1e-9)
    assert found[1] == 0
