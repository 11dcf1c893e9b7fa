"""Plain PyTorch loops written from papers: whose turn it is, its batches in their order, what it then keeps; and in-run
values sample by sample."""

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop
from flsv.metrics import InRunShapley
from flsv.sampling import UniformSampler
from flsv.training.algorithms import InRunValues
from flsv.utilities.seeding import generator_for
from helpers.data import toy_data
from helpers.fits import client_tensors, fit
from helpers.models import Plain, network

SEED, COHORT, LOCAL_EPOCHS, ROUNDS = 5, 3, 2, 4


#: 10, 4, 8, 4 and 2 local steps a round.
PROPORTIONS = (7, 2, 5, 2, 1)


def make_unequal_data() -> FederatedDataModule:
    data = toy_data(PROPORTIONS)
    data.setup("fit")
    return data


def cohort_of_round(round_index: int) -> list[int]:
    """Three of five clients."""
    draw = generator_for(SEED, "cohort", round_index)
    return UniformSampler(COHORT).sample(len(PROPORTIONS), {}, draw).tolist()


def load_batches(
    data: FederatedDataModule, round_index: int, client: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Return the batches of all local epochs."""
    for epoch in range(LOCAL_EPOCHS):
        stream = generator_for(SEED, "shuffle", round_index, client, epoch)
        yield from data.client_loader(client, "train", generator=stream)


def copy_parameters(net: nn.Module) -> list[Tensor]:
    """The parameters' values."""
    return [p.detach().clone() for p in net.parameters()]


@torch.no_grad()
def set_state(
    net: nn.Module, parameters: list[Tensor], buffers: list[dict[str, Tensor]], weights: list[float]
) -> None:
    """New parameters, and the clients' buffers averaged; of integer ones the first."""
    for parameter, value in zip(net.parameters(), parameters):
        parameter.copy_(value)

    for name, buffer in net.named_buffers():
        if not buffer.is_floating_point():
            buffer.copy_(buffers[0][name])
            continue
        total = 0
        for weight, client_buffers in zip(weights, buffers):
            total = total + weight * client_buffers[name]
        buffer.copy_(total / sum(weights))


@torch.no_grad()
def average_models(models: Sequence[Any], sizes: Sequence[float]) -> Any:
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


def copy_buffers(net: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in net.named_buffers()}


#: float32's rounding over some rounds, which differs between versions of torch.
ROUNDING = 5e-6


def assert_same_state(net: nn.Module, expected: nn.Module, tolerance: float = ROUNDING) -> None:
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
    net: nn.Module,
    private: Collection[str],
    train: Train,
    data: FederatedDataModule | None = None,
    uniform: bool = False,
    rounds: int = ROUNDS,
) -> tuple[nn.Module, dict[int, dict[str, Tensor]]]:
    """FedAvg by ``state_dict``s in which the names ``private`` stay at their client: the global model, and what every
    client keeps. ``train`` is given a client's batches, a list for every local epoch."""
    if data is None:
        data = make_unequal_data()

    server = copy.deepcopy(net)
    private_parts: dict[int, dict[str, Tensor]] = {}
    for r in range(rounds):
        states = []
        sizes = []
        for i in cohort_of_round(r):
            client = copy.deepcopy(server).train()
            client.load_state_dict({**client.state_dict(), **private_parts.get(i, {})})
            client_batches = list(load_batches(data, r, i))
            length = len(client_batches) // LOCAL_EPOCHS
            epochs = [
                client_batches[epoch * length : (epoch + 1) * length]
                for epoch in range(LOCAL_EPOCHS)
            ]
            train(client, epochs)
            state = {name: value.clone() for name, value in client.state_dict().items()}
            private_parts[i] = {name: state[name] for name in private}
            states.append(state)
            sizes.append(1.0 if uniform else float(data.num_samples[i]))
        total = sum(sizes)
        for name, value in server.state_dict().items():
            if name in private:
                continue
            if value.is_floating_point():
                value.copy_(sum(size / total * state[name] for size, state in zip(sizes, states)))
            else:
                value.copy_(states[0][name])

    return server, private_parts


def make_sgd_training(lr: float = 0.1, momentum: float = 0.9) -> Train:
    """A new optimizer, and all epochs with it."""

    def train(client: nn.Module, epochs: list[list[Any]]) -> None:
        optimizer = torch.optim.SGD(client.parameters(), lr=lr, momentum=momentum)
        for epoch in epochs:
            for features, labels in epoch:
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(client(features), labels)
                loss.backward()
                optimizer.step()

    return train


