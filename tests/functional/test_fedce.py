"""FedCE's formulas, in NumPy."""

import numpy as np
import pytest
import torch

from flsv.functional import contribution_estimates, leave_one_out_cosines


def test_cosine_is_0_if_there_are_no_other_updates() -> None:
    updates = torch.tensor([[1.0, 2.0], [0.0, 0.0], [-1.0, -2.0]])
    gram = updates @ updates.T
    assert leave_one_out_cosines(gram, torch.tensor([0.5, 0.0, 0.5]))[1] == 0
    assert leave_one_out_cosines(gram, torch.tensor([1.0, 0.0, 0.0])).tolist() == pytest.approx(
        [0, 0, -1]
    )
    assert leave_one_out_cosines(gram[:1, :1], torch.ones(1)).tolist() == [0]  # nobody else
    # The others' sum is exactly zero: no rounding noise is taken for a direction.
    updates = torch.tensor([[0.1, 0.3], [0.7, 0.1], [-2.1, -0.3]], dtype=torch.float64)
    assert (
        leave_one_out_cosines(
            updates @ updates.T, torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)
        )[0]
        == 0
    )


def test_fedces_estimates_have_a_floor_and_are_equal_where_their_sum_is_0() -> None:
    # A client that points just where the others do, and whose data the others' model knows.
    found = contribution_estimates(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([1.0, 0.5, 0.5]))
    assert found[0] == pytest.approx(1e-3)
    assert contribution_estimates(torch.ones(4), torch.ones(4)).tolist() == [0.25] * 4
    with pytest.raises(ValueError, match=r"a score in \[0, 1\]"):
        contribution_estimates(torch.zeros(2), torch.tensor([-0.7, 0.2]))


def test_errors_above_the_cap_are_capped() -> None:
    cosines, scores = torch.tensor([0.1, 0.3, -0.2, 0.0]), torch.tensor([0.9, 0.8, 0.6, 0.7])
    plain = contribution_estimates(cosines, scores)
    assert torch.equal(contribution_estimates(cosines, scores, cap=10.0), plain)
    lied = torch.tensor([0.0, 0.8, 0.6, 0.7])
    told, capped = (contribution_estimates(cosines, lied, cap=cap) for cap in (None, 1.25))
    errors = np.array([min(each, 1.25 * 0.35) for each in (1.0, 0.2, 0.4, 0.3)])
    expected = (1 - cosines.double().numpy()) * errors
    np.testing.assert_allclose(capped.numpy(), expected / expected.sum(), atol=1e-6)
    assert told[0] > 1.5 * capped[0] > 1.5 * plain[0]
