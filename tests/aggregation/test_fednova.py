"""FedNova against its update rule in plain PyTorch, without momentum and with."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ROUNDS, SEED, Diverges, assert_same, batches, buffers_of, cohort, copies, put, unequal_data
from torch import nn
from toys import Plain, fit, network, toy_data

from flsv.aggregation import FedAvg, FedNova
from flsv.clients.algorithms import FedProx
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.parameters import ParameterSpace
from flsv.round import Round
from flsv.sampling import UniformSampler

LR = 0.05


def fednova(**kwargs: Any) -> FederatedLoop:
    options: dict[str, Any] = {"sampler": UniformSampler(3), "local_epochs": 2, "seed": SEED, **kwargs}
    return FederatedLoop(FedNova(), **options)


def fednova_by_hand(net: nn.Module, rho: float, failing: set[tuple[int, int]] = frozenset()) -> nn.Module:
    """Equation 4: d_i = G_i a_i / |a_i|, from the gradients that a client has seen."""
    data, server = unequal_data(), copy.deepcopy(net)
    for t in range(ROUNDS):
        x, directions, norms, sizes, buffers = copies(server), [], [], [], []
        for i in [i for i in cohort(t) if (t, i) not in failing]:
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
def test_same_models_as_by_hand(tmp_path: Path, batch_norm: bool, rho: float) -> None:
    net = network(batch_norm)
    expected = fednova_by_hand(net, rho)
    module = Plain(copy.deepcopy(net), partial(sgd, rho=rho))
    loop = fednova()
    fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert loop.weights is not None
    assert loop.weights.nansum() != pytest.approx(1, abs=0.05)  # the steps were unequal


def test_a_client_whose_update_is_not_finite_leaves_no_trace(tmp_path: Path) -> None:
    failing = {(0, 0), (1, 3), (3, 4)}
    assert all(client in cohort(r) for r, client in failing)
    net = network()
    module = Diverges(net, partial(sgd, rho=0.9), failing)
    with pytest.warns(UserWarning, match="client 3 returned a model with NaN or infinite entries in round 1"):
        fit(fednova(), tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, fednova_by_hand(net, 0.9, failing))


def test_equal_numbers_of_steps_are_fedavg(tmp_path: Path) -> None:
    models = [
        fit(FederatedLoop(aggregator, seed=1), tmp_path, Plain(network()), toy_data((1, 1, 1)))
        for aggregator in (FedNova(), FedAvg())
    ]
    assert_same(models[0].net, models[1].net)


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
