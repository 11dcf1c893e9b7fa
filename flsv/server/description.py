"""Describes a fit to its strategies and to the loggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from flsv.data import FederatedDataModule
from flsv.parameters import ParameterSpace
from flsv.server.config import FederationConfig
from flsv.server.identity import described
from flsv.strategy import Federation, Strategy, own_parts


def federation(
    global_vector: Tensor,
    space: ParameterSpace,
    data: FederatedDataModule,
    seed: int,
    optimizers: Sequence[Optimizer],
    config: FederationConfig,
    metrics: Mapping[str, Metric],
) -> Federation:
    """What strategies know before the first round."""
    clients = range(data.num_clients)
    sizes = {
        split: torch.tensor([len(data.client_indices(client, split)) for client in clients])
        for split in ("train", "val", "test")
    }
    of_data = data.num_clients, data.num_classes, sizes
    known = config.strategies, config.local_epochs, config.uploads
    named = data.client_names, metrics, config.filters
    return Federation(global_vector, space, *of_data, seed, optimizers, *known, *named)


def settings(
    config: FederationConfig, metrics: Mapping[str, Metric], data: FederatedDataModule, seed: int
) -> dict[str, Any]:
    """The run's hyper-parameters, flat.

    Args:
        config: the loop's.
        metrics: the live ones, by name.
        data: dealt out.
        seed: the run's.
    """
    result: dict[str, Any] = {"local_epochs": config.local_epochs, "optimizer_state": config.optimizer_state}
    result |= {"federation_seed": seed}
    result |= {} if config.share == "all" else {"share": described(config.share)}
    result |= {role: repr(strategy) for role, strategy in config.strategies.items()}
    result |= {name: repr(list(parts)) for name in ("uploads", "filters") if (parts := getattr(config, name))}
    result |= {f"metric/{name}": repr(metric) for name, metric in metrics.items()}
    return {**result, **{f"data/{name}": value for name, value in data.describe().items()}}


def algorithm_name(strategies: Mapping[str, Strategy]) -> str:
    """What a federation of these strategies is called, from what is not the default.

    Args:
        strategies: by their roles.

    Example:
        >>> from flsv.aggregation import FedAvg, ShapFedWA
        >>> from flsv.personalization import Standalone
        >>> algorithm_name({"aggregator": FedAvg(), "personalizer": Standalone()})
        'Standalone'
        >>> algorithm_name({"aggregator": ShapFedWA("cssv")}), algorithm_name({"aggregator": FedAvg()})
        ('ShapFedWA', 'FedAvg')
        >>> from flsv.loop.shadow import ShadowTraining
        >>> algorithm_name({"client_algorithm": ShadowTraining()})
        'FedAvg'
    """
    names = {role: type(strategy).__name__ for role, strategy in own_parts(strategies).items()}
    parts = [names[role] for role in ("personalizer", "client_algorithm") if role in names]
    if names.get("aggregator", "FedAvg") != "FedAvg" or not parts:
        parts.append(names.get("aggregator", "FedAvg"))
    return "+".join(parts)


def chosen(
    strategies: Mapping[str, Strategy],
    data: FederatedDataModule,
    seed: int,
    rounds: int | None,
    optimizers: Sequence[Optimizer],
) -> dict[str, str | int | float]:
    """The settings that tell runs apart, for a table of runs: names that a narrow column does not cut.

    Args:
        strategies: by their roles.
        data: dealt out.
        seed: the run's.
        rounds: that are to be run; None: nobody knows.
        optimizers: of the module, before the first round.
    """
    partitioner = getattr(data, "partitioner", None)
    facts = {
        "algorithm": algorithm_name(strategies),
        "aggregator": type(strategies["aggregator"]).__name__ if "aggregator" in strategies else "FedAvg",
        "partitioner": None if partitioner is None else type(partitioner).__name__.removesuffix("Partitioner"),
        "alpha": getattr(partitioner, "alpha", None),
        "clients": data.num_clients,
        "learning rate": next((float(each.param_groups[0]["lr"]) for each in optimizers), None),
        "seed": seed,
        "rounds": rounds,
    }
    return {name: fact for name, fact in facts.items() if isinstance(fact, str | int | float)}
