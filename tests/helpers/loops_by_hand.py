"""Federated averaging written by hand in plain PyTorch, with which federations of flsv are compared.

Of flsv it knows how clients' batches and cohorts are drawn, and nothing else. A test gives it what it changes: how a
client trains, who takes part, what stays at the clients, and what the server makes of their models.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from flsv.utilities.seeding import generator_for
from helpers.data import toy_data
from helpers.models import network

SEED, COHORT, LOCAL_EPOCHS, ROUNDS = 5, 3, 2, 4
#: 10, 4, 8, 4 and 2 local steps a round.
PROPORTIONS = (7, 2, 5, 2, 1)
#: float32's rounding over some rounds, which differs between versions of torch.
ROUNDING = 5e-6


def make_unequal_data():
    data = toy_data(PROPORTIONS)
    data.setup("fit")
    return data


def make_network_without_norm():
    return network(batch_norm=False)


# ---- who trains in a round, and on what


def cohort_of_round(round_index):
    """Three of five clients."""
    generator = generator_for(SEED, "cohort", round_index)
    permutation = torch.randperm(len(PROPORTIONS), generator=generator)
    return permutation[:COHORT].sort().values.tolist()


def cohorts_by_hand(rounds=ROUNDS, failing=frozenset()):
    """Return each round's clients but those that fail, pairs of a round and a client."""
    cohorts = []
    for round_index in range(rounds):
        cohort = cohort_of_round(round_index)
        cohorts.append([client for client in cohort if (round_index, client) not in failing])
    return cohorts


@dataclass(frozen=True)
class Visit:
    """A client's part in a round: its batches, a list for each local epoch."""

    round_index: int
    client: int
    epochs: list[list[Any]]

    @property
    def batches(self):
        return [batch for epoch in self.epochs for batch in epoch]


def load_epochs(data, round_index, client):
    """Return a client's batches, a list for each local epoch."""
    epochs = []
    for epoch in range(LOCAL_EPOCHS):
        stream = generator_for(SEED, "shuffle", round_index, client, epoch)
        epochs.append(list(data.client_loader(client, "train", generator=stream)))
    return epochs


# ---- models


def copy_parameters(net):
    return [parameter.detach().clone() for parameter in net.parameters()]


@torch.no_grad()
def set_parameters(net, values):
    for parameter, value in zip(net.parameters(), values):
        parameter.copy_(value)


@torch.no_grad()
def average_models(models, sizes):
    """Weighted means of parameters and persistent floating-point buffers; everything else is the first model's."""
    mean = copy.deepcopy(models[0])
    states = [model.state_dict() for model in models]
    for name, value in mean.state_dict().items():
        if not value.is_floating_point():
            continue
        weighted_sum = 0
        for size, state in zip(sizes, states):
            weighted_sum = weighted_sum + size * state[name].double()
        value.copy_(weighted_sum / sum(sizes))

    return mean


def assert_same_state(net, expected, tolerance=ROUNDING):
    expected_state = expected.state_dict()
    for name, value in net.state_dict().items():
        # A failure names the key of a dictionary.
        torch.testing.assert_close(
            {name: value}, {name: expected_state[name]}, rtol=tolerance, atol=tolerance
        )


# ---- the loop


def federate(net, cohorts, visit, combine):
    """Return the server's model after a round of each cohort.

    Args:
        net: the initial model, which stays as it is.
        cohorts: each round's clients.
        visit: trains in place a client's copy of the server's model, given the round's index and the client.
        combine: returns the server's next model, of its present one and the clients' models.
    """
    server = net
    for round_index, cohort in enumerate(cohorts):
        models = {}
        for client in cohort:
            model = copy.deepcopy(server)
            visit(model, round_index, client)
            models[client] = model
        server = combine(server, models)
    return server


Train = Callable[[nn.Module, Visit], None]
Merge = Callable[[nn.Module, dict[int, nn.Module], nn.Module], nn.Module]


def fedavg_by_hand(
    net,
    train: Train,
    *,
    data=None,
    cohorts=None,
    uniform=False,
    private=(),
    merge: Merge | None = None,
):
    """Return the global model after the last round, and the part of the state that each client keeps.

    Args:
        net: the initial model.
        train: trains a client's model in place.
        data: of the clients; five of unequal size by default.
        cohorts: each round's clients; by default three of them in four rounds.
        uniform: whether all models count the same, and not by their samples.
        private: names of the state that stays at the clients.
        merge: returns the next global model, of the present one, the clients' models and their mean, the default.
    """
    client_data = data or make_unequal_data()
    sizes = torch.ones_like(client_data.num_samples) if uniform else client_data.num_samples
    private_parts = {}

    def visit(model, round_index, client):
        load_part(model, private_parts.get(client, {}))
        epochs = load_epochs(client_data, round_index, client)
        train(model, Visit(round_index, client, epochs))
        private_parts[client] = copy_part(model, private)

    def combine(server, models):
        weights = [float(sizes[client]) for client in models]
        mean = average_models([*models.values()], weights)
        # What clients keep is not averaged: the server's stays at its initial values.
        load_part(mean, copy_part(server, private))
        return mean if merge is None else merge(server, models, mean)

    server = federate(net, cohorts or cohorts_by_hand(), visit, combine)
    return server, private_parts


def copy_part(model, names):
    state = model.state_dict()
    return {name: state[name].clone() for name in names}


def load_part(model, part):
    model.load_state_dict({**model.state_dict(), **part})


# ---- local training


def take_steps(optimizer, compute_loss, batches, window=1):
    """Take a step by the mean loss of every ``window`` batches; of the last batches fewer may be left."""
    for begin in range(0, len(batches), window):
        optimizer.zero_grad()
        for batch in batches[begin : begin + window]:
            loss = compute_loss(*batch) / window  # Lightning divides so, also in the last step
            loss.backward()
        optimizer.step()


def cross_entropy_of(model):
    """Return the loss of a model as a function of a batch."""

    def compute_loss(x, y):
        return F.cross_entropy(model(x), y)

    return compute_loss


def train_by_sgd(model, visit, lr=0.1, momentum=0.9):
    """Train by an optimizer that begins anew at every visit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    take_steps(optimizer, cross_entropy_of(model), visit.batches)


def train_with_own_optimizers(make_optimizer, train, rounds, keep=False):
    """Federated averaging of three clients, each with an optimizer of its own: for a round, or if ``keep`` for all.

    ``train(model, optimizer, batches)`` trains a client in a round.
    """
    data = toy_data()
    data.setup("fit")
    optimizers = {}
    # An optimizer steps the parameters of one model: the client trains in it, and not in the round's model.
    optimized_models = {}

    def train_client(model, visit):
        client = visit.client
        is_first_visit = client not in optimizers
        if is_first_visit or not keep:
            optimized_models[client] = copy.deepcopy(model)
            optimizers[client] = make_optimizer(optimized_models[client].parameters())

        optimized_model = optimized_models[client]
        optimized_model.load_state_dict(model.state_dict())
        train(optimized_model, optimizers[client], visit.batches)
        model.load_state_dict(optimized_model.state_dict())

    net = make_network_without_norm()
    server, _ = fedavg_by_hand(net, train_client, data=data, cohorts=[range(3)] * rounds)
    return server
