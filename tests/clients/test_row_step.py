"""Losses and gradients of stacked models, against torch's autograd on each of them alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv.clients.row_step import RowStep

MODELS, BATCH = 3, 5


class Step(nn.Module):
    """Any network's step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()


class Tied(nn.Module):
    """One weight in two layers, and once as a bare tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x @ self.other.weight.T, weight=self.one.weight) + self.other(self.one(x))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cells(x)[0][:, -1])


class Counting(nn.Module):
    """Puts a new tensor in its buffer's place, and writes into the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.sum(0)
        self.steps += 1
        return x * self.weight + self.seen


NETS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 2, bias=False)), (BATCH, 4)),
    "linear of sequences": (lambda: nn.Linear(4, 3), (BATCH, 6, 4)),
    "linear of one vector": (lambda: nn.Linear(4, 3), (4,)),
    "tied": (Tied, (BATCH, 4)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)), (BATCH, 2, 4, 4)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (BATCH, 3, 4)),
    "recurrent": (Recurrent, (BATCH, 3, 4)),
    "buffers": (Counting, (BATCH, 4)),
}


@pytest.mark.parametrize("name", NETS)
def test_every_model_has_its_own(name: str) -> None:
    make, shape = NETS[name]
    torch.manual_seed(0)
    module = Step(make())
    names = {key: tensor.detach() for key, tensor in (*module.named_parameters(), *module.named_buffers())}
    states = {
        key: torch.stack([tensor + 0.1 * torch.rand_like(tensor) for _ in range(MODELS)])
        for key, tensor in names.items()
    }
    before = {key: tensor.clone() for key, tensor in names.items()}
    begun = {key: tensor.clone() for key, tensor in states.items()}
    batch = torch.randn(MODELS, *shape)
    gradients, losses = RowStep(module, [key for key, _ in module.named_parameters()])(states, batch)
    for i in range(MODELS):
        own = copy.deepcopy(module)
        with torch.no_grad():
            for key, tensor in (*own.named_parameters(), *own.named_buffers()):
                tensor.copy_(begun[key][i])
        loss = own.training_step(batch[i])
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        for key, parameter in own.named_parameters():
            torch.testing.assert_close(gradients[key][i], parameter.grad, rtol=1e-5, atol=1e-6)
        for key, buffer in own.named_buffers():
            torch.testing.assert_close(states[key][i], buffer)
    # The module is as it was, and holds its own tensors.
    for key, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert tensor.data_ptr() == names[key].data_ptr()
        assert torch.equal(tensor, before[key])


def test_a_layer_that_is_frozen_and_not_stacked() -> None:
    module = Step(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    torch.manual_seed(0)
    states = {"net.1.weight": torch.randn(2, 2, 4), "net.1.bias": torch.randn(2, 2)}
    batch = torch.randn(2, BATCH, 4)
    gradients, losses = RowStep(module, list(states))(states, batch)
    for i in range(2):
        weight, bias = (states[name][i].clone().requires_grad_() for name in states)
        loss = nn.functional.linear(module.net[0](batch[i]).detach(), weight, bias).square().mean()
        loss.backward()
        torch.testing.assert_close(losses[i], loss.detach())
        torch.testing.assert_close(gradients["net.1.weight"][i], weight.grad)
