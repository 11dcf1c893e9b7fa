"""Clients that score models by a function, and PFedSV computed with them by hand."""

from types import SimpleNamespace

import numpy as np
import torch
from functional.shapley.games import shapley_by_all_orders
from torch import Tensor, nn

from flsv.aggregation import FedAvg
from flsv.core import (
    Channel,
    Client,
    ClientUpdate,
    FederationState,
    LocalData,
    Round,
    Values,
    opened,
)
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import FederationInfo
from flsv.personalization import PFedSV
from flsv.personalization.base import OWN_MODEL
from flsv.server import ContributionMetrics, RoundServer
from helpers import make_generator

nan = float("nan")


class ScoredClient:
    """A client whose accuracy of a model is whatever a function of its vector says.

    ``model`` is what it has trained, where that is not what it uploads.
    """

    def __init__(self, id: int, accuracy, model: Tensor | None = None):
        self.evaluated: list[Tensor] = []
        self.id = id
        self.accuracy = accuracy
        self.model = model
        counts = torch.tensor([1, 1])
        self.data = LocalData(
            f"client {id}",
            lambda split: [],
            counts,
            counts,
            lambda batches: self,
        )

    def __call__(self, vectors: Tensor):
        self.evaluated.append(vectors.clone())
        accuracies = [float(self.accuracy(vector)) for vector in vectors]
        values = torch.tensor(accuracies, dtype=torch.float64)
        return SimpleNamespace(value=lambda measure: values)


# 3 + 4 parameters, the last 4 are the head.
NETWORK = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))
SPACE = ParameterSpace(NETWORK)


def begin_method(num_clients: int, method: PFedSV, space: ParameterSpace = SPACE) -> PFedSV:
    """The method, in a federation of clients with one sample each and a global model of zeros."""
    ones = torch.ones(num_clients, dtype=torch.long)
    sizes = {"train": ones, "val": ones, "test": ones}
    model = torch.zeros(space.size)
    federation = FederationInfo(model, space, num_clients, 2, sizes, 0)
    method.set_up(federation)
    method.begin(federation)
    return method


def play_round(
    method: PFedSV,
    clients: list[ScoredClient],
    vectors: Tensor,
    relevance: Tensor | None = None,
    index: int = 0,
    space: ParameterSpace = SPACE,
) -> tuple[dict[int, Tensor], Round]:
    """A round in which the clients upload these vectors: the models that they go on from, and the round."""
    metrics = ContributionMetrics({})
    channel = Channel()
    if relevance is not None:
        metrics.values = {"relevance": Values(relevance)}

    strategies = {"aggregator": FedAvg("uniform"), "personalizer": method}
    server = RoundServer(metrics, strategies, space, channel)
    state = FederationState(
        method._num_clients,
        round_index=index,
        global_vector=torch.zeros_like(vectors[0]),
    )
    instructions = server.instruct([client.id for client in clients], state)
    server.send(instructions)

    for client, vector in zip(clients, vectors):
        with opened(client.data):
            initial = method.receive(client.data, instructions[client.id])
        client.data.set_models(initial, vector if client.model is None else client.model)

    updates = [
        ClientUpdate(
            client.id,
            1,
            vector,
        )
        for client, vector in zip(clients, vectors)
    ]
    proxies = {
        client.id: Client(
            client.id,
            client.data,
            channel,
        )
        for client in clients
    }
    received = server.receive(updates, vectors, instructions, state, proxies)
    round = server.finish(received, state)

    assert state.starts == {}  # the clients keep their models themselves
    # Traffic is counted before the clients are asked for their models.
    assert len(round.uploaded) == len(round.downloaded) == len(clients)

    models = {client.id: proxies[client.id].request(own_model) for client in clients}
    return models, round


def own_model(local: LocalData) -> Tensor:
    return local.state[OWN_MODEL].clone()


def exact_values(vectors: np.ndarray, accuracy) -> np.ndarray:
    """Equation 2: the mean over all orders, of a game whose empty coalition is worth 0."""
    table = [0.0]
    for number in range(1, 2 ** len(vectors)):
        members = [player for player in range(len(vectors)) if number >> player & 1]
        table.append(float(accuracy(vectors[members].mean(0))))
    return shapley_by_all_orders(torch.tensor(table, dtype=torch.float64))


def random_models(count: int, seed: int = 0, size: int = SPACE.size) -> Tensor:
    generator = make_generator(seed)
    return torch.randn(count, size, generator=generator, dtype=torch.float64)


def closeness(target):
    """An accuracy: 1 at ``target``, falling with the distance."""

    def accuracy(vector) -> float:
        distance = np.linalg.norm(np.asarray(vector) - np.asarray(target))
        return np.exp(-distance / 3)

    return accuracy
