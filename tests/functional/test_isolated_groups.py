"""Isolated groups against trying all groups."""

import numpy as np
import pytest
import torch

from flsv.functional.copies import groups_of
from flsv.functional.isolated_groups import isolated_groups


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
