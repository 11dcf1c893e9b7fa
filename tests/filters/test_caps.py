"""Clipped lengths and numbers of samples."""

import torch

from flsv.filters.caps import scale_updates
from helpers import make_generator

#: One factor for each client's update.
FACTORS = [1.0, 0.5, 1.0, 0.25]


def test_scale_updates_moves_models_along_their_updates_and_leaves_buffers():
    generator = make_generator(1)
    rows = torch.randn(4, 6, generator=generator)
    initial = torch.randn(6, generator=generator)
    factors = torch.tensor(FACTORS).double()

    scaled = scale_updates(
        rows,
        initial,
        factors,
        num_parameters=5,
    )

    updates = rows.double() - initial
    expected = initial + factors[:, None] * updates
    scaled_parameters = scaled[:, :5].double()
    torch.testing.assert_close(scaled_parameters, expected[:, :5])

    unscaled = [0, 2]  # clients of factor 1
    assert torch.equal(scaled[unscaled], rows[unscaled])
    assert torch.equal(scaled[:, 5], rows[:, 5])


def test_scale_updates_by_an_initial_model_for_each_client_gives_the_same():
    generator = make_generator(1)
    rows = torch.randn(4, 6, generator=generator)
    initial = torch.randn(6, generator=generator)
    initial_models = initial.expand(4, 6).clone()
    factors = torch.tensor(FACTORS).double()

    scaled = scale_updates(
        rows,
        initial_models,
        factors,
        num_parameters=5,
    )
    scaled_by_one_model = scale_updates(
        rows,
        initial,
        factors,
        num_parameters=5,
    )

    torch.testing.assert_close(scaled, scaled_by_one_model)


def test_scale_updates_by_1_copies_nothing():
    generator = make_generator(1)
    rows = torch.randn(4, 6, generator=generator)

    scaled = scale_updates(
        rows,
        torch.zeros(6),
        torch.ones(4),
        num_parameters=5,
    )

    assert scaled is rows