def assert_private_parts(
    loop: FederatedLoop, private_parts: dict[int, dict[str, Tensor]], prefix: str = "net."
) -> None:
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

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)


def make_loop_of_three_clients(**options: Any) -> FederatedLoop:
    defaults = {
        "sampler": UniformSampler(3),
        "local_epochs": LOCAL_EPOCHS,
        "seed": SEED,
    }
    return FederatedLoop(**{**defaults, **options})


class KeepsRounds(FedAvg):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rounds: list[Round] = []

    def end_round(self, round: Round) -> None:
        self.rounds.append(round)


def make_network_without_norm() -> nn.Module:
    return network(batch_norm=False)


def make_in_run_data() -> FederatedDataModule:
    return toy_data(server_val=0.2)


def make_sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **options})


def make_in_run_loop(every: int = 1, **kwargs: Any) -> FederatedLoop:
    metrics = {"in_run": InRunShapley(), **kwargs.pop("metrics", {})}
    options = {
        "aggregator": KeepsRounds(),
        "seed": SEED,
        "reporting": Reporting(table=False),
        **kwargs,
    }

    return FederatedLoop(metrics=metrics, client_algorithm=InRunValues(every), **options)


def fit_in_run(
    loop: FederatedLoop,
    folder: Path,
    module: Plain | None = None,
    dealt: FederatedDataModule | None = None,
    rounds: int = 2,
    **kwargs: Any,
) -> tuple[Tensor, dict[int, Tensor], list[Round]]:
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
    return by_class, sample_values, loop.aggregator.rounds  # type: ignore[attr-defined]


def validation_gradient(
    module: nn.Module, model: Tensor, dealt: FederatedDataModule
) -> dict[str, Tensor]:
    ParameterSpace(module).write(module, model)
    inputs, labels = zip(*dealt.val_dataloader())
    loss = F.cross_entropy(module(torch.cat(inputs)), torch.cat(labels))
    loss.backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def in_run_values_by_hand(
    dealt: FederatedDataModule,
    round: Round,
    client: int,
    lr: float,
    momentum: float,
    window: int,
    epochs: int,
    limit: int | None = None,
    every: int = 1,
) -> tuple[Tensor, Tensor]:
    """A client's training, sample by sample: its samples' values, by one step of ``every``, and its model."""
    g = validation_gradient(make_network_without_norm(), round.global_vector, dealt)
    model = make_network_without_norm()
    ParameterSpace(model).write(model, round.global_vector)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
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
    batches: list[Any] = []
    for epoch in range(epochs):
        stream = generator_for(SEED, "shuffle", round.round_index, client, epoch)
        batches += list(dealt.client_loader(client, "train", stream))[:limit]

    steps = [
        batches[i : i + window]
        for i in range(
            0,
            len(batches),
            window,
        )
    ]
    looked = range(
        round.round_index % min(every, len(batches)),
        len(steps),
        every,
    )

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(
            functional_call(
                model,
                parameters,
                (x[None],),
            ),
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
            slopes = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
            products = sum((slopes[name] * g[name]).flatten(1).sum(1) for name in g)
            products = products / (len(x) * window)
            rows = [int((samples == sample).all(1).nonzero()) for sample in x]
            # A sample may be there twice.
            values.index_add_(0, torch.tensor(rows), reach * products.double())
            # Lightning divides so, also in the last step.
            loss_of_batch = F.cross_entropy(model(x), y) / window
            loss_of_batch.backward()
        optimizer.step()

    return values, ParameterSpace(model).read(model)


def train_with_loss(
    client: nn.Module,
    epochs: list[list[Any]],
    loss: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    accumulated: int,
) -> None:
    """Gradient steps in place, as Lightning accumulates: an epoch's last step may have fewer batches."""
    optimizer = torch.optim.SGD(client.parameters(), lr=lr)
    for batches in epochs:
        for begin in range(0, len(batches), accumulated):
            optimizer.zero_grad()
            for x, y in batches[begin : begin + accumulated]:
                (loss(x, y) / accumulated).backward()
            optimizer.step()


def loop_of_algorithm(algorithm: Any) -> FederatedLoop:
    """FedAvg with a client algorithm, as :func:`train_sharing_by_hand` trains."""
    return FederatedLoop(
        client_algorithm=algorithm,
        sampler=UniformSampler(COHORT),
        local_epochs=LOCAL_EPOCHS,
        seed=SEED,
    )
