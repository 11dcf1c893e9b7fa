"""Columns in which all rows agree."""

import pytest
import torch

from flsv.functional import common_entries as module
from flsv.functional.common_entries import keep_common


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_averages_keep_entries_that_all_models_share(
    monkeypatch: pytest.MonkeyPatch, rows: int, block: int
) -> None:
    monkeypatch.setattr(module, "_BLOCK", block)
    x = torch.randint(0, 3, (rows, 400), generator=torch.Generator().manual_seed(rows)).float() / 10
    weights = torch.softmax(torch.randn(2, rows, generator=torch.Generator().manual_seed(1)), -1)
    plain = weights @ x
    common = (x == x[0]).all(0)
    kept = keep_common(plain.clone(), x)
    assert torch.equal(kept[:, common], x[0, common].expand(2, -1))
    assert torch.equal(kept[:, ~common], plain[:, ~common])
