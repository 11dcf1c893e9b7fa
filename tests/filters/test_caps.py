"""Clipped lengths and numbers of samples."""

import torch

from flsv.filters.caps import scale_updates


def test_scale_updates_moves_models_along_their_updates_and_leaves_buffers():
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


def test_scale_updates_by_an_initial_model_for_each_client_gives_the_same():
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


def test_scale_updates_by_1_copies_nothing():
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
