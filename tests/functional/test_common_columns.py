"""Columns in which all rows agree."""

import pytest
import torch

from flsv.functional import common_columns as module
from flsv.functional.common_columns import keep_common
from helpers import make_generator


@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("block", [1, 7, 2**20])
def test_averages_keep_entries_that_all_models_share(monkeypatch, rows, block):
    monkeypatch.setattr(module, "_COLUMNS_PER_BLOCK", block)
    integers = torch.randint(
        0,
        3,
        (rows, 400),
        generator=make_generator(rows),
    )
    x = integers.float() / 10
    logits = torch.randn(
        2,
        rows,
        generator=make_generator(1),
    )
    averages = torch.softmax(logits, -1) @ x

    corrected = keep_common(averages.clone(), x)

    is_common = (x == x[0]).all(0)
    common = x[0, is_common].expand(2, -1)

    assert torch.equal(corrected[:, is_common], common)
    assert torch.equal(corrected[:, ~is_common], averages[:, ~is_common])
