"""One client's training in plain PyTorch, for loops written by hand from the papers."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from toys import sgd

from flsv.data import FederatedDataModule
from flsv.sampling import UniformSampler
from flsv.utilities.seeding import generator_for


class Batches:
    """A list that Lightning does not take for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def cohort(seed: int, round_index: int, num_clients: int = 3, size: int = 2) -> list[int]:
    """Whom ``UniformSampler(size)`` draws in a fit of this seed."""
    return UniformSampler(size).sample(num_clients, {}, generator_for(seed, "cohort", round_index)).tolist()


def train(
    net: nn.Module,
    data: FederatedDataModule,
    client: int,
    seed: int,
    round_index: int,
    make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
) -> nn.Module:
    """A copy of ``net`` after a local epoch on the batches that the client has in a fit of this seed."""
    model = copy.deepcopy(net).train()
    optimizer = make_optimizer(model.parameters())
    dtype = next(model.parameters()).dtype
    for x, y in data.client_loader(client, "train", generator=generator_for(seed, "shuffle", round_index, client, 0)):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
        optimizer.step()
    return model
