"""Similarities of updates and of the server's last step, and groups of copies, against NumPy and trying all groups."""

import numpy as np
import pytest
import torch

from flsv.filters.copies import groups_of, isolated_groups, last_step_similarity, same_group_pairs, similarities


@pytest.mark.parametrize("bad", [0.0, 1e30])
def test_centered_cosine_similarities_equal_numpys_and_are_0_without_a_direction(bad: float) -> None:
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


def test_sum_of_two_updates_is_in_no_group_of_copies() -> None:
    updates = torch.randn(80, 2000, generator=torch.Generator().manual_seed(3))
    updates[1] += 0.3 * updates[0]
    updates[2] = updates[0] + updates[1]
    updates[4] = updates[3] + 0.1 * updates[4]
    similar = similarities(updates @ updates.T)
    assert similar[2, :2].min() > 0.7
    assert groups_of(same_group_pairs(similar)) == [[3, 4]]


def written_out(updates: np.ndarray, step: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """For each of the two means, of the updates' directions and the step's."""
    k = len(updates)
    lengths = np.linalg.norm(updates, axis=1)
    u, g = updates / lengths[:, None], step / np.linalg.norm(step)
    found = []
    for weights in (np.full(k, 1 / k), samples * lengths / (samples * lengths).sum()):
        c = k / (k + 1) * weights @ u + g / (k + 1)
        found.append([(d - c) @ (g - c) / np.linalg.norm(d - c) / np.linalg.norm(g - c) for d in u])
    return np.minimum(*np.array(found))


def test_last_step_similarity_equals_the_formula_written_out() -> None:
    draw = np.random.default_rng(0)
    updates, step, samples = draw.normal(size=(5, 9)), draw.normal(size=9), draw.integers(1, 50, 5)
    updates[2] = 0.3 * step
    mine = torch.from_numpy(updates), torch.from_numpy(step)
    found = last_step_similarity(
        mine[0] @ mine[0].T, mine[0] @ mine[1], float(mine[1] @ mine[1]), torch.from_numpy(samples)
    ).numpy()
    np.testing.assert_allclose(found, written_out(updates, step, samples), atol=1e-12)
    assert found[2] == pytest.approx(1)
    assert found.argmax() == 2


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
def test_isolated_groups_equal_those_of_trying_all_groups(seed: int) -> None:
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(8, 30))
    for copy in range(seed % 4):  # groups of up to four
        directions[7 - copy] = directions[0] + 0.3 * generator.normal(size=30)
    similar = np.corrcoef(directions)
    for gap in (0.1, 0.3, 0.6):
        found = isolated_groups(torch.from_numpy(similar), gap).numpy()
        np.testing.assert_array_equal(found, by_trying_all(similar, gap))


def test_fewer_than_six_clients_have_no_isolated_group() -> None:
    similar = torch.full((7, 7), -0.5)
    similar[:3, :3] = 0.9
    assert groups_of(isolated_groups(similar.fill_diagonal_(1), 0.4)) == [[0, 1, 2]]
    assert not isolated_groups(similar[1:6, 1:6], 0.4).any()
