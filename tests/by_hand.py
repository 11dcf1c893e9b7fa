"""What plain PyTorch loops written from papers need of a run: whose turn it is, and its batches in their order."""

import copy
from collections.abc import Callable, Collection, Iterator
from typing import Any

import lightning as L
import torch
from small_loops import client_tensors
from torch import Tensor, nn
from toys import Plain, toy_data

from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop
from flsv.sampling import UniformSampler
from flsv.utilities.seeding import generator_for

SEED, COHORT, LOCAL_EPOCHS, ROUNDS = 5, 3, 2, 4

#: 10, 4, 8, 4 and 2 local steps a round.
PROPORTIONS = (7, 2, 5, 2, 1)


def unequal_data() -> FederatedDataModule:
    data = toy_data(PROPORTIONS)
    data.setup("fit")
    return data


def cohort(round_index: int) -> list[int]:
    """Three of five clients."""
    draw = generator_for(SEED, "cohort", round_index)
    return UniformSampler(COHORT).sample(len(PROPORTIONS), {}, draw).tolist()


def batches(data: FederatedDataModule, round_index: int, client: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Of all local epochs."""
    for epoch in range(LOCAL_EPOCHS):
        stream = generator_for(SEED, "shuffle", round_index, client, epoch)
        yield from data.client_loader(client, "train", generator=stream)


def copies(net: nn.Module) -> list[Tensor]:
    """The parameters' values."""
    return [p.detach().clone() for p in net.parameters()]


@torch.no_grad()
def put(net: nn.Module, parameters: list[Tensor], buffers: list[dict[str, Tensor]], weights: list[float]) -> None:
    """New parameters, and the clients' buffers averaged; of integer ones the first."""
    for p, value in zip(net.parameters(), parameters):
        p.copy_(value)
    for name, buffer in net.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(sum(w * b[name] for w, b in zip(weights, buffers)) / sum(weights))
        else:
            buffer.copy_(buffers[0][name])


def buffers_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


#: float32's rounding over some rounds, which differs between versions of torch.
ROUNDING = 5e-6


def assert_same(net: nn.Module, expected: nn.Module, tolerance: float = ROUNDING) -> None:
    for name, value in net.state_dict().items():
        torch.testing.assert_close(
            value, expected.state_dict()[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


class Diverges(Plain):
    """Some clients' gradients are NaN in some rounds: pairs (round, client)."""

    def __init__(self, net: nn.Module, optimizer: Any, failing: set[tuple[int, int]]) -> None:
        super().__init__(copy.deepcopy(net), optimizer)
        self.failing = failing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loop = loop_of(self)
        broken = (loop.round_index, loop.current_client) in self.failing
        return super().training_step(batch, batch_idx) * (float("nan") if broken else 1.0)


def loop_of(module: L.LightningModule) -> FederatedLoop:
    return next(each for each in module.trainer.callbacks if isinstance(each, FederatedLoop))


Train = Callable[[nn.Module, list[list[Any]]], None]


def sharing_by_hand(
    net: nn.Module,
    kept: Collection[str],
    train: Train,
    data: FederatedDataModule | None = None,
    uniform: bool = False,
    rounds: int = ROUNDS,
) -> tuple[nn.Module, dict[int, dict[str, Tensor]]]:
    """FedAvg by ``state_dict``s in which the names ``kept`` stay at their client: the global model, and what every
    client keeps. ``train`` is given a client's batches, a list for every local epoch."""
    data, server = unequal_data() if data is None else data, copy.deepcopy(net)
    own: dict[int, dict[str, Tensor]] = {}
    for r in range(rounds):
        states, sizes = [], []
        for i in cohort(r):
            client = copy.deepcopy(server).train()
            client.load_state_dict({**client.state_dict(), **own.get(i, {})})
            given = list(batches(data, r, i))
            length = len(given) // LOCAL_EPOCHS
            train(client, [given[e * length : (e + 1) * length] for e in range(LOCAL_EPOCHS)])
            state = {name: value.clone() for name, value in client.state_dict().items()}
            own[i] = {name: state[name] for name in kept}
            states.append(state)
            sizes.append(1.0 if uniform else float(data.num_samples[i]))
        total = sum(sizes)
        for name, value in server.state_dict().items():
            if name not in kept and value.is_floating_point():
                value.copy_(sum(size / total * state[name] for size, state in zip(sizes, states)))
            elif name not in kept:
                value.copy_(states[0][name])
    return server, own


def plain_sgd(lr: float = 0.1, momentum: float = 0.9) -> Train:
    """A new optimizer, and all epochs with it."""

    def train(client: nn.Module, epochs: list[list[Any]]) -> None:
        optimizer = torch.optim.SGD(client.parameters(), lr=lr, momentum=momentum)
        for features, labels in (batch for epoch in epochs for batch in epoch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(client(features), labels).backward()
            optimizer.step()

    return train


def assert_kept(loop: FederatedLoop, own: dict[int, dict[str, Tensor]], prefix: str = "net.") -> None:
    """The clients' states hold this and nothing else, to rounding."""
    states = client_tensors(loop)
    assert {client for client, kept in own.items() if kept} == states.keys()
    for client, kept in own.items():
        if kept:
            assert {f"module.{prefix}{name}" for name in kept} == states[client].keys()
        for name, value in kept.items():
            found = states[client][f"module.{prefix}{name}"]
            torch.testing.assert_close(found, value, rtol=ROUNDING, atol=ROUNDING, msg=lambda m, n=name: f"{n}: {m}")
