"""State in a module's attributes: each client starts with the round's.

The next round starts with the means of floating-point numbers, with lists of what all clients have added, and otherwise
with the first client's state.
"""

import copy
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flsv.federation import FederatedLoop
from flsv.utilities.seeding import generator_for
from helpers.data import toy_data
from helpers.fits import assert_resumes, fit, state_vector
from helpers.loops_by_hand import average_models
from helpers.models import Plain, network, sgd

SEED, ROUNDS = 3, 3


@dataclass
class Bank:
    batches: deque[Tensor] = field(default_factory=deque)
    mean: float = 0.0


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


def factor_of_samples(samples: Tensor) -> float:
    mean = samples.mean()
    return 1 + float(mean.abs())


class Remembers(Plain):
    """Its loss depends on what it remembers of the batches before."""

    def __init__(self) -> None:
        super().__init__(network(batch_norm=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.remember(batch) * super().training_step(batch, batch_idx)

    def remember(self, batch: Any) -> float:
        raise NotImplementedError

    def float_values(self) -> list[tuple[Any, str]]:
        """Return the owners and names of the values that are averaged."""
        return []

    def lists(self) -> list[list[Any]]:
        """Return the lists that only grow."""
        return []


class Flag(Remembers):
    """Sets its first layer by the first batch, as ActNorm does."""

    ready = False

    def remember(self, batch: Any) -> float:
        if not self.ready:
            bias = self.net[0].bias.data
            bias.copy_(batch[0].mean())
        self.ready = True
        return 1.0


class Counter(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.num_batches = 0

    def remember(self, batch: Any) -> float:
        self.num_batches += 1
        return 1 / self.num_batches


class Array(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.mean = np.zeros(6, dtype=np.float32)

    def remember(self, batch: Any) -> float:
        self.mean *= 0.9
        self.mean += batch[0].mean(0).numpy()
        size = float(abs(self.mean).sum())
        return 1 + min(size, 1.0)

    def float_values(self) -> list[tuple[Any, str]]:
        return [(vars(self), "mean")]


class Object(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.bank = Bank()

    def remember(self, batch: Any) -> float:
        self.bank.batches.append(batch[0].mean())
        self.bank.mean = float(sum(self.bank.batches))
        return 1 + min(abs(self.bank.mean), 1.0)

    def float_values(self) -> list[tuple[Any, str]]:
        return [(vars(self.bank), "mean")]


class LateObject(Object):
    """Has no object before its first batch."""

    def __init__(self) -> None:
        super().__init__()
        del self.bank

    def remember(self, batch: Any) -> float:
        if not hasattr(self, "bank"):
            self.bank = Bank()
        return super().remember(batch)

    def float_values(self) -> list[tuple[Any, str]]:
        if not hasattr(self, "bank"):
            return []
        return super().float_values()


class InSlots(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots()

    def remember(self, batch: Any) -> float:
        self.slots.scale *= 0.9
        return self.slots.scale

    def float_values(self) -> list[tuple[Any, str]]:
        return [(self.slots, "scale")]


class Dictionary(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.scales = {"loss": 1.0}

    def remember(self, batch: Any) -> float:
        self.scales["loss"] *= 0.9
        return self.scales["loss"]

    def float_values(self) -> list[tuple[Any, str]]:
        return [(self.scales, "loss")]


class Memory(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.holder = nn.Module()
        self.holder.samples = []

    def remember(self, batch: Any) -> float:
        self.holder.samples.append(batch[0])
        return factor_of_samples(torch.cat(self.holder.samples))

    def lists(self) -> list[list[Any]]:
        return [self.holder.samples]


class NestedMemory(Remembers):
    def __init__(self) -> None:
        super().__init__()
        self.memory: Any = {"a": {"b": []}}

    def remember(self, batch: Any) -> float:
        self.memory["a"]["b"].append(batch[0])
        return factor_of_samples(torch.cat(self.memory["a"]["b"]))

    def lists(self) -> list[list[Any]]:
        return [self.memory["a"]["b"]]


class RingBuffer(Remembers):
    """A memory as a tensor, its position as a number, and whether it is full."""

    CAPACITY = 5  # samples

    def __init__(self) -> None:
        super().__init__()
        self.samples = torch.zeros(self.CAPACITY, 6)
        self.position = 0
        self.is_full = False

    def remember(self, batch: Any) -> float:
        first_samples = batch[0][:3]
        for sample in first_samples:
            self.samples[self.position] = sample
            self.position = (self.position + 1) % self.CAPACITY
            self.is_full = self.is_full or self.position == 0

        length = self.CAPACITY if self.is_full else self.position
        return factor_of_samples(self.samples[:length])

    def float_values(self) -> list[tuple[Any, str]]:
        return [(vars(self), "samples")]


KINDS = (
    *(Flag, Counter, Array, Object, LateObject),
    *(InSlots, Dictionary, Memory, NestedMemory, RingBuffer),
)


def train_by_hand(make: Callable[[], Remembers]) -> Remembers:
    """The global model, with means of floating-point state, all that is added to lists, and the first client's rest."""
    data = toy_data()
    data.setup("fit")
    server = make()

    for round_index in range(ROUNDS):
        clients = []
        for client in range(data.num_clients):
            model = copy.deepcopy(server)
            optimizer = sgd(model.parameters())
            stream = generator_for(SEED, "shuffle", round_index, client, 0)
            for batch in data.client_loader(client, "train", generator=stream):
                optimizer.zero_grad()
                model.training_step(batch, 0).backward()
                optimizer.step()
            clients.append(model)
        lengths = [len(entries) for entries in server.lists()]
        server = average_models(clients, data.num_samples.tolist())
        average_float_values(server, clients, data.num_samples)
        for client in clients[1:]:
            for entries, length, added in zip(server.lists(), lengths, client.lists()):
                entries += added[length:]

    return server


def average_float_values(
    server: Any,
    clients: list[Any],
    num_samples: Tensor,
) -> None:
    shares = (num_samples / num_samples.sum()).tolist()
    values_of_clients = [client.float_values() for client in clients]
    for index, (owner, name) in enumerate(server.float_values()):
        mean = 0.0
        for share, values in zip(shares, values_of_clients):
            owner_at_client, _ = values[index]
            value = value_of(owner_at_client, name)
            mean = mean + share * value
        if isinstance(mean, np.ndarray):
            mean = mean.astype(np.float32)
        if isinstance(owner, dict):
            owner[name] = mean
        else:
            setattr(owner, name, mean)


def value_of(owner: Any, name: str) -> Any:
    if isinstance(owner, dict):
        return owner[name]
    return getattr(owner, name)


@pytest.mark.parametrize("make", KINDS)
def test_clients_do_not_see_each_others_state(
    tmp_path,
    make,
):
    module = fit(FederatedLoop(seed=SEED), tmp_path, make())
    model = state_vector(train_by_hand(make))
    difference = state_vector(module) - model
    assert difference.abs().max() < 1e-6


@pytest.mark.parametrize("make", [RingBuffer, Array, NestedMemory])
def test_state_of_a_module_resumes_bitwise(
    tmp_path,
    make,
):
    assert_resumes(partial(FederatedLoop, seed=SEED), tmp_path, make)


class Records(Plain):
    """Collects an epoch's outputs, as Lightning's pages say, and all losses."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        self.losses: list[float] = []
        self.num_outputs: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        self.losses.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.num_outputs.append(len(self.outputs))
        self.outputs.clear()


def test_lists_show_what_all_clients_have_added(tmp_path):
    module: Any = Records()
    data = toy_data()
    fit(FederatedLoop(seed=SEED), tmp_path, module, data)
    num_batches = 0
    for client in range(data.num_clients):
        num_batches += len(data.client_loader(client, "train"))

    assert module.num_outputs == [num_batches] * ROUNDS
    assert len(module.losses) == num_batches * ROUNDS


class Shares(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.shared = SimpleNamespace(num_batches=0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.shared.num_batches += 1
        return super().training_step(batch, batch_idx)


def test_namespace_is_shared_on_purpose(tmp_path):
    module: Any = Shares()
    fit(FederatedLoop(seed=SEED), tmp_path, module, rounds=1)
    assert module.shared.num_batches == module.trainer.global_step
