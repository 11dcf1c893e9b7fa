"""Clipped lengths and numbers of samples."""

import numpy as np
import pytest
import torch

from flsv.filters.caps import capped_samples, length_factors, scale_updates


@pytest.mark.parametrize("cap", [0.5, 1.25])
def test_length_factors_cap_long_updates_at_the_bound_and_keep_short_ones(cap: float) -> None:
    norms = (
        torch.rand(
            9,
            generator=torch.Generator().manual_seed(0),
        )
        * 10
    )
    norms_by_numpy = norms.double().numpy()
    bound = cap * np.median(norms_by_numpy)

    capped = length_factors(norms, cap) * norms.double()

    np.testing.assert_allclose(
        capped.numpy(),
        np.minimum(norms_by_numpy, bound),
    )


def test_capped_samples_are_at_most_the_bound() -> None:
    num_samples = torch.tensor([30, 31, 31, 500])
    assert capped_samples(num_samples, None) is num_samples

    capped = capped_samples(num_samples, 1.25)

    assert capped.tolist() == [30, 31, 31, 39]  # 1.25 * 31 = 38.75
    assert capped.dtype == torch.int64


def test_scale_updates_moves_models_along_their_updates_and_leaves_buffers() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 6, generator=generator)
    initial = torch.randn(6, generator=generator)
    factors = torch.tensor([1.0, 0.5, 1.0, 0.25], dtype=torch.float64)

    scaled = scale_updates(rows, initial, factors, num_parameters=5)

    updates = rows.double() - initial
    expected = initial + factors[:, None] * updates
    torch.testing.assert_close(scaled[:, :5].double(), expected[:, :5])
    assert torch.equal(scaled[[0, 2]], rows[[0, 2]])
    assert torch.equal(scaled[:, 5], rows[:, 5])


def test_scale_updates_by_an_initial_model_for_each_client_gives_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(4, 6, generator=generator)
    initial = torch.randn(6, generator=generator)
    initial_models = initial.expand(4, 6).clone()
    factors = torch.tensor([1.0, 0.5, 1.0, 0.25], dtype=torch.float64)

    scaled = scale_updates(rows, initial_models, factors, num_parameters=5)

    torch.testing.assert_close(
        scaled,
        scale_updates(
            rows,
            initial,
            factors,
            num_parameters=5,
        ),
    )


def test_scale_updates_by_1_copies_nothing() -> None:
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))

    assert (
        scale_updates(
            rows,
            torch.zeros(6),
            torch.ones(4),
            num_parameters=5,
        )
        is rows
    )
