"""Clipped lengths and numbers of samples."""

import numpy as np
import pytest
import torch

from flsv.functional.clipping import counted, length_factors, shortened


@pytest.mark.parametrize("cap", [0.5, 1.25])
def test_no_length_is_above_the_bound_and_none_below_it_changes(cap: float) -> None:
    norms = torch.rand(9, generator=torch.Generator().manual_seed(0)) * 10
    bound = cap * np.median(norms.double().numpy())
    factors = length_factors(norms, cap)
    np.testing.assert_allclose((factors * norms.double()).numpy(), np.minimum(norms.double().numpy(), bound))


def test_samples_that_count() -> None:
    told = torch.tensor([30, 31, 31, 500])
    assert counted(told, None) is told
    assert counted(told, 1.25).tolist() == [30, 31, 31, 39]  # 1.25 * 31 = 38.75
    assert counted(told, 1.25).dtype == torch.int64


def test_models_are_moved_along_their_updates_and_buffers_stay() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, start = torch.randn(4, 6, generator=generator), torch.randn(6, generator=generator)
    factors = torch.tensor([1.0, 0.5, 1.0, 0.25], dtype=torch.float64)
    result = shortened(rows, start, factors, end=5)
    assert torch.equal(result[[0, 2]], rows[[0, 2]])
    assert torch.equal(result[:, 5], rows[:, 5])
    expected = start + factors[:, None] * (rows.double() - start)
    torch.testing.assert_close(result[:, :5].double(), expected[:, :5])
    # Starts of their own give the same.
    torch.testing.assert_close(shortened(rows, start.expand(4, 6).clone(), factors, end=5), result)
    assert shortened(rows, start, torch.ones(4), end=5) is rows
