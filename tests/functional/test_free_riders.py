"""The server's last step, sent back: the formula in NumPy."""

import numpy as np
import pytest
import torch

from flsv.functional.free_riders import last_step_similarity


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
