"""FedNova and FedBuff against their update rules in plain PyTorch."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ROUNDS, SEED, assert_same, batches, buffers_of, cohort, copies, put, unequal_data
from one_client import cohort as two_of
from one_client import train
from torch import Tensor, nn
from toys import Plain, fit, network, toy_data

from flsv.aggregation import FedAvg, FedBuff, FedNova, StaleStarts
from flsv.clients.algorithms import FedProx
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.round import Round
from flsv.sampling import UniformSampler

LR, BUFFERS, FEDBUFF_SEED = 0.05, 6, 4


def fednova(**kwargs: Any) -> FederatedLoop:
    options: dict[str, Any] = {"sampler": UniformSampler(3), "local_epochs": 2, "seed": SEED, **kwargs}
    return FederatedLoop(FedNova(), **options)


def fednova_by_hand(net: nn.Module, rho: float) -> nn.Module:
    """Equation 4: d_i = G_i a_i / |a_i|, from the gradients that a client has seen."""
    data, server = unequal_data(), copy.deepcopy(net)
    for t in range(ROUNDS):
        x, directions, norms, sizes, buffers = copies(server), [], [], [], []
        for i in cohort(t):
            client = copy.deepcopy(server).train()
            momentum = [torch.zeros_like(p) for p in x]
            seen = []
            for features, labels in batches(data, t, i):
                loss = nn.functional.cross_entropy(client(features), labels)
                seen.append(torch.autograd.grad(loss, list(client.parameters())))
                momentum = [rho * m + g for m, g in zip(momentum, seen[-1])]
                with torch.no_grad():
                    for y, m in zip(client.parameters(), momentum):
                        y -= LR * m
            # A gradient is in the buffer once fresh, and faded by rho in every step after.
            a = [sum(rho**later for later in range(len(seen) - k)) for k in range(len(seen))]
            norms.append(sum(a))
            directions.append([sum(w * g for w, g in zip(a, parts)) / norms[-1] for parts in zip(*seen)])
            sizes.append(float(data.num_samples[i]))
            buffers.append(buffers_of(client))
        p = [size / sum(sizes) for size in sizes]
        effective = sum(share * norm for share, norm in zip(p, norms))
        new = [
            start - effective * LR * sum(share * d for share, d in zip(p, parts))
            for start, *parts in zip(x, *directions)
        ]
        put(server, new, buffers, [share / norm for share, norm in zip(p, norms)])
    return server


def sgd(parameters: Any, rho: float = 0.0, **kwargs: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR, momentum=rho, **kwargs)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_fednova_is_as_by_hand(tmp_path: Path, batch_norm: bool, rho: float) -> None:
    net = network(batch_norm)
    expected = fednova_by_hand(net, rho)
    module = Plain(copy.deepcopy(net), partial(sgd, rho=rho))
    loop = fednova()
    fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert loop.weights is not None
    assert loop.weights.nansum() != pytest.approx(1, abs=0.05)  # the steps were unequal


def test_accumulation_counts_steps_and_not_batches(tmp_path: Path) -> None:
    """With whole epochs in a window every client takes one step a round, and FedNova is FedAvg."""
    models = [
        fit(FederatedLoop(aggregator, seed=1), tmp_path, Plain(network()), accumulate_grad_batches=100)
        for aggregator in (FedNova(), FedAvg())
    ]
    assert_same(models[0].net, models[1].net)


def test_a_client_that_took_no_step() -> None:
    space = ParameterSpace(nn.Linear(3, 1))
    start, samples = torch.zeros(4), torch.tensor([10, 30])
    vectors = torch.stack([torch.ones(4), start])
    round = Round(0, torch.arange(2), samples, start, vectors, space, num_steps=torch.tensor([5, 0]))
    vector, _ = FedNova().aggregate(round, {})
    torch.testing.assert_close(vector, torch.full((4,), 0.25 * 5 * 0.25 / 5))


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(sgd, rho=0.9, nesterov=True),
        partial(sgd, rho=0.9, dampening=0.5),
        lambda parameters: torch.optim.Adam(parameters),
    ],
)
def test_other_optimizers_are_refused_before_training(tmp_path: Path, optimizer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"FedNova\(\) must know what a local step adds to an update"):
        fit(FederatedLoop(FedNova()), tmp_path, Plain(optimizer=optimizer))


def test_client_algorithms_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"FedProx\(\) changes the steps"):
        fit(FederatedLoop(FedNova(), client_algorithm=FedProx()), tmp_path)


def fedbuff_by_hand(net: nn.Module) -> tuple[dict[str, Tensor], set[int]]:
    """The server's model after BUFFERS buffers of two updates, and the staleness met."""
    data = toy_data()
    data.setup("fit")
    server, downloaded, met = copy.deepcopy(net), {}, set()
    for r in range(BUFFERS):
        clients = two_of(FEDBUFF_SEED, r)
        starts = {client: downloaded.get(client, (server, r)) for client in clients}
        trained = {client: train(starts[client][0], data, client, FEDBUFF_SEED, r).state_dict() for client in clients}
        s = {client: (1 + r - starts[client][1]) ** -0.5 for client in clients}
        met |= {r - version for _, version in starts.values()}
        parameters, state = dict(net.named_parameters()), {}
        for name, x in server.state_dict().items():
            if name in parameters:
                old = {client: starts[client][0].state_dict()[name] for client in clients}
                state[name] = x + sum(s[client] * (trained[client][name] - old[client]) for client in clients) / 2
            elif x.is_floating_point():
                state[name] = sum(s[client] * trained[client][name] for client in clients) / sum(s.values())
            else:
                state[name] = trained[clients[0]][name]
        server = copy.deepcopy(server)
        server.load_state_dict(state)
        downloaded |= dict.fromkeys(clients, (server, r + 1))
    return server.state_dict(), met


def fedbuff() -> FederatedLoop:
    return FederatedLoop(FedBuff(), personalizer=StaleStarts(), sampler=UniformSampler(2), seed=FEDBUFF_SEED)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_fedbuff_is_as_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    net = network(batch_norm)
    expected, met = fedbuff_by_hand(net)
    assert {0, 1, 2} <= met
    module = fit(fedbuff(), tmp_path, Plain(copy.deepcopy(net)), rounds=BUFFERS)
    for name, value in module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_without_old_models_it_says_so(tmp_path: Path) -> None:
    fresh = FederatedLoop(FedBuff(), sampler=UniformSampler(2), seed=FEDBUFF_SEED)
    with pytest.raises(ConfigurationError, match="StaleStarts"):
        fit(fresh, tmp_path, rounds=BUFFERS)
