"""Values of Taylor expansions against enumeration and autograd."""

import numpy as np
import pytest
import torch
from functional.shapley.games import shapley_by_all_orders
from torch.testing import assert_close

from flsv.functional import client_in_run_values, gradient_shapley, step_weights
from flsv.functional.shapley.exact import all_coalitions
from helpers import make_generator, refused


def slopes_of_players(n):
    return torch.randn(
        n,
        dtype=torch.float64,
        generator=make_generator(n),
    )


SERVER_LR = 0.3


@pytest.mark.parametrize("is_mean", [True, False])
@pytest.mark.parametrize("n", [1, 2, 6])
def test_gradient_shapley_equals_enumeration_of_the_game_of_means_or_of_weights(n, is_mean):
    slopes = slopes_of_players(n)
    masks = all_coalitions(n).double()
    if is_mean:
        weighting = "uniform"
        shares = masks / masks.sum(1, keepdim=True).clamp_min(1)
    else:
        weighting = torch.rand(n).double()
        shares = masks * weighting

    values = gradient_shapley(slopes, weighting=weighting, server_lr=SERVER_LR)

    expected = shapley_by_all_orders(-SERVER_LR * shares @ slopes)
    np.testing.assert_allclose(values, expected, rtol=0, atol=1e-12)


def test_gradient_shapley_with_wrong_arguments_raises():
    slopes = slopes_of_players(3)
    with refused("weighting='samples'.*closed form"):
        gradient_shapley(slopes, weighting="samples")
    with pytest.raises(ValueError, match=r"gradient_products \[k\]"):
        gradient_shapley(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"fixed weights \[3\]"):
        gradient_shapley(slopes, weighting=torch.ones(2))
    with pytest.raises(ValueError, match=r"expected class_values \[3, M\], but got shape \[1, 2\]"):
        client_in_run_values(
            torch.ones(1, 2),
            slopes,
            torch.ones(3),
        )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_step_weights_equal_the_movement_under_torchs_sgd(momentum):
    rates = [0.1, 0.3, 0.2, 0.05]
    weights = step_weights(rates, momentum)

    for gradient_step in range(4):
        # The gradient is 1 in one step and 0 in all others.
        parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD(
            [parameter],
            lr=1.0,
            momentum=momentum,
        )
        for step, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            gradient = float(step == gradient_step)
            parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
        movement = -parameter.detach()[0]
        assert_close(movement, weights[gradient_step])


def test_step_weights_of_no_step_are_empty():
    assert step_weights([]).shape == (0,)


def test_class_values_and_rest_sum_to_the_clients_gradient_shapley():
    server_lr = 0.7
    generator = make_generator(3)
    slopes_by_class = torch.randn(3, 2, generator=generator)
    slopes = torch.randn(3, generator=generator)
    weights = torch.tensor([0.2, 0.5, 0.3])

    values = client_in_run_values(slopes_by_class, slopes, weights, server_lr=server_lr)

    values_by_class = server_lr * weights[:, None] * slopes_by_class
    total = gradient_shapley(slopes.double(), weighting=weights, server_lr=server_lr)
    assert_close(values[:, :2], values_by_class.double())
    assert_close(values.sum(1), total)
