"""FedBuff against a plain loop with a model kept for every client."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from one_client import cohort, train
from torch import Tensor, nn
from toys import Plain, fit, network, toy_data

from flsv.aggregation import FedBuff, StaleStarts
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.sampling import UniformSampler

SEED, ROUNDS = 4, 6


def by_hand(net: nn.Module) -> tuple[dict[str, Tensor], set[int]]:
    """The server's model after ROUNDS buffers of two updates, and the staleness met."""
    data = toy_data()
    data.setup("fit")
    server, downloaded, met = copy.deepcopy(net), {}, set()
    for r in range(ROUNDS):
        clients = cohort(SEED, r)
        starts = {client: downloaded.get(client, (server, r)) for client in clients}
        trained = {client: train(starts[client][0], data, client, SEED, r).state_dict() for client in clients}
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


def loop() -> FederatedLoop:
    return FederatedLoop(FedBuff(), personalizer=StaleStarts(), sampler=UniformSampler(2), seed=SEED)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_same_global_model_as_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    net = network(batch_norm)
    expected, met = by_hand(net)
    assert {0, 1, 2} <= met
    module = fit(loop(), tmp_path, Plain(copy.deepcopy(net)), rounds=ROUNDS)
    for name, value in module.net.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_without_old_models_it_says_so(tmp_path: Path) -> None:
    fresh = FederatedLoop(FedBuff(), sampler=UniformSampler(2), seed=SEED)
    with pytest.raises(ConfigurationError, match="StaleStarts"):
        fit(fresh, tmp_path, rounds=ROUNDS)
