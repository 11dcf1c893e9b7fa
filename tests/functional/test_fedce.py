"""FedCE's formulas, in NumPy."""

import numpy as np
import pytest
import torch

from flsv.functional import contribution_estimates, leave_one_out_cosines


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        pytest.param([0.5, 0.0, 0.5], [-1, 0, -1], id="an update of zeros"),
        pytest.param([1.0, 0.0, 0.0], [0, 0, -1], id="others without weight"),
    ],
)
def test_cosine_is_0_if_there_are_no_other_updates(weights, expected):
    updates = torch.tensor(
        [
            [1.0, 2.0],
            [0.0, 0.0],
            [-1.0, -2.0],
        ]
    )

    cosines = leave_one_out_cosines(updates @ updates.T, torch.tensor(weights))

    assert cosines.tolist() == pytest.approx(expected)


def test_rounding_noise_of_a_sum_that_is_zero_is_no_direction():
    updates = torch.tensor(
        [
            [0.1, 0.3],
            [0.7, 0.1],
            [-2.1, -0.3],
        ],
        dtype=torch.float64,
    )
    weights = torch.tensor([0.2, 0.6, 0.2], dtype=torch.float64)  # 0.6 * 0.7 = 0.2 * 2.1

    cosines = leave_one_out_cosines(updates @ updates.T, weights)

    assert cosines[0] == 0


def test_fedces_estimates_have_a_floor_and_are_equal_where_their_sum_is_0():
    # A client that points just where the others do, and whose data the others' model knows.
    cosines = torch.tensor([1.0, 0.0, 0.0])
    scores = torch.tensor([1.0, 0.5, 0.5])

    estimates = contribution_estimates(cosines, scores)
    equal_estimates = contribution_estimates(torch.ones(4), torch.ones(4))

    assert estimates[0] == pytest.approx(1e-3)
    assert equal_estimates.tolist() == [0.25] * 4

    with pytest.raises(ValueError, match=r"scores must be in \[0, 1\]"):
        contribution_estimates(torch.zeros(2), torch.tensor([-0.7, 0.2]))


def test_errors_above_the_cap_are_capped():
    cosines = torch.tensor([0.1, 0.3, -0.2, 0.0])
    scores = torch.tensor([0.9, 0.8, 0.6, 0.7])
    false_scores = torch.tensor([0.0, 0.8, 0.6, 0.7])

    honest = contribution_estimates(cosines, scores)
    uncapped = contribution_estimates(cosines, false_scores)
    capped = contribution_estimates(cosines, false_scores, cap=1.25)

    assert torch.equal(contribution_estimates(cosines, scores, cap=10.0), honest)
    assert uncapped[0] > 1.5 * capped[0] > 1.5 * honest[0]

    # Errors are at most 1.25 times their median, 0.35.
    errors = np.minimum([1.0, 0.2, 0.4, 0.3], 1.25 * 0.35)
    expected = (1 - cosines.double().numpy()) * errors

    np.testing.assert_allclose(
        capped.numpy(),
        expected / expected.sum(),
        atol=1e-6,
    )
