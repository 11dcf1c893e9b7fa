"""Parts with one fault each: see ``test_checks_fail.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from faulty_metrics import NAN
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flsv.aggregation import Aggregator, FedAvg
from flsv.clients.algorithms import ClientAlgorithm
from flsv.personalization import Personalizer


class Nameless(Aggregator):
    """Keeps a function, of which nobody can say what it is."""

    def __init__(self, *, server_lr: float = 1.0) -> None:
        super().__init__(server_lr=server_lr)
        self.function = lambda x: x

    def weights(self, round: Any, contributions: Any) -> Tensor:
        return torch.full((len(round),), 1 / len(round))


class GivesNan(FedAvg):
    def weights(self, round: Any, contributions: Any) -> Tensor:
        return super().weights(round, contributions) * (NAN if round.round_index == 2 else 1)


class FirstOnly(FedAvg):
    def weights(self, round: Any, contributions: Any) -> Tensor:
        return (torch.arange(len(round)) == 0).float()


class KeepsItself(FedAvg):
    """Its state is an object."""

    def state_dict(self) -> dict[str, Any]:
        return {"self": self}


class CountsRounds(FedAvg):
    """The number of rounds is not in its state."""

    rounds = 0

    def weights(self, round: Any, contributions: Any) -> Tensor:
        self.rounds += 1
        return super().weights(round, contributions) / self.rounds


class Twice(ClientAlgorithm):
    sends = ("one", "one")


class Tires(ClientAlgorithm):
    """Whoever trains later in a round has smaller gradients."""

    seen = 0

    def begin_client(self, context: Any) -> None:
        self.seen += 1

    def gradients(self, context: Any, parameters: Any, gradients: Any) -> None:
        for gradient in gradients:
            gradient.div_(self.seen)


class Knows(ClientAlgorithm):
    """Uses at the clients what the server has counted."""

    rounds = 0

    def gradients(self, context: Any, parameters: Any, gradients: Any) -> None:
        for gradient in gradients:
            gradient.div_(1 + self.rounds)

    def end_round(self, round: Any) -> None:
        self.rounds += 1

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self.rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rounds = state["rounds"]


class StartsFromTheLast(Personalizer):
    """Keeps at a client what the client before it may have been sent: wrong where all begin before any ends."""

    def receive(self, local: Any, instruction: Any) -> Tensor:
        self.last = super().receive(local, instruction) * (1 + instruction.client_id)
        return self.last

    def keep(self, local: Any) -> None:
        local.state["own_model"] = self.last

    def start(self, client: int, state: Any) -> Tensor | None:
        return state.model() if state.round_index == 0 else None

    def personalize(self, round: Any, contributions: Any, models: Any) -> dict[int, Tensor]:
        return {}


class TooSoon(ClientAlgorithm):
    """Uses at the clients what the server was told before the first round."""

    def begin(self, federation: Any) -> None:
        self.clients = federation.num_clients

    def gradients(self, context: Any, parameters: Any, gradients: Any) -> None:
        for gradient in gradients:
            gradient.div_(self.clients)


class Numbers:
    """A source of ranges, without fault."""

    def match(self, given: Any) -> bool:
        return isinstance(given, range)

    def open(self, given: range, reading: Any) -> Dataset:
        x = torch.tensor(given).float()
        return TensorDataset(x[:, None], torch.arange(len(x)) % 2)


class Greedy(Numbers):
    def match(self, given: Any) -> bool:
        return isinstance(given, range | Path)


class Noisy(Numbers):
    """Another sample whenever it is read."""

    def open(self, given: range, reading: Any) -> Dataset:
        class Set(Dataset):
            def __len__(self) -> int:
                return len(given)

            def __getitem__(self, index: int) -> Any:
                return torch.rand(2), index % 2

        return Set()


class Shuffles(Numbers):
    times = 0

    def open(self, given: range, reading: Any) -> Dataset:
        self.times += 1
        return super().open(range(given.start + self.times, given.stop + self.times), reading)


class Ragged(Numbers):
    """Samples of several shapes, which no batch can hold."""

    def open(self, given: range, reading: Any) -> Dataset:
        class Set(Dataset):
            def __len__(self) -> int:
                return len(given)

            def __getitem__(self, index: int) -> Any:
                return torch.zeros(2 if index in (0, len(given) - 1) else 3 + index), index % 2

        return Set()
