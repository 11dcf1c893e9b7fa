"""Closed forms against enumeration, and gradient products against autograd's own Hessian."""

import numpy as np
import pytest
import torch
from functional.shapley.games import reference_shapley
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flsv.core import ClientMatrix
from flsv.core.parameter_space import ParameterSpace
from flsv.functional import client_in_run_values, gradient_shapley, step_weights
from flsv.functional.shapley.enumeration import all_coalitions
from flsv.games import ModelEvaluator
from flsv.utilities.errors import ConfigurationError

CLASSES = 3


def products(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    factor = torch.randn(n, n, dtype=torch.float64, generator=generator)
    hessian = factor @ factor.T - torch.eye(n, dtype=torch.float64)  # symmetric, indefinite
    return torch.randn(n, dtype=torch.float64, generator=generator), hessian


def taylor_value(mask: Tensor, first: Tensor, second: Tensor | None, weights: Tensor | None, lr: float) -> Tensor:
    w = mask * (1 / mask.sum().clamp_min(1) if weights is None else weights)
    return -lr * w @ first - (0 if second is None else lr**2 / 2 * w @ second @ w)


@pytest.mark.parametrize("lr", [1.0, 0.3])
@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_against_enumeration(n: int, fixed: bool, order: int, lr: float) -> None:
    first, second = products(n)
    hessian = second if order == 2 else None
    weights = torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) if fixed else None
    table = torch.stack([taylor_value(mask, first, hessian, weights, lr) for mask in all_coalitions(n).double()])
    found = gradient_shapley(first, hessian, weighting="uniform" if weights is None else weights, server_lr=lr)
    np.testing.assert_allclose(found, reference_shapley(table), rtol=0, atol=1e-12)


def test_wrong_arguments() -> None:
    first, second = products(3)
    with pytest.raises(ConfigurationError, match="weighting='samples'.*closed form"):
        gradient_shapley(first, weighting="samples")
    with pytest.raises(ValueError, match=r"gradient_products \[k\]"):
        gradient_shapley(second)
    with pytest.raises(ValueError, match=r"\[3, 3\]"):
        gradient_shapley(first, second[:2])
    with pytest.raises(ValueError, match=r"fixed weights \[3\]"):
        gradient_shapley(first, weighting=torch.ones(2))
    with pytest.raises(ValueError, match=r"\[1, 2\]: expected \[3, M\]"):
        client_in_run_values(torch.ones(1, 2), first, torch.ones(3))


class Smooth(nn.Module):
    """BatchNorm, attention, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.norm(self.first(x))))
        mixed = nn.functional.scaled_dot_product_attention(hidden[:, None], hidden[:, None], hidden[:, None])[:, 0]
        return self.head(torch.tanh(mixed + hidden))


def test_products_against_the_full_hessian() -> None:
    torch.manual_seed(0)
    net = Smooth().train()
    net.norm.running_mean.uniform_(-1, 1)
    net.norm.running_var.uniform_(0.5, 2)
    space = ParameterSpace(net)
    start, cut, updates = space.read(net), space.num_parameters, 0.1 * torch.randn(3, space.size)
    x, y = torch.randn(40, 4), torch.randint(CLASSES, (40,))
    evaluate = ModelEvaluator(net, space, list(zip(x.split(16), y.split(16))), num_classes=CLASSES)
    result = evaluate.gradient_products(start, ClientMatrix(updates, [torch.zeros(space.size)] * 3))
    assert net.training

    def loss(parameters: Tensor, balanced: bool = False) -> Tensor:
        state = {**space.unflatten(start), **space.unflatten(parameters)}
        each = nn.functional.cross_entropy(torch.func.functional_call(net.eval(), state, (x,)), y, reduction="none")
        return torch.stack([each[y == c].mean() for c in y.unique()]).mean() if balanced else each.mean()

    with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
        gradient = torch.autograd.functional.jacobian(loss, start[:cut])
        hessian = torch.autograd.functional.hessian(loss, start[:cut])
        by_class = torch.autograd.functional.jacobian(lambda parameters: loss(parameters, True), start[:cut])
    for balanced, expected in ((False, gradient), (True, by_class)):
        np.testing.assert_allclose(evaluate.gradient(start, balanced), expected, atol=1e-6)
    updates = updates[:, :cut]  # what moves in the buffers does not count
    np.testing.assert_allclose(result.gradient, updates @ gradient, atol=1e-6)
    np.testing.assert_allclose(result.hessian, updates @ hessian @ updates.T, atol=1e-6)
    assert torch.equal(result.hessian, result.hessian.T)


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
