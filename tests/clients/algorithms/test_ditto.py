"""Ditto against Algorithm 1 in plain PyTorch, and what a second model of a client's own must not change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import PROPORTIONS, ROUNDS, SEED, assert_same, batches, buffers_of, cohort, copies, put, unequal_data
from torch import Tensor, nn
from toys import Plain, fit, network

from flsv import ClientEvaluation
from flsv.aggregation import FedAvg
from flsv.clients.algorithms import Ditto
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.personalization import FedAMP
from flsv.sampling import UniformSampler

LR, PERSONAL_LR, LAMDA = 0.1, 0.05, 0.3


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def ditto(**kwargs: Any) -> FederatedLoop:
    options = {"aggregator": FedAvg("uniform"), "sampler": UniformSampler(3), "local_epochs": 2, "seed": SEED, **kwargs}
    return FederatedLoop(**{"client_algorithm": Ditto(LAMDA, PERSONAL_LR), **options})


def ditto_by_hand(net: nn.Module) -> tuple[nn.Module, dict[int, nn.Module]]:
    """Algorithm 1: the global model w, and the personal models v_k of those who were drawn."""
    data, server = unequal_data(), copy.deepcopy(net)
    personal: dict[int, nn.Module] = {}
    for r in range(ROUNDS):
        models, buffers = [], []
        w = copies(server)
        for k in cohort(r):
            client = copy.deepcopy(server).train()
            v_k = personal.setdefault(k, copy.deepcopy(server)).train()
            for x, y in batches(data, r, k):
                gradients = torch.autograd.grad(nn.functional.cross_entropy(v_k(x), y), list(v_k.parameters()))
                with torch.no_grad():
                    for v, g, anchor in zip(v_k.parameters(), gradients, w):
                        v -= PERSONAL_LR * (g + LAMDA * (v - anchor))
                gradients = torch.autograd.grad(nn.functional.cross_entropy(client(x), y), list(client.parameters()))
                with torch.no_grad():
                    for p, g in zip(client.parameters(), gradients):
                        p -= LR * g
            models.append(copies(client))
            buffers.append(buffers_of(client))
        put(server, [sum(parts) / len(models) for parts in zip(*models)], buffers, [1.0] * len(models))
    return server, personal


def kept(loop: FederatedLoop) -> dict[int, Tensor]:
    return {client: state["ditto_model"] for client, state in loop.state_dict()["clients"].items()}


@pytest.mark.parametrize("batch_norm", [False, True])
def test_same_models_as_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    net = network(batch_norm)
    expected, personal = ditto_by_hand(net)
    loop, module = ditto(evaluation=ClientEvaluation(every=ROUNDS)), Plain(copy.deepcopy(net), sgd)
    fit(loop, tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, expected)
    assert kept(loop).keys() == personal.keys()
    for client, v_k in personal.items():
        floats = [buffer.flatten() for buffer in v_k.buffers() if buffer.is_floating_point()]
        whole = torch.cat([*[p.detach().flatten() for p in v_k.parameters()], *floats])
        torch.testing.assert_close(kept(loop)[client], whole, rtol=1e-5, atol=1e-5)
    # A client is tested with its own model; who was never drawn has the global one.
    data = unequal_data()
    for client in range(len(PROPORTIONS)):
        model = personal.get(client, expected).eval()
        hits = torch.cat([(model(x).argmax(1) == y).double() for x, y in data.client_loader(client, "test")])
        assert loop.client_accuracy[client].item() == pytest.approx(hits.mean().item(), abs=1e-6)


def test_the_federations_model_is_trained_as_without(tmp_path: Path) -> None:
    """To the bit, with dropout and BatchNorm."""
    models = []
    for name, algorithm in (("with", Ditto()), ("without", None)):
        module = Plain(network(dropout=0.5))
        fit(ditto(client_algorithm=algorithm), tmp_path / name, module, unequal_data(), rounds=2)
        models.append(module.state_dict())
    assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="Leave the personalizer out"):
        fit(ditto(personalizer=FedAMP()), tmp_path, data=unequal_data())
    with pytest.raises(ConfigurationError, match="lamda=-1"):
        Ditto(lamda=-1)
    with pytest.raises(ConfigurationError, match='Leave it out, or engine="sequential"'):
        fit(ditto(engine="vmap"), tmp_path, data=unequal_data())
