"""Gradients of the validation loss against autograd."""

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.games import ModelEvaluator

CLASSES = 3


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
        mixed = nn.functional.scaled_dot_product_attention(
            hidden[:, None], hidden[:, None], hidden[:, None]
        )[:, 0]
        return self.head(torch.tanh(mixed + hidden))


def test_game_gradients_equal_those_of_autograd() -> None:
    torch.manual_seed(0)
    net = Smooth().train()
    net.norm.running_mean.uniform_(-1, 1)
    net.norm.running_var.uniform_(0.5, 2)
    space = ParameterSpace(net)
    start, cut = space.read(net), space.num_parameters
    x, y = torch.randn(40, 4), torch.randint(CLASSES, (40,))
    evaluate = ModelEvaluator(net, space, list(zip(x.split(16), y.split(16))), num_classes=CLASSES)

    def loss(parameters: Tensor, balanced: bool = False) -> Tensor:
        state = {**space.unflatten(start), **space.unflatten(parameters)}
        each = nn.functional.cross_entropy(
            torch.func.functional_call(net.eval(), state, (x,)), y, reduction="none"
        )
        return (
            torch.stack([each[y == c].mean() for c in y.unique()]).mean()
            if balanced
            else each.mean()
        )

    gradient, by_class = (
        torch.autograd.functional.jacobian(partial(loss, balanced=b), start[:cut])
        for b in (False, True)
    )
    net.train()
    for balanced, expected in ((False, gradient), (True, by_class)):
        np.testing.assert_allclose(evaluate.gradient(start, balanced), expected, atol=1e-6)
    assert net.training
