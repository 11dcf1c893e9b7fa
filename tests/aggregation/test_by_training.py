"""FedBuff against its update rule in plain PyTorch; what FedNova, which tests/replay replays, cannot do."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import assert_same
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

BUFFERS, FEDBUFF_SEED = 6, 4


def sgd(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


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


@pytest.mark.parametrize("optimizer", [partial(sgd, nesterov=True), partial(sgd, dampening=0.5), torch.optim.Adam])
def test_other_steps_are_refused_before_training(tmp_path: Path, optimizer: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"FedNova\(\) must know what a local step adds to an update"):
        fit(FederatedLoop(FedNova()), tmp_path, Plain(optimizer=optimizer))
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


def test_fedbuff_is_as_by_hand(tmp_path: Path) -> None:
    net = network()
    expected, met = fedbuff_by_hand(net)
    assert {0, 1, 2} <= met
    options: dict[str, Any] = {"sampler": UniformSampler(2), "seed": FEDBUFF_SEED}
    loop = FederatedLoop(FedBuff(), personalizer=StaleStarts(), **options)
    module = fit(loop, tmp_path, Plain(copy.deepcopy(net)), rounds=BUFFERS)
    for name, value in module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    with pytest.raises(ConfigurationError, match="StaleStarts"):
        fit(FederatedLoop(FedBuff(), **options), tmp_path)
