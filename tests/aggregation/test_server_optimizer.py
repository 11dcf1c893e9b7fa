"""Server optimizers beyond tests/replay: any of torch, failed rounds, pieces, another fit."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flsv.aggregation import FedAvgM, FedYogi, ServerOptimizer
from flsv.aggregation.server_optimizer import AdaptiveServer
from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
from flsv.round import Round

TAU = 1e-3


def a_round(seed: int, x: Tensor, index: int = 0) -> Round:
    space = ParameterSpace(nn.Linear(3, 2))
    draw = torch.Generator().manual_seed(seed)
    return Round(index, torch.arange(3), torch.tensor([1, 2, 3]), x, x + torch.randn(3, 8, generator=draw), space)


def steps(aggregator: ServerOptimizer, rounds: int = 3) -> Tensor:
    x = torch.ones(8)
    for seed in range(rounds):
        round = a_round(seed, x, seed)
        x, weights = aggregator.aggregate(round, {})
        torch.testing.assert_close(weights, torch.tensor([1 / 6, 2 / 6, 3 / 6]))
        aggregator.end_round(round)
    return x


def test_any_torch_optimizer_will_do() -> None:
    """Algorithm 2's FedAdagrad with beta1 = 0 is torch.optim.Adagrad."""
    x, v = torch.ones(8), torch.full((8,), TAU**2)
    for seed in range(3):
        round = a_round(seed, x)
        delta = (round.num_samples / 6) @ (round.client_vectors - x)
        v = v + delta**2
        x = x + 0.1 * delta / (v.sqrt() + TAU)
    adagrad = partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=TAU**2, eps=TAU)
    torch.testing.assert_close(steps(ServerOptimizer(adagrad)), x)


def test_a_round_that_fails_leaves_no_trace() -> None:
    aggregator = FedYogi()
    steps(aggregator)
    before = copy.deepcopy(aggregator.state_dict())
    aggregator.aggregate(a_round(9, torch.ones(8)), {})  # and no end_round
    after = aggregator.state_dict()
    for name in ("m", "v"):
        assert torch.equal(before["moments"][0][name], after["moments"][0][name])


@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_its_pieces_are_the_whole(monkeypatch: pytest.MonkeyPatch, rule: Any) -> None:
    def stepped() -> list[Tensor]:
        torch.manual_seed(0)
        points = [nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(5, 2).T), nn.Parameter(torch.randn(()))]
        optimizer = AdaptiveServer(points, rule=rule)
        for _ in range(2):
            for point in points:
                point.grad = torch.randn_like(point)
            optimizer.step()
        return [point.detach() for point in points]

    whole = stepped()
    monkeypatch.setattr("flsv.aggregation.server_optimizer.PIECE", 3)
    assert all(map(torch.equal, stepped(), whole))


def test_a_new_fit_starts_anew() -> None:
    aggregator = FedAvgM()
    first = steps(aggregator)
    aggregator.begin(None)  # type: ignore[arg-type]
    assert torch.equal(steps(aggregator), first)
    assert not torch.equal(steps(aggregator), first)


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"learning_rate": 1.0}])
def test_wrong_arguments(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="cannot be made"):
        ServerOptimizer(partial(torch.optim.SGD, **wrong))
