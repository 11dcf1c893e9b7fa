"""In-run values: what steps move under torch's SGD, and sums of rows."""

import pytest
import torch

from flsv.functional import client_in_run_values, gradient_shapley, step_weights


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_step_weights_equal_the_movement_under_torchs_sgd(momentum: float) -> None:
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


def test_class_values_and_rest_sum_to_the_clients_gradient_shapley() -> None:
    draw = torch.Generator().manual_seed(3)
    classes, slopes = torch.randn(3, 2, generator=draw), torch.randn(3, generator=draw)
    bends, weights = torch.randn(3, 3, generator=draw).double(), torch.tensor([0.2, 0.5, 0.3])
    for hessian_products in (None, bends):
        rows = client_in_run_values(classes, slopes, weights, hessian_products, server_lr=0.7)
        values = gradient_shapley(slopes.double(), hessian_products, weighting=weights, server_lr=0.7)
        torch.testing.assert_close(rows.sum(1), values)
        torch.testing.assert_close(rows[:, :2], (0.7 * weights[:, None] * classes).double())
