"""In-run data Shapley against the Shapley value of the Taylor utility, by its definition over all subsets."""

from __future__ import annotations

from itertools import combinations
from math import factorial

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian

from flsv.functional import client_in_run_values, gradient_shapley, in_run_shapley, step_weights

LR = 0.3


def by_definition(utility, players: int) -> Tensor:
    values = torch.zeros(players, dtype=torch.float64)
    for i in range(players):
        others = [j for j in range(players) if j != i]
        for size in range(players):
            weight = factorial(size) * factorial(players - 1 - size) / factorial(players)
            for part in combinations(others, size):
                values[i] += weight * (utility([*part, i]) - utility(list(part)))
    return values


def linear(seed: int = 0, samples: int = 4):
    """Softmax regression: the sample losses' gradients in a step, and the validation loss."""
    draw = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(s, generator=draw, dtype=torch.float64) for s in ((samples + 5, 3), (3, 2)))
    y = torch.arange(samples + 5) % 2

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(x @ w.view(3, 2), y)

    w = w.flatten()
    steps = torch.stack([grad(loss)(w, x[i : i + 1], y[i : i + 1]) / samples for i in range(samples)])
    return w, steps, lambda w: loss(w, x[samples:], y[samples:])


@pytest.mark.parametrize("order", [1, 2])
def test_the_values_of_the_taylor_utility_over_all_subsets(order: int) -> None:
    w, steps, validation = linear()
    g, h = grad(validation)(w), hessian(validation)(w)

    def utility(part: list[int]) -> float:
        move = -LR * steps[part].sum(0)
        return -float(g @ move + (order == 2) * move @ h @ move / 2)

    found = in_run_shapley(steps @ g, LR, steps @ h @ steps.T if order == 2 else None)
    torch.testing.assert_close(found, by_definition(utility, len(steps)))
    torch.testing.assert_close(found.sum(), torch.tensor(utility([0, 1, 2, 3])).double())


def test_the_second_order_is_exact_for_a_quadratic_loss() -> None:
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(6, 3, generator=draw, dtype=torch.float64), torch.randn(6, generator=draw, dtype=torch.float64)
    w, steps = torch.zeros(3, dtype=torch.float64), torch.randn(4, 3, generator=draw, dtype=torch.float64)

    def loss(w: Tensor) -> Tensor:
        return (x @ w - y).square().mean()

    g, h = grad(loss)(w), hessian(loss)(w)
    true = by_definition(lambda part: float(loss(w) - loss(w - LR * steps[part].sum(0))), 4)
    torch.testing.assert_close(in_run_shapley(steps @ g, LR, steps @ h @ steps.T), true)
    assert (in_run_shapley(steps @ g, LR) - true).abs().max() > 0.05


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_what_a_gradient_moves_under_torchs_sgd(momentum: float) -> None:
    lrs = [0.1, 0.3, 0.2, 0.05]
    for t in range(4):
        parameter = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([parameter], lr=1.0, momentum=momentum)
        for step, lr in enumerate(lrs):
            optimizer.param_groups[0]["lr"] = lr
            parameter.grad = torch.full_like(parameter, float(step == t))
            optimizer.step()
        torch.testing.assert_close(-parameter.detach()[0], step_weights(lrs, momentum)[t])
    assert step_weights([]).shape == (0,)


def test_rows_sum_to_the_clients_own_values() -> None:
    draw = torch.Generator().manual_seed(3)
    classes, slopes = torch.randn(3, 2, generator=draw), torch.randn(3, generator=draw)
    bends, weights = torch.randn(3, 3, generator=draw).double(), torch.tensor([0.2, 0.5, 0.3])
    for hessian_products in (None, bends):
        rows = client_in_run_values(classes, slopes, weights, hessian_products, server_lr=0.7)
        values = gradient_shapley(slopes.double(), hessian_products, weighting=weights, server_lr=0.7)
        torch.testing.assert_close(rows.sum(1), values)
        torch.testing.assert_close(rows[:, :2], (0.7 * weights[:, None] * classes).double())
    with pytest.raises(ValueError, match=r"class_values \[k, M\] of k=3"):
        client_in_run_values(classes[:2], slopes, weights)
