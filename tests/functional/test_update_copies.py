"""Who sends copies of whose updates."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flsv.functional.updates import alike, echoes, groups_of, similarities, standing_apart


def test_equal_to_the_formula_written_out() -> None:
    updates = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    e = updates.double().numpy()
    e /= np.linalg.norm(e, axis=1, keepdims=True)
    e -= e.mean(0)
    expected = (e @ e.T) / np.outer(np.linalg.norm(e, axis=1), np.linalg.norm(e, axis=1))
    np.testing.assert_allclose(similarities(updates @ updates.T).numpy(), expected, atol=1e-6)


def test_what_all_have_in_common_does_not_count_and_a_copy_does() -> None:
    generator = torch.Generator().manual_seed(1)
    common = 10 * torch.randn(500, generator=generator)
    updates = common + torch.randn(6, 500, generator=generator)
    updates[4] = 3 * updates[1] + 0.3 * torch.randn(500, generator=generator)
    plain = torch.nn.functional.cosine_similarity(updates[0], updates[2], dim=0)
    found = similarities(updates @ updates.T)
    assert plain > 0.95
    assert found[0, 2] < 0.2
    assert found[1, 4] > 0.9


@pytest.mark.parametrize("bad", [0.0, 1e30])
def test_updates_without_a_direction_are_no_part_of_it(bad: float) -> None:
    generator = torch.Generator().manual_seed(2)
    updates = torch.randn(5, 50, generator=generator)
    alone = similarities(updates[:4] @ updates[:4].T)
    updates[4] = bad
    with_bad = similarities(updates @ updates.T)
    torch.testing.assert_close(with_bad[:4, :4], alone)
    assert not with_bad[4].any()


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


@pytest.mark.parametrize("seed", range(8))
def test_who_stands_apart_equals_trying_all_groups(seed: int) -> None:
    generator = np.random.default_rng(seed)
    directions = generator.normal(size=(8, 30))
    for copy in range(seed % 4):  # groups of up to four
        directions[7 - copy] = directions[0] + 0.3 * generator.normal(size=30)
    similar = np.corrcoef(directions)
    for gap in (0.1, 0.3, 0.6):
        found = standing_apart(torch.from_numpy(similar), gap).numpy()
        np.testing.assert_array_equal(found, by_trying_all(similar, gap))


def test_more_than_half_are_no_group_and_few_clients_have_none() -> None:
    similar = torch.full((7, 7), -0.5)
    similar[:4, :4] = 0.9
    assert not standing_apart(similar.fill_diagonal_(1), 0.4).any()
    similar[3, :3] = similar[:3, 3] = -0.5
    assert groups_of(standing_apart(similar, 0.4)) == [[0, 1, 2]]
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
