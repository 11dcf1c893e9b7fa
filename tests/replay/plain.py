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
    cohorts_by_hand,
    federate,
    load_batches,
    make_unequal_data,
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


def sgd(net, epochs):
    """Local training: SGD with momentum, which begins anew at every visit."""
    optimizer = torch.optim.SGD(net.parameters(), LR, MOMENTUM)
    for x, y in epochs:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()


def replay(net, rule, train=sgd, send=None):
    """The global model's parameters after all rounds. ``send`` changes the rows of a round on their way."""
    data = make_unequal_data()
    memory = {}
    steps = {}
    numbers = itertools.count()

    def visit(model, round_index, client):
        batches = list(load_batches(data, round_index, client))
        train(model, batches)
        steps[client] = len(batches)

    def combine(server, models):
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

    return read_parameters(federate(net, cohorts_by_hand(), visit, combine))


def read_parameters(model):
    return parameters_to_vector(model.parameters()).detach()


CLIENTS = len(PROPORTIONS)
