"""Models trained side by side, against the same models trained one after the other by a plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv.clients.kernel import ELEMENTWISE, GatheredBatches, GivenBatches, RowTraining
from flsv.errors import ConfigurationError

Batches = list[list[tuple[Tensor, Tensor]]]
#: Steps of every model, and the size of its last batch.
MODELS = [(3, 8), (5, 8), (5, 3), (1, 8), (4, 3), (2, 3)]


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Linear(20, 16, bias=not norm), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh()]
        self.net = nn.Sequential(*layers, nn.Linear(16, 4))

    def training_step(self, batch: Any, batch_idx: Any) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


def batches_of(seed: int = 1) -> Batches:
    draw = torch.Generator().manual_seed(seed)
    sizes = [[8] * (steps - 1) + [last] for steps, last in MODELS]
    return [
        [(torch.randn(n, 20, generator=draw), torch.randint(4, (n,), generator=draw)) for n in each] for each in sizes
    ]


def starts(net: nn.Module) -> dict[str, Tensor]:
    """A different one for every model."""
    draw = torch.Generator().manual_seed(7)

    def differ(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.arange(len(MODELS)) + tensor
        return tensor + 0.1 * torch.rand(len(MODELS), *tensor.shape, generator=draw)

    return {name: differ(tensor.detach()) for name, tensor in net.state_dict().items()}


Make = Callable[[Any], torch.optim.Optimizer]


def one_by_one(
    net: nn.Module, make: Make, given: Batches, clip: float | None = None
) -> tuple[list[dict[str, Tensor]], Tensor]:
    models, losses, begun = [], [], starts(net)
    for i, batches in enumerate(given):
        own = copy.deepcopy(net)
        own.load_state_dict({name: tensor[i] for name, tensor in begun.items()})
        optimizer, total = make(own.parameters()), 0.0
        for batch in batches:
            optimizer.zero_grad()
            loss = own.training_step(batch, 0)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(own.parameters(), clip)
            optimizer.step()
            total += loss.item()
        models.append(own.state_dict())
        losses.append(total / len(batches))
    return models, torch.tensor(losses)


def sgd(**options: Any) -> Make:
    return lambda parameters: torch.optim.SGD(parameters, lr=0.1, **options)


def groups(parameters: Any) -> torch.optim.Optimizer:
    first, *rest = parameters
    return torch.optim.SGD([{"params": [first], "lr": 0.01}, {"params": rest, "momentum": 0.9}], lr=0.1)


class Decayed(Net):
    """The first weight is in the loss twice, once by itself."""

    def training_step(self, batch: Any, batch_idx: Any) -> Tensor:
        return super().training_step(batch, batch_idx) + self.net[0].weight.square().sum()  # type: ignore[union-attr, operator]


class Penalized(Net):
    """A gradient by the inputs is in the loss."""

    def training_step(self, batch: Any, batch_idx: Any) -> Tensor:
        x, y = batch
        slope = torch.func.grad(lambda x: nn.functional.cross_entropy(self.net(x), y))(x)
        return super().training_step(batch, batch_idx) + slope.square().sum()


def named(name: str) -> Make:
    return lambda parameters: getattr(torch.optim, name)(parameters)


CASES: dict[str, tuple[Callable[[], Net], Make, float | None]] = {
    **{name: (Net, named(name), None) for name in ELEMENTWISE},
    "nesterov": (Net, sgd(momentum=0.9, nesterov=True, weight_decay=0.01), None),
    "AMSGrad": (Net, lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.01), None),
    "foreach": (Net, lambda p: torch.optim.AdamW(p, foreach=True), None),
    "groups keep their options": (Net, groups, None),
    "buffers are each model's own": (partial(Net, norm=True), sgd(), None),
    "norms are clipped model by model": (Net, sgd(), 0.5),
    "norms are never raised": (Net, sgd(), 100.0),
    "a weight in the loss": (Decayed, sgd(), None),
    "a gradient in the loss": (Penalized, sgd(), None),
}


@pytest.mark.parametrize("name", CASES)
def test_each_model_is_trained_as_alone(name: str) -> None:
    make_net, make, clip = CASES[name]
    net, given = make_net(), batches_of()
    optimizer, untouched = make(net.parameters()), make(net.parameters()).state_dict()
    trained, losses = RowTraining(net, optimizer, clip_norm=clip).train(starts(net), GivenBatches(given))
    models, expected = one_by_one(make_net(), make, given, clip)
    for i, model in enumerate(models):
        for key, tensor in model.items():
            torch.testing.assert_close(trained[key][i], tensor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(losses, expected)
    assert str(optimizer.state_dict()) == str(untouched)
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), make_net().parameters()))


def test_what_requires_no_gradient_or_has_none_stays_to_the_bit() -> None:
    net = Net()
    net.spare = nn.Parameter(torch.ones(3))
    net.net[0].bias.requires_grad_(False)
    before = starts(net)
    training = RowTraining(net, sgd(weight_decay=0.1)(net.parameters()), apart={"spare"})
    trained, _ = training.train({name: tensor.clone() for name, tensor in before.items()}, GivenBatches(batches_of()))
    moved = {name for name in before if not torch.equal(trained[name], before[name])}
    assert moved == {"net.0.weight", "net.3.weight", "net.3.bias"}


def test_gathered_batches_are_the_given_ones() -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(40, 20, generator=draw), torch.randint(4, (40,), generator=draw)
    rows = [list(torch.randperm(40, generator=draw)[:n].split(8)) for n in (24, 19, 8, 3)]
    gathered = GatheredBatches((x, y), rows)
    given = GivenBatches([[(x[r], y[r]) for r in each] for each in rows])
    assert gathered.lengths == given.lengths == [3, 3, 1, 1]
    for clients, step in (([0, 1, 2, 3], 0), ([0, 1], 2), ([1, 0], 1)):
        for (places, batch), (expected, other) in zip(gathered.at(clients, step), given.at(clients, step), strict=True):
            assert places == expected
            assert all(torch.equal(a, b) for a, b in zip(batch, other))
    assert torch.equal(gathered.one(1, 2)[0], x[rows[1][2]])


def test_batches_of_any_nesting_are_stacked() -> None:
    given = GivenBatches(
        [[{"x": torch.ones(2), "more": [torch.zeros(2)]}], [{"x": torch.ones(2), "more": [torch.ones(2)]}]]
    )
    ((places, batch),) = given.at([0, 1], 0)
    assert places == [0, 1]
    assert batch["more"][0].tolist() == [[0, 0], [1, 1]]
    with pytest.raises(ConfigurationError, match="one holds a str"):
        list(GivenBatches([[(torch.ones(2), "name")]]).at([0], 0))
