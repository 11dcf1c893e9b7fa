"""Values of samples within a run: federations that have them, and the same values sample by sample by hand."""

import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, vmap

from flsv.contrib import InRunShapley, InRunValues
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.utilities.seeding import generator_for
from helpers.data import toy_data
from helpers.fits import KeepsRounds, client_tensors, fit
from helpers.loops_by_hand import SEED, make_network_without_norm
from helpers.models import Plain


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
