"""FedDyn against Algorithm 1 in plain PyTorch, with clients that are rarely there."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import (
    PROPORTIONS,
    ROUNDS,
    SEED,
    Diverges,
    assert_same,
    batches,
    buffers_of,
    cohort,
    copies,
    put,
    unequal_data,
)
from torch import Tensor, nn
from toys import Plain, fit, network

from flsv.aggregation import FedAvg
from flsv.clients.algorithms import FedDyn, FedDynServer, FedProx
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.sampling import UniformSampler

ALPHA = 0.1


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def feddyn(**kwargs: Any) -> FederatedLoop:
    options: dict[str, Any] = {"sampler": UniformSampler(3), "local_epochs": 2, "seed": SEED, **kwargs}
    return FederatedLoop(FedDynServer(), client_algorithm=FedDyn(ALPHA), **options)


def feddyn_by_hand(
    net: nn.Module, failing: set[tuple[int, int]] = frozenset()
) -> tuple[nn.Module, list[Tensor], dict[int, list[Tensor]]]:
    """Algorithm 1, with the local problem left to autograd. The next theta, h and the clients' gradients."""
    data, server = unequal_data(), copy.deepcopy(net)
    m = len(PROPORTIONS)
    zeros = [torch.zeros_like(p) for p in server.parameters()]
    h, gradients = list(zeros), {k: list(zeros) for k in range(m)}
    for t in range(ROUNDS):
        start, models, buffers = copies(server), [], []
        for k in [k for k in cohort(t) if (t, k) not in failing]:
            client = copy.deepcopy(server).train()
            optimizer = sgd(client.parameters())
            for features, labels in batches(data, t, k):
                optimizer.zero_grad()
                risk = nn.functional.cross_entropy(client(features), labels)
                for theta, linear, center in zip(client.parameters(), gradients[k], start):
                    risk = risk - (linear * theta).sum() + ALPHA / 2 * ((theta - center) ** 2).sum()
                risk.backward()
                optimizer.step()
            models.append(copies(client))
            buffers.append(buffers_of(client))
            gradients[k] = [g - ALPHA * (a - b) for g, a, b in zip(gradients[k], models[-1], start)]
        h = [old - ALPHA / m * sum(theta - center for theta in parts) for old, center, *parts in zip(h, start, *models)]
        mean = [sum(parts) / len(parts) for parts in zip(*models)]
        put(server, [a - b / ALPHA for a, b in zip(mean, h)], buffers, [1.0] * len(models))
    return server, h, gradients


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def assert_states(loop: FederatedLoop, h: list[Tensor], gradients: dict[int, list[Tensor]]) -> None:
    state = loop.state_dict()
    shift = state["strategies"]["aggregator"]["shift"]
    torch.testing.assert_close(ALPHA * shift, flat(h), rtol=1e-6, atol=1e-6)
    for client, expected in gradients.items():
        kept = state["clients"].get(client, {}).get("feddyn_gradient", torch.zeros_like(shift))
        torch.testing.assert_close(kept, flat(expected), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_same_models_and_gradients_as_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    net = network(batch_norm)
    expected, h, gradients = feddyn_by_hand(net)
    loop, module = feddyn(), Plain(copy.deepcopy(net), sgd)
    fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert_states(loop, h, gradients)  # of parameters: a BatchNorm's statistics would make them longer
    torch.testing.assert_close(flat(h), sum(flat(g) for g in gradients.values()) / len(PROPORTIONS))
    assert flat(h).abs().max() > 1e-3


def test_a_client_whose_update_is_not_finite_leaves_no_trace(tmp_path: Path) -> None:
    failing = {(0, 0), (1, 3), (3, 4)}
    assert all(client in cohort(r) for r, client in failing)
    net = network()
    expected, h, gradients = feddyn_by_hand(net, failing)
    loop, module = feddyn(), Diverges(net, sgd, failing)
    with pytest.warns(UserWarning, match="client 3 returned a model with NaN or infinite entries in round 1"):
        fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert_states(loop, h, gradients)


def test_nothing_crosses_but_the_model(tmp_path: Path) -> None:
    loop = feddyn()
    fit(loop, tmp_path, data=unequal_data(), rounds=1)
    assert loop.channel.names() == {("down", "start"), ("up", "update")}


@pytest.mark.parametrize(
    "roles",
    [
        {"client_algorithm": FedDyn()},
        {"aggregator": FedAvg(), "client_algorithm": FedDyn()},
        {"aggregator": FedDynServer()},
        {"aggregator": FedDynServer(), "client_algorithm": FedProx()},
    ],
)
def test_one_side_alone_is_refused_before_training(tmp_path: Path, roles: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=r"FedDyn has two sides, and found client_algorithm="):
        fit(FederatedLoop(**roles), tmp_path)


def test_alpha() -> None:
    for alpha in (0, float("nan")):
        with pytest.raises(ConfigurationError, match=r"FedDyn\(alpha=(0|nan)\): expected a finite number above 0"):
            FedDyn(alpha=alpha)
