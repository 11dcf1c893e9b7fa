"""Per-FedAvg against Algorithm 1 in plain PyTorch, with its own batches and, for HF, the true Hessian."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import ROUNDS, SEED, assert_same, batches, buffers_of, cohort, copies, put, unequal_data
from torch import Tensor, nn
from toys import Plain, fit, network

from flsv.aggregation import FedAvg
from flsv.clients.algorithms import PerFedAvg
from flsv.data import FederatedDataModule
from flsv.loop import FederatedLoop
from flsv.sampling import UniformSampler
from flsv.seeding import generator_for

ALPHA, BETA = 0.05, 0.1


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=BETA)


def per_fedavg(hessian: Any = "first_order") -> FederatedLoop:
    return FederatedLoop(
        aggregator=FedAvg("uniform"),
        sampler=UniformSampler(3),
        client_algorithm=PerFedAvg(ALPHA, hessian),
        local_epochs=2,
        seed=SEED,
    )


def others(data: FederatedDataModule, r: int, i: int) -> Iterator[tuple[Tensor, Tensor]]:
    """D' and D'' of all steps."""
    for epoch in range(100):
        yield from data.client_loader(i, "train", generator=generator_for(SEED, "per_fedavg", r, i, epoch))


def loss_at(net: nn.Module, parameters: list[Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    names = [name for name, _ in net.named_parameters()]
    buffers = {name: buffer.clone() for name, buffer in net.named_buffers()}
    logits = torch.func.functional_call(net, {**dict(zip(names, parameters)), **buffers}, batch[0])
    return nn.functional.cross_entropy(logits, batch[1])


def by_hand(net: nn.Module, second_order: bool) -> nn.Module:
    data, server = unequal_data(), copy.deepcopy(net)
    for r in range(ROUNDS):
        models, buffers = [], []
        for i in cohort(r):
            client, more = copy.deepcopy(server).train(), others(data, r, i)
            w = list(client.parameters())
            for batch in batches(data, r, i):
                inner = torch.autograd.grad(nn.functional.cross_entropy(client(batch[0]), batch[1]), w)
                adapted = [p.detach() - ALPHA * g for p, g in zip(w, inner)]
                adapted = [p.requires_grad_() for p in adapted]
                step = list(torch.autograd.grad(loss_at(client, adapted, next(more)), adapted))
                if second_order:
                    slope = torch.autograd.grad(loss_at(client, w, next(more)), w, create_graph=True)
                    products = torch.autograd.grad(slope, w, grad_outputs=step)
                    step = [g - ALPHA * product for g, product in zip(step, products)]
                with torch.no_grad():
                    for p, g in zip(w, step):
                        p -= BETA * g
            models.append(copies(client))
            buffers.append(buffers_of(client))
        put(server, [sum(parts) / len(models) for parts in zip(*models)], buffers, [1.0] * len(models))
    return server


@pytest.mark.parametrize("batch_norm", [False, True])
def test_first_order_as_by_hand(tmp_path: Path, batch_norm: bool) -> None:
    net = network(batch_norm)
    module = Plain(copy.deepcopy(net), sgd)
    fit(per_fedavg(), tmp_path, module, unequal_data(), rounds=ROUNDS)
    assert_same(module.net, by_hand(net, second_order=False))


def test_hessian_free_is_close_to_the_hessian(tmp_path: Path) -> None:
    smooth = [nn.Tanh() if isinstance(layer, nn.ReLU) else layer for layer in network(batch_norm=False)]
    net = nn.Sequential(*smooth)
    module = Plain(copy.deepcopy(net), sgd)
    fit(per_fedavg("free"), tmp_path, module, unequal_data(), rounds=ROUNDS)
    expected, first_order = by_hand(net, second_order=True), by_hand(net, second_order=False)

    def distance(a: nn.Module, b: nn.Module) -> float:
        return max(float((p - q).detach().abs().max()) for p, q in zip(a.parameters(), b.parameters()))

    assert distance(module.net, expected) < 0.02 * distance(first_order, expected)
