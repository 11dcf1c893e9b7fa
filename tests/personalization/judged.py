"""Clients that judge models by a function, and PFedSV played with them by hand."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flsv.aggregation import FedAvg
from flsv.core import Channel, Client, ClientUpdate, FederationState, LocalData, Round, opened
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import FederationInfo
from flsv.personalization import PFedSV
from flsv.personalization.base import OWN_MODEL
from flsv.server import ContributionMetrics, RoundServer

nan = float("nan")


class Judged:
    """A client whose accuracy of a model is whatever a function of its vector says.

    ``model`` is what it has trained, where that is not what it uploads.
    """

    def __init__(self, id: int, accuracy: Any, model: Tensor | None = None) -> None:
        self.asked: list[Tensor] = []
        self.id, self.accuracy, self.model = id, accuracy, model
        counts = torch.tensor([1, 1])
        self.data = LocalData(
            f"client {id}", lambda split: [], counts, counts, lambda batches: self
        )

    def __call__(self, vectors: Tensor) -> Any:
        self.asked.append(vectors.clone())
        values = torch.tensor(
            [float(self.accuracy(vector)) for vector in vectors], dtype=torch.float64
        )
        return SimpleNamespace(value=lambda measure: values)


NETWORK = nn.Sequential(
    nn.Linear(2, 1), nn.Linear(1, 2)
)  # 3 + 4 parameters, the last 4 are the head
SPACE = ParameterSpace(NETWORK)


def begun(n: int, method: PFedSV, space: ParameterSpace = SPACE) -> PFedSV:
    some = torch.ones(n, dtype=torch.long)
    sizes = {"train": some, "val": some, "test": some}
    method.begin(FederationInfo(torch.zeros(space.size), space, n, 2, sizes, 0))
    return method


def play(
    method: PFedSV,
    clients: list[Judged],
    vectors: Tensor,
    relevance: Tensor | None = None,
    index: int = 0,
    space: ParameterSpace = SPACE,
) -> tuple[dict[int, Tensor], Round]:
    """A round in which the clients upload these vectors: the models that they go on from, and the round."""
    board, channel = ContributionMetrics({}), Channel()
    board.contributions = {} if relevance is None else {"relevance": relevance}
    strategies = {"aggregator": FedAvg("uniform"), "personalizer": method}
    server = RoundServer(board, strategies, space, channel)
    state = FederationState(
        method._num_clients, round_index=index, global_vector=torch.zeros_like(vectors[0])
    )
    instructions = server.instruct([each.id for each in clients], state)
    server.send(instructions)
    for each, vector in zip(clients, vectors):
        with opened(each.data):
            start = method.receive(each.data, instructions[each.id])
        each.data.set_models(start, vector if each.model is None else each.model)
    updates = [ClientUpdate(each.id, 1, vector) for each, vector in zip(clients, vectors)]
    known: Any = {each.id: Client(each.id, each.data, channel) for each in clients}
    round = server.finish(server.receive(updates, vectors, instructions, state, known), state)
    assert state.starts == {}  # the clients keep their models themselves
    traffic = round.uploaded, round.downloaded
    assert all(
        len(each) == len(clients) for each in traffic
    )  # counted before the clients are asked for their models
    return {each.id: client.ask(own_model) for each, client in zip(clients, known.values())}, round


def own_model(local: LocalData) -> Tensor:
    return local.state[OWN_MODEL].clone()


def exact_values(vectors: np.ndarray, accuracy: Any) -> np.ndarray:
    """Equation 2: the mean over all orders."""
    count = len(vectors)

    def worth(members: tuple[int, ...]) -> float:
        return float(accuracy(vectors[list(members)].mean(0))) if members else 0.0

    values = np.zeros(count)
    orders = list(itertools.permutations(range(count)))
    for order in orders:
        for place, player in enumerate(order):
            values[player] += worth(order[: place + 1]) - worth(order[:place])
    return values / len(orders)


def random_models(count: int, seed: int = 0) -> Tensor:
    return torch.randn(
        count, SPACE.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def closeness(target: Any) -> Any:
    """An accuracy: 1 at ``target``, falling with the distance."""
    return lambda vector: np.exp(-np.linalg.norm(np.asarray(vector) - np.asarray(target)) / 3)
