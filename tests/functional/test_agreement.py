"""CSSV against NumPy, straight from equations 5 and 6; columns in which all rows agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flsv.functional import agreement as module
from flsv.functional import class_specific_shapley, participant_weights
from flsv.functional.agreement import common_entries, keep_common


def cssv_by_hand(clients: np.ndarray, server: np.ndarray) -> np.ndarray:
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
    np.testing.assert_allclose(got.numpy(), cssv_by_hand(clients, server), rtol=1e-12)


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


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Many columns agree in some rows, some in all."""
    return torch.randint(0, 3, (rows, columns), generator=torch.Generator().manual_seed(seed)).float() / 10


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_common_entries_against_numpy(monkeypatch: pytest.MonkeyPatch, rows: int, block: int) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    x = matrix(rows, 40, rows)
    found = np.zeros(40, dtype=bool)
    for columns, same in common_entries(x):
        assert same.any()
        found[columns] = same.numpy()
    assert np.array_equal(found, np.ptp(x.numpy(), axis=0) == 0)


def test_averages_keep_what_is_common_to_the_bit() -> None:
    x = matrix(3, 400, 0)
    weights = torch.softmax(torch.randn(2, 3, generator=torch.Generator().manual_seed(1)), -1)
    plain = weights @ x
    common = (x == x[0]).all(0)
    assert not torch.equal(plain[0, common], x[0, common])  # what rounding does
    kept = keep_common(plain.clone(), x)
    assert torch.equal(kept[:, common], x[0, common].expand(2, -1))
    assert torch.equal(kept[:, ~common], plain[:, ~common])
