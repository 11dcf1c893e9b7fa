"""CSSV against NumPy, straight from equations 5 and 6."""

import numpy as np
import pytest
import torch

from flsv.functional import class_specific_shapley, participant_weights


def by_hand(clients: np.ndarray, server: np.ndarray) -> np.ndarray:
    result = np.zeros(clients.shape[:2])
    for i in range(clients.shape[0]):
        for j in range(clients.shape[1]):
            a, b = clients[i, j], server[j]
            norm = np.linalg.norm(a) * np.linalg.norm(b)
            result[i, j] = a @ b / norm if norm > 0 else 0.0
    return result


def test_against_numpy() -> None:
    rng = np.random.default_rng(0)
    clients, server = rng.normal(size=(6, 4, 9)), rng.normal(size=(4, 9))
    got = class_specific_shapley(torch.tensor(clients), torch.tensor(server))
    np.testing.assert_allclose(got.numpy(), by_hand(clients, server), rtol=1e-12)


def test_a_class_nobody_trained_is_zero_not_nan() -> None:
    clients, server = torch.randn(3, 2, 5), torch.randn(2, 5)
    clients[1, 0] = 0
    server[1] = 0
    got = class_specific_shapley(clients, server)
    assert got[1, 0] == 0
    assert (got[:, 1] == 0).all()
    assert got.isfinite().all()


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_does_not_matter_even_at_the_edge_of_float32(scale: float) -> None:
    torch.manual_seed(0)
    clients, server = torch.randn(3, 2, 5), torch.randn(2, 5)
    torch.testing.assert_close(
        class_specific_shapley(clients * scale, server * scale), class_specific_shapley(clients, server)
    )


def test_identical_and_opposite_rows_are_exactly_one() -> None:
    row = torch.randn(1, 3, 7)
    assert (class_specific_shapley(row, row[0]) <= 1).all()
    torch.testing.assert_close(class_specific_shapley(-row, row[0]), -torch.ones(1, 3))


def test_weights_follow_equation_6() -> None:
    cssv = torch.tensor([[0.5, -0.5, 1.0], [-1.0, -1.0, -1.0]])
    gamma, share = participant_weights(cssv)
    np.testing.assert_allclose(gamma.numpy(), [np.mean([0.75, 0.25, 1.0]), 0.0])
    assert share.sum() == 1
    assert (share >= 0).all()


def test_all_zero_weights_are_shared_equally() -> None:
    gamma, share = participant_weights(-torch.ones(4, 2))
    assert gamma.tolist() == [0] * 4
    assert share.tolist() == [0.25] * 4


def test_wrong_shapes() -> None:
    with pytest.raises(ValueError, match=r"client_heads \[k, M, D\]"):
        class_specific_shapley(torch.zeros(3, 4), torch.zeros(3, 4))
    with pytest.raises(ValueError, match=r"got \[2, 3, 4\] and \[3, 5\]"):
        class_specific_shapley(torch.zeros(2, 3, 4), torch.zeros(3, 5))
