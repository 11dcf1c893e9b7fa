"""Columns in which all rows of a matrix agree."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flsv.functional import agreement as module
from flsv.functional.agreement import common_entries, keep_common


def matrix(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Many columns agree in some rows, some in all."""
    return torch.randint(0, 3, (rows, columns), generator=torch.Generator().manual_seed(seed)).float() / 10


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_against_numpy(monkeypatch: pytest.MonkeyPatch, rows: int, block: int) -> None:
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
