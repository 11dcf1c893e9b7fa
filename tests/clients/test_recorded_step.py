"""Steps that are played back, against the same steps taken anew."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv.clients.row_step import RowStep

MODELS, BATCH, OFTEN = 4, 6, 2


class Step(nn.Module):
    """A classifier's."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.count = net, 0

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)


class Counts(Step):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.count += 1
        return super().training_step(batch) * self.count


class Chance(Step):
    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().training_step(batch) * random.random()


class Looks(Step):
    """At the batch, which all models share."""

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().training_step(batch) * (2 if batch[1][0].item() > 0 else 1)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))


CASES: dict[str, tuple[Any, int]] = {
    "MLP": (lambda: Step(mlp()), 1),
    "batch norm": (lambda: Step(normed()), 1),
    "dropout": (lambda: Step(dropping()), 0),
    "counts": (lambda: Counts(mlp()), 0),
    "chance": (lambda: Chance(mlp()), 0),
    "looks": (lambda: Looks(mlp()), 0),
}


@pytest.mark.parametrize("name", CASES)
def test_played_back_is_the_same_and_what_may_change_is_not_recorded(name: str) -> None:
    make, recorded = CASES[name]
    torch.manual_seed(0)
    module = make()
    names = [name for name, _ in module.named_parameters()]
    start = {n: torch.randn(MODELS, *t.shape).abs() for n, t in (*module.named_parameters(), *module.named_buffers())}
    start = {n: t.to(dict(module.state_dict())[n].dtype) for n, t in start.items()}
    results = []
    for step in (RowStep(module, names, shared=True, often=99), RowStep(module, names, shared=True, often=OFTEN)):
        module.count, taken = 0, []
        states = {n: t.clone() for n, t in start.items()}
        torch.manual_seed(1)
        random.seed(1)
        for place in range(5):
            x = torch.randn(BATCH, 5, generator=torch.Generator().manual_seed(place))
            y = (torch.arange(BATCH) + place) % 3
            gradients, losses = step.played(states, (x, y)) or step(states, (x, y))
            taken.append({**gradients, "losses": losses, **{n: states[n].clone() for n in states if n not in names}})
        results.append(taken)
    assert step.recorded == recorded
    for expected, found in zip(*results):
        assert expected.keys() == found.keys()
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)


class Moves(Step):
    """On what a round may change."""

    share = 1.0

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().training_step(batch) * self.share


def test_a_recording_in_doubt_is_compared_before_it_is_played_again() -> None:
    module = Moves(mlp())
    states = {name: p.detach().expand(MODELS, *p.shape).clone() for name, p in module.named_parameters()}
    step, batch = RowStep(module, list(states), shared=True, often=1), (torch.randn(BATCH, 5), torch.arange(BATCH) % 3)
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
