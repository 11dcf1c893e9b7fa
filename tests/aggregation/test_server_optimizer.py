"""Server optimizers against plain loops written from the papers."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from one_client import cohort, train
from torch import Tensor, nn
from toys import Plain, fit, network, toy_data

from flsv.aggregation import FedAdam, FedAvgM, FedYogi, ServerOptimizer
from flsv.aggregation.server_optimizer import AdaptiveServer
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.round import Round
from flsv.sampling import UniformSampler

SEED, ROUNDS = 5, 5

BETA1, BETA2, TAU = 0.9, 0.99, 1e-3


def by_hand(net: nn.Module, rule: str, lr: float) -> dict[str, Tensor]:
    """Algorithms 1 and 2, tensor by tensor, with the weighted mean over the cohort."""
    data = toy_data()
    data.setup("fit")
    server = copy.deepcopy(net)
    m = {name: torch.zeros_like(p) for name, p in server.named_parameters()}
    v = {name: torch.full_like(p, TAU**2) for name, p in server.named_parameters()}
    for r in range(ROUNDS):
        clients = cohort(SEED, r)
        models = [train(server, data, client, SEED, r) for client in clients]
        n = [float(data.num_samples[client]) for client in clients]
        state = {}
        for name, x in server.state_dict().items():
            if not x.is_floating_point():
                state[name] = models[0].state_dict()[name]
                continue
            delta = sum(w * (each.state_dict()[name] - x) for w, each in zip(n, models)) / sum(n)
            if name not in m:
                state[name] = x + delta
                continue
            if rule == "momentum":
                m[name] = BETA1 * m[name] + delta
                state[name] = x + lr * m[name]
                continue
            m[name] = BETA1 * m[name] + (1 - BETA1) * delta
            if rule == "adam":
                v[name] = BETA2 * v[name] + (1 - BETA2) * delta**2
            else:
                v[name] = v[name] - (1 - BETA2) * delta**2 * torch.sign(v[name] - delta**2)
            state[name] = x + lr * m[name] / (v[name].sqrt() + TAU)
        server.load_state_dict(state)
    return server.state_dict()


@pytest.mark.parametrize(
    ("aggregator", "rule", "lr"),
    [(FedAvgM(lr=0.5), "momentum", 0.5), (FedAdam(lr=0.03), "adam", 0.03), (FedYogi(lr=0.03), "yogi", 0.03)],
    ids=["fedavgm", "fedadam", "fedyogi"],
)
@pytest.mark.parametrize("batch_norm", [False, True])
def test_same_global_model_as_by_hand(
    tmp_path: Path, aggregator: ServerOptimizer, rule: str, lr: float, batch_norm: bool
) -> None:
    net = network(batch_norm)
    expected = by_hand(net, rule, lr)
    loop = FederatedLoop(aggregator=aggregator, sampler=UniformSampler(2), seed=SEED)
    module = fit(loop, tmp_path, Plain(copy.deepcopy(net)), rounds=ROUNDS)
    for name, value in module.net.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


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


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerOptimizer(partial(torch.optim.SGD, lr=-1.0)),
        lambda: ServerOptimizer(partial(torch.optim.SGD, learning_rate=1.0)),
    ],
)
def test_wrong_arguments(make: Any) -> None:
    with pytest.raises(ConfigurationError, match="cannot be made"):
        make()
