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
from helpers.loops_by_hand import SEED, cross_entropy_of, make_network_without_norm, take_steps
from helpers.models import Plain


def make_in_run_data():
    return toy_data(server_val=0.2)


def make_in_run_loop(every=1, **options):
    metrics = {"in_run": InRunShapley(), **options.pop("metrics", {})}
    defaults = {"aggregator": KeepsRounds(), "seed": SEED}
    return FederatedLoop(
        metrics=metrics, client_algorithm=InRunValues(every), **{**defaults, **options}
    )


def fit_in_run(loop, folder, module=None, dealt=None, rounds=2, **trainer_options):
    """The contributions, what every client keeps of its samples, and the rounds."""
    fit(
        loop,
        folder,
        module or Plain(make_network_without_norm()),
        dealt or make_in_run_data(),
        rounds=rounds,
        **trainer_options,
    )
    sample_values = {}
    for client, state in client_tensors(loop).items():
        sample_values[client] = state["in_run_values"]

    by_class = loop.values["in_run"].by_class.double()
    return by_class, sample_values, loop.aggregator.rounds


def model_of(vector):
    model = make_network_without_norm()
    ParameterSpace(model).write(model, vector)
    return model


def validation_gradient(vector, dealt):
    """Return the gradient of the server's validation loss, by the names of parameters."""
    model = model_of(vector)
    inputs, labels = zip(*dealt.val_dataloader())
    loss = F.cross_entropy(model(torch.cat(inputs)), torch.cat(labels))
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradient_products(model, batch, direction):
    """Return the inner product of each sample's gradient with a direction, ``[len(batch)]``."""

    def loss_of_sample(parameters, x, y):
        logits = functional_call(model, parameters, (x[None],))
        return F.cross_entropy(logits, y[None])

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = vmap(grad(loss_of_sample), in_dims=(None, 0, 0))(parameters, *batch)
    products = [(gradients[name] * direction[name]).flatten(1).sum(1) for name in direction]
    return sum(products)


def load_steps(dealt, round, client, epochs, limit, window):
    """Return the batches of each of the client's steps."""
    batches = []
    for epoch in range(epochs):
        stream = generator_for(SEED, "shuffle", round.round_index, client, epoch)
        batches += list(dealt.client_loader(client, "train", stream))[:limit]
    return [batches[begin : begin + window] for begin in range(0, len(batches), window)]


def in_run_values_by_hand(dealt, round, client, lr, momentum, window, epochs, limit=None, every=1):
    """A client's training, sample by sample: its samples' values, by one step of ``every``, and its model."""
    direction = validation_gradient(round.global_vector, dealt)
    model = model_of(round.global_vector)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    loader = dealt.client_loader(client, "train", shuffle=False)
    samples = torch.cat([x for x, _ in loader])
    values = torch.zeros(len(samples), dtype=torch.float64)

    steps = load_steps(dealt, round, client, epochs, limit, window)
    num_batches = sum(map(len, steps))
    first_valued_step = round.round_index % min(every, num_batches)
    valued_steps = range(first_valued_step, len(steps), every)
    for index, step in enumerate(steps):
        if index in valued_steps:
            # The k-th step after this one still moves by momentum^k of this one's gradients.
            rate = sum(lr * momentum**k for k in range(len(steps) - index))
            rate_for_steps_left_out = rate * len(steps) / len(valued_steps)
            for x, y in step:
                products = gradient_products(model, (x, y), direction) / (len(x) * window)
                rows = torch.tensor([int((samples == row).all(1).nonzero()) for row in x])
                # A sample may be there twice.
                values.index_add_(0, rows, rate_for_steps_left_out * products.double())
        take_steps(optimizer, cross_entropy_of(model), step, window)

    return values, ParameterSpace(model).read(model)
