"""CSSV against NumPy, from equations 5 and 6, and collaborative fairness against a table of the paper."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from flsv.functional import class_specific_shapley, collaborative_fairness, participant_weights


def cssv_by_hand(clients, server):
    result = np.zeros(clients.shape[:2])
    for i in range(clients.shape[0]):
        for j in range(clients.shape[1]):
            a = clients[i, j]
            b = server[j]
            norm = np.linalg.norm(a) * np.linalg.norm(b)
            result[i, j] = a @ b / norm if norm > 0 else 0.0

    return result


def test_class_specific_shapley_equals_numpys_cosines():
    rng = np.random.default_rng(0)
    clients = rng.normal(size=(6, 4, 9))
    server = rng.normal(size=(4, 9))
    clients[1, 0] = server[1] = 0  # a class that nobody has trained
    got = class_specific_shapley(torch.tensor(clients), torch.tensor(server))

    assert_allclose(got.numpy(), cssv_by_hand(clients, server), rtol=1e-12)

    with pytest.raises(ValueError, match=r"\[2, 3, 4\].*\[3, 5\]"):
        class_specific_shapley(
            torch.zeros(2, 3, 4),
            torch.zeros(3, 5),
        )


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_cssv_does_not_depend_on_scale_even_at_the_edge_of_float32(scale):
    torch.manual_seed(0)
    clients = torch.randn(3, 2, 5)
    server = torch.randn(2, 5)

    torch.testing.assert_close(
        class_specific_shapley(clients * scale, server * scale),
        class_specific_shapley(clients, server),
    )


def test_participant_weights_equal_shapfeds_equation_6():
    cssv = torch.tensor(
        [
            [0.5, -0.5, 1.0],
            [-1.0, -1.0, -1.0],
        ]
    )
    gamma, share = participant_weights(cssv)
    assert_allclose(
        gamma.numpy(),
        [np.mean([0.75, 0.25, 1.0]), 0.0],
    )
    assert share.tolist() == [1, 0]
    assert participant_weights(-torch.ones(4, 2))[1].tolist() == [0.25] * 4


def test_collaborative_fairness_equals_numpys_correlation():
    draw = np.random.default_rng(0)
    contributions = draw.normal(size=7)
    rewards = draw.normal(size=7)
    x = torch.from_numpy(contributions)
    y = torch.from_numpy(rewards)

    fairness = collaborative_fairness(x, y)
    opposite = collaborative_fairness(x, -3 * x + 1)

    correlations = np.corrcoef(contributions, rewards)
    expected = correlations[0, 1]

    assert float(fairness) == pytest.approx(expected)
    assert float(opposite) == pytest.approx(-1)


def test_collaborative_fairness_of_equal_or_single_values_is_nan():
    different = torch.tensor([0.1, 0.2, 0.3])
    equal = torch.full((3,), 0.1)

    assert collaborative_fairness(different, equal).isnan()
    assert collaborative_fairness(equal, different).isnan()

    a_single_value = different[:1]
    assert collaborative_fairness(a_single_value, a_single_value).isnan()
