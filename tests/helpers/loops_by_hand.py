"""Plain PyTorch loops written from papers: whose turn it is, its batches in their order, what it then keeps; and in-run
values sample by sample."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap

from flsv.aggregation import FedAvg
from flsv.contrib import InRunShapley, InRunValues
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.sampling import UniformSampler
from flsv.utilities.seeding import generator_for
from helpers.data import toy_data
from helpers.fits import client_tensors, fit
from helpers.models import Plain, network

SEED, COHORT, LOCAL_EPOCHS, ROUNDS = 5, 3, 2, 4


#: 10, 4, 8, 4 and 2 local steps a round.
PROPORTIONS = (7, 2, 5, 2, 1)


def make_unequal_data():
    data = toy_data(PROPORTIONS)
    data.setup("fit")
    return data


def cohort_of_round(round_index):
    """Three of five clients."""
    draw = generator_for(SEED, "cohort", round_index)
    return UniformSampler(COHORT).sample(len(PROPORTIONS), {}, draw).tolist()


def load_epochs(data, round_index, client):
    """A client's batches, a list for every local epoch."""
    epochs = []
    for epoch in range(LOCAL_EPOCHS):
        stream = generator_for(SEED, "shuffle", round_index, client, epoch)
        epochs.append(list(data.client_loader(client, "train", generator=stream)))
    return epochs


def load_batches(data, round_index, client):
    """Return the batches of all local epochs."""
    return itertools.chain(*load_epochs(data, round_index, client))


def copy_parameters(net):
    """The parameters' values."""
    return [p.detach().clone() for p in net.parameters()]


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
        total = 0
        for size, state in zip(sizes, states):
            total = total + size * state[name].double()
        value.copy_(total / sum(sizes))

    return mean


def federate(net, cohorts, visit, combine):
    """The server's model after a round of each cohort: the reference of all that is compared with a loop by hand.

    Args:
        net: the initial model, which stays as it is.
        cohorts: each round's clients.
        visit: trains in place a client's copy of the server's model, given the round's index and the client.
        combine: the server's next model, of its present one and the clients' models.
    """
    server = net
    for round_index, cohort in enumerate(cohorts):
        models = {}
        for client in cohort:
            model = copy.deepcopy(server).train()
            visit(model, round_index, client)
            models[client] = model
        server = combine(server, models)
    return server


def cohorts_by_hand(rounds=ROUNDS):
    return [cohort_of_round(round_index) for round_index in range(rounds)]


#: float32's rounding over some rounds, which differs between versions of torch.
ROUNDING = 5e-6


def assert_same_state(net, expected, tolerance=ROUNDING):
    for name, value in net.state_dict().items():
        torch.testing.assert_close(
            value,
            expected.state_dict()[name],
            rtol=tolerance,
            atol=tolerance,
            msg=lambda m, n=name: f"{n}: {m}",
        )


Train = Callable[[nn.Module, list[list[Any]]], None]


def train_sharing_by_hand(
    net,
    private,
    train,
    data=None,
    uniform=False,
    rounds=ROUNDS,
):
    """FedAvg by ``state_dict``s in which the names ``private`` stay at their client: the global model, and what every
    client keeps. ``train`` is given a client's batches, a list for every local epoch."""
    dealt = data or make_unequal_data()
    private_parts = {}

    def visit(model, round_index, client):
        model.load_state_dict(
            {
                **model.state_dict(),
                **private_parts.get(client, {}),
            }
        )
        train(model, load_epochs(dealt, round_index, client))
        state = model.state_dict()
        private_parts[client] = {name: state[name].clone() for name in private}

    def combine(server, models):
        sizes = [1.0 if uniform else float(dealt.num_samples[client]) for client in models]
        mean = average_models([*models.values()], sizes)
        state = server.state_dict()
        mean.load_state_dict(
            {
                **mean.state_dict(),
                **{name: state[name] for name in private},
            }
        )
        return mean

    return federate(net, cohorts_by_hand(rounds), visit, combine), private_parts


#: Rounds' indices with the clients that fail in them.
Failing = set[tuple[int, int]]


def train_by_hand(
    net,
    train,
    merge=None,
    failing=frozenset(),
):
    """Rounds of ``train``, and after each the mean of the models, or what ``merge`` makes of them and of the start."""
    data = make_unequal_data()
    cohorts = []
    for round_index, cohort in enumerate(cohorts_by_hand()):
        cohorts.append([client for client in cohort if (round_index, client) not in failing])

    def visit(model, round_index, client):
        train(model, round_index, client, load_batches(data, round_index, client))

    def combine(server, models):
        trained = [*models.values()]
        mean = average_models(trained, [1.0] * len(trained))
        if merge is not None:
            initial = copy_parameters(server)
            parameters = [copy_parameters(model) for model in trained]
            set_parameters(mean, merge(initial, parameters, copy_parameters(mean)))
        return mean

    return federate(net, cohorts, visit, combine)


def train_with_own_optimizers(make_optimizer, train, rounds, keep=False):
    """Federated averaging of three clients, each with an optimizer of its own: for a round, or if ``keep`` for all.

    ``train(model, optimizer, batches)`` trains a client in a round.
    """
    data = toy_data()
    data.setup("fit")
    parts_by_client = {}

    def visit(model, round_index, client):
        trained, optimizer = model, make_optimizer(model.parameters())
        if keep:
            trained, optimizer = parts_by_client.setdefault(client, (trained, optimizer))
            trained.load_state_dict(model.state_dict())
        train(trained, optimizer, load_batches(data, round_index, client))
        model.load_state_dict(trained.state_dict())

    def combine(server, models):
        return average_models([*models.values()], data.num_samples.tolist())

    return federate(make_network_without_norm(), [range(3)] * rounds, visit, combine)


