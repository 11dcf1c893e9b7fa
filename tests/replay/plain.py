"""Federated rounds as one would write them from the papers: batches in, vectors of parameters out.

Of flsv it takes the clients' batches and cohorts, and nothing else. Three of five clients take part in a round; they
take 10, 4, 8, 4 and 2 steps.
"""

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from helpers.loops_by_hand import (
    PROPORTIONS,
    cross_entropy_of,
    fedavg_by_hand,
    make_unequal_data,
    take_steps,
)

LR, MOMENTUM = 0.1, 0.9
Batches = list[tuple[Tensor, Tensor]]


@dataclass
class PlainRound:
    """A round after its clients have sent: the model ``x [P]``, by client x and its update ``[P]``, samples, steps."""

    number: int
    x: Tensor
    rows: dict[int, Tensor]
    samples: dict[int, int]
    steps: dict[int, int]
    class_counts: Tensor
    #: What a rule keeps from round to round.
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def clients(self):
        return list(self.rows)

    @property
    def updates(self):
        return torch.stack([row - self.x for row in self.rows.values()])

    def moved(self, weights):
        """x + sum_i w_i d_i."""
        return self.x + torch.as_tensor(weights, dtype=self.x.dtype) @ self.updates


Train = Callable[[nn.Module, Batches], None]
Send = Callable[[PlainRound], None]
Rule = Callable[[PlainRound], Tensor]


def sgd(net, batches):
    """Local training: SGD with momentum, which begins anew at every visit."""
    optimizer = torch.optim.SGD(net.parameters(), LR, MOMENTUM)
    take_steps(optimizer, cross_entropy_of(net), batches)


def replay(net, rule, train=sgd, send=None):
    """The global model's parameters after all rounds. ``send`` changes the rows of a round on their way."""
    data = make_unequal_data()
    memory = {}
    steps = {}
    numbers = itertools.count()

    def train_client(model, visit):
        train(model, visit.batches)
        steps[visit.client] = len(visit.batches)

    def merge(server, models, mean):
        plain_round = PlainRound(
            number=next(numbers),
            x=read_parameters(server),
            rows={client: read_parameters(model) for client, model in models.items()},
            samples={client: int(data.num_samples[client]) for client in models},
            steps={client: steps[client] for client in models},
            class_counts=data.class_counts,
            memory=memory,
        )
        if send is not None:
            send(plain_round)
        next_server = copy.deepcopy(server)
        vector_to_parameters(rule(plain_round), next_server.parameters())
        return next_server

    server, _ = fedavg_by_hand(net, train_client, data=data, merge=merge)
    return read_parameters(server)


def read_parameters(model):
    return parameters_to_vector(model.parameters()).detach()


CLIENTS = len(PROPORTIONS)
