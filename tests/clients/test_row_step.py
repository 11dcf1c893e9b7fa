"""Losses and gradients of stacked models, against autograd on each of them alone; and steps that are played back."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv.clients.row_step import RowStep

MODELS, BATCH, OFTEN = 3, 5, 2


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


# ---- steps that are played back, against the same steps taken anew


class Counts(Step):
    count = 0

    def training_step(self, batch: Tensor) -> Tensor:
        self.count += 1
        return super().training_step(batch) * self.count


class Chance(Step):
    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch) * random.random()


class Looks(Step):
    """At the batch, which all models share."""

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch) * (2 if batch[0, 0].item() > 0 else 1)


def mlp(*between: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *between, nn.ReLU(), nn.Linear(8, 3))


RECORDED: dict[str, tuple[Any, int]] = {
    "MLP": (lambda: Step(mlp()), 1),
    "batch norm": (lambda: Step(mlp(nn.BatchNorm1d(8))), 1),
    "dropout": (lambda: Step(mlp(nn.Dropout(0.5))), 0),
    "counts": (lambda: Counts(mlp()), 0),
    "chance": (lambda: Chance(mlp()), 0),
    "looks": (lambda: Looks(mlp()), 0),
}


@pytest.mark.parametrize("name", RECORDED)
def test_played_back_is_the_same_and_what_may_change_is_not_recorded(name: str) -> None:
    make, recorded = RECORDED[name]
    torch.manual_seed(0)
    module = make()
    names = [name for name, _ in module.named_parameters()]
    held = dict(module.state_dict())
    start = {n: torch.randn(MODELS, *t.shape).abs().to(t.dtype) for n, t in held.items()}
    results = []
    for step in (RowStep(module, names, shared=True, often=99), RowStep(module, names, shared=True, often=OFTEN)):
        module.count, taken = 0, []
        states = {n: t.clone() for n, t in start.items()}
        torch.manual_seed(1)
        random.seed(1)
        for place in range(5):
            x = torch.randn(BATCH, 4, generator=torch.Generator().manual_seed(place))
            gradients, losses = step.played(states, x) or step(states, x)
            taken.append({**gradients, "losses": losses, **{n: states[n].clone() for n in states if n not in names}})
        results.append(taken)
    assert step.recorded == recorded
    for expected, found in zip(*results):
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())


class Moves(Step):
    """On what a round may change."""

    share = 1.0

    def training_step(self, batch: Tensor) -> Tensor:
        return super().training_step(batch) * self.share


def test_a_recording_in_doubt_is_compared_before_it_is_played_again() -> None:
    module = Moves(mlp())
    states = {name: p.detach().expand(MODELS, *p.shape).clone() for name, p in module.named_parameters()}
    step, batch = RowStep(module, list(states), shared=True, often=1), torch.randn(BATCH, 4)
    step(states, batch)
    for share, plays in ((1.0, True), (0.5, False)):
        module.share = share
        step.doubt()
        assert step.played(states, batch) is None
        gradients, _ = step(states, batch)
        assert (step.played(states, batch) is not None) == plays
    assert step.recorded == 0
    expected = RowStep(module, list(states), shared=True)(states, batch)[0]
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