def make_sgd_training(lr=0.1, momentum=0.9):
    """A new optimizer, and all epochs with it."""

    def train(client, epochs):
        optimizer = torch.optim.SGD(
            client.parameters(),
            lr=lr,
            momentum=momentum,
        )
        for epoch in epochs:
            for features, labels in epoch:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(client(features), labels)
                loss.backward()
                optimizer.step()

    return train


def assert_private_parts(loop, private_parts, prefix="net."):
    """The clients' states hold this and nothing else, to rounding."""
    states = client_tensors(loop)
    expected_states = {}
    for client, part in private_parts.items():
        if part:
            expected_states[client] = {
                f"module.{prefix}{name}": value for name, value in part.items()
            }

    assert states.keys() == expected_states.keys()
    for client, expected_state in expected_states.items():
        torch.testing.assert_close(
            states[client],
            expected_state,
            rtol=ROUNDING,
            atol=ROUNDING,
        )


class Batches:
    """A list that Lightning does not take for several loaders."""

    def __init__(self, batches):
        self._batches = batches

    def __len__(self):
        return len(self._batches)

    def __iter__(self):
        return iter(self._batches)


def make_loop_of_three_clients(**options):
    return FederatedLoop(sampler=UniformSampler(3), local_epochs=LOCAL_EPOCHS, seed=SEED, **options)


class KeepsRounds(FedAvg):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.rounds = []

    def end_round(self, round):
        self.rounds.append(round)


def make_network_without_norm():
    return network(batch_norm=False)


def make_in_run_data():
    return toy_data(server_val=0.2)


def make_in_run_loop(every=1, **kwargs):
    metrics = {"in_run": InRunShapley(), **kwargs.pop("metrics", {})}
    options = {"aggregator": KeepsRounds(), "seed": SEED, **kwargs}

    return FederatedLoop(metrics=metrics, client_algorithm=InRunValues(every), **options)


def fit_in_run(
    loop,
    folder,
    module=None,
    dealt=None,
    rounds=2,
    **kwargs,
):
    """The contributions, what every client keeps of its samples, and the rounds."""
    fit(
        loop,
        folder,
        module or Plain(make_network_without_norm()),
        dealt or make_in_run_data(),
        rounds=rounds,
        **kwargs,
    )
    sample_values = {}
    for client, state in client_tensors(loop).items():
        sample_values[client] = state["in_run_values"]

    by_class = loop.contributions["in_run"].by_class.double()
    return by_class, sample_values, loop.aggregator.rounds


def validation_gradient(module, model, dealt):
    ParameterSpace(module).write(module, model)
    inputs, labels = zip(*dealt.val_dataloader())
    loss = F.cross_entropy(
        module(torch.cat(inputs)),
        torch.cat(labels),
    )
    loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def in_run_values_by_hand(
    dealt,
    round,
    client,
    lr,
    momentum,
    window,
    epochs,
    limit=None,
    every=1,
):
    """A client's training, sample by sample: its samples' values, by one step of ``every``, and its model."""
    g = validation_gradient(make_network_without_norm(), round.global_vector, dealt)
    model = make_network_without_norm()
    ParameterSpace(model).write(model, round.global_vector)
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=lr,
        momentum=momentum,
    )
    samples = torch.cat(
        [
            x
            for x, _ in dealt.client_loader(
                client,
                "train",
                shuffle=False,
            )
        ]
    )
    batches = []
    for epoch in range(epochs):
        stream = generator_for(SEED, "shuffle", round.round_index, client, epoch)
        batches += list(dealt.client_loader(client, "train", stream))[:limit]

    steps = [batches[i : i + window] for i in range(0, len(batches), window)]
    looked = range(
        round.round_index % min(every, len(batches)),
        len(steps),
        every,
    )

    def loss(parameters, x, y):
        return F.cross_entropy(
            functional_call(model, parameters, (x[None],)),
            y[None],
        )

    values = torch.zeros(len(samples), dtype=torch.float64)
    for t, step in enumerate(steps):
        # The k-th step after this one still moves by momentum^k of this one's gradients.
        rates = sum(lr * momentum**k for k in range(len(steps) - t))
        reach = 0.0
        if t in looked:
            reach = rates * len(steps) / len(looked)
        optimizer.zero_grad()
        for x, y in step:
            parameters = {name: p.detach() for name, p in model.named_parameters()}
            slopes = vmap(grad(loss), (None, 0, 0))(
                parameters,
                x,
                y,
            )
            products = sum((slopes[name] * g[name]).flatten(1).sum(1) for name in g)
            products = products / (len(x) * window)
            rows = [int((samples == sample).all(1).nonzero()) for sample in x]
            # A sample may be there twice.
            values.index_add_(
                0,
                torch.tensor(rows),
                reach * products.double(),
            )
            # Lightning divides so, also in the last step.
            loss_of_batch = F.cross_entropy(model(x), y) / window
            loss_of_batch.backward()
        optimizer.step()

    return values, ParameterSpace(model).read(model)


def train_with_loss(client, epochs, loss, lr, accumulated):
    """Gradient steps in place, as Lightning accumulates: an epoch's last step may have fewer batches."""
    optimizer = torch.optim.SGD(client.parameters(), lr=lr)
    for batches in epochs:
        for begin in range(0, len(batches), accumulated):
            optimizer.zero_grad()
            for x, y in batches[begin : begin + accumulated]:
                (loss(x, y) / accumulated).backward()
            optimizer.step()
