"""Similarities of updates and the groups of copies that follow from them."""

import numpy as np
import pytest
import torch

from flsv.functional.copies import groups_of, same_group_pairs, similarities


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
