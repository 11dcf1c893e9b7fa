"""In-run Shapley values of a small federation, in a fit and by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_loops import client_tensors
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from toys import Plain, fit, network, toy_data

from flsv import Reporting
from flsv.aggregation import FedAvg
from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.data import FederatedDataModule
from flsv.federation import FederatedLoop
from flsv.metrics import InRunShapley
from flsv.training.algorithms import InRunValues
from flsv.utilities.seeding import generator_for

SEED = 5


class Kept(FedAvg):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.rounds: list[Round] = []

    def end_round(self, round: Round) -> None:
        self.rounds.append(round)


def small() -> nn.Module:
    return network(batch_norm=False)


def data() -> FederatedDataModule:
    return toy_data(server_val=0.2)


def with_options(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, **{"lr": 0.1, **options})


def federation(every: int = 1, order: Any = 1, **kwargs: Any) -> FederatedLoop:
    metrics = {"in_run": InRunShapley(order=order), **kwargs.pop("metrics", {})}
    options = {"aggregator": Kept(), "seed": SEED, "reporting": Reporting(table=False), **kwargs}
    return FederatedLoop(metrics=metrics, client_algorithm=InRunValues(every), **options)


def run(
    loop: FederatedLoop,
    folder: Path,
    module: Plain | None = None,
    dealt: FederatedDataModule | None = None,
    rounds: int = 2,
    **kwargs: Any,
) -> tuple[Tensor, dict[int, Tensor], list[Round]]:
    """The contributions, what every client keeps of its samples, and the rounds."""
    fit(loop, folder, module or Plain(small()), dealt or data(), rounds=rounds, **kwargs)
    kept = {client: state["in_run_values"] for client, state in client_tensors(loop).items()}
    return loop.contributions["in_run"].by_class.double(), kept, loop.aggregator.rounds  # type: ignore[attr-defined]


def validation_gradient(module: nn.Module, model: Tensor, dealt: FederatedDataModule) -> dict[str, Tensor]:
    ParameterSpace(module).write(module, model)
    x, y = (torch.cat(part) for part in zip(*dealt.val_dataloader()))
    F.cross_entropy(module(x), y).backward()
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def by_hand(
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
    g = validation_gradient(small(), round.global_vector, dealt)
    model = small()
    ParameterSpace(model).write(model, round.global_vector)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    mine = torch.cat([x for x, _ in dealt.client_loader(client, "train", shuffle=False)])
    batches = [
        batch
        for epoch in range(epochs)
        for batch in list(
            dealt.client_loader(client, "train", generator_for(SEED, "shuffle", round.round_index, client, epoch))
        )[:limit]
    ]
    steps = [batches[i : i + window] for i in range(0, len(batches), window)]
    looked = range(round.round_index % min(every, len(batches)), len(steps), every)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x[None],)), y[None])

    values = torch.zeros(len(mine), dtype=torch.float64)
    for t, step in enumerate(steps):
        # The k-th step after this one still moves by momentum^k of this one's gradients.
        reach = sum(lr * momentum**k for k in range(len(steps) - t)) * (t in looked) * len(steps) / max(len(looked), 1)
        optimizer.zero_grad()
        for x, y in step:
            parameters = {name: p.detach() for name, p in model.named_parameters()}
            slopes = vmap(grad(loss), (None, 0, 0))(parameters, x, y)
            products = sum((slopes[name] * g[name]).flatten(1).sum(1) for name in g) / (len(x) * window)
            rows = [int((mine == each).all(1).nonzero()) for each in x]
            values[rows] += reach * products.double()
            (F.cross_entropy(model(x), y) / window).backward()  # Lightning divides so, also in the last
        optimizer.step()
    return values, ParameterSpace(model).read(model)
