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
        self.tied = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.tied.weight
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.norm(self.tied(x))))
        mixed = nn.functional.scaled_dot_product_attention(
            hidden[:, None], hidden[:, None], hidden[:, None]
        )[:, 0]
        return self.head(torch.tanh(mixed + hidden))


def test_game_gradients_equal_those_of_autograd():
    torch.manual_seed(0)
    net = Smooth().train()
    net.norm.running_mean.uniform_(-1, 1)
    net.norm.running_var.uniform_(0.5, 2)
    space = ParameterSpace(net)
    model = space.read(net)
    cut = space.num_parameters
    x = torch.randn(40, 4)
    y = torch.randint(CLASSES, (40,))
    batches = list(zip(x.split(16), y.split(16)))
    evaluate = ModelEvaluator(net, space, batches, num_classes=CLASSES)

    def loss(parameters: Tensor, balanced: bool = False) -> Tensor:
        state = {
            **space.unflatten(model),
            **space.unflatten(parameters),
        }
        logits = torch.func.functional_call(
            net.eval(),
            state,
            (x,),
        )
        losses = nn.functional.cross_entropy(logits, y, reduction="none")

        if balanced:
            losses = torch.stack([losses[y == label].mean() for label in y.unique()])
        return losses.mean()

    jacobian = torch.autograd.functional.jacobian
    gradient = jacobian(loss, model[:cut])
    by_class = jacobian(
        partial(loss, balanced=True),
        model[:cut],
    )
    net.train()

    for balanced, expected in ((False, gradient), (True, by_class)):
        computed = evaluate.gradient(model, balanced)
        np.testing.assert_allclose(computed, expected, atol=1e-6)

    assert net.training
