"""Twelve federations of what users have, made after every choice and looked at once, see `fresh_payments.py`.

GRU, BatchNorm, dropout, a regression, the area under the ROC curve, FedAdam, FedAvgM, ShapFed-WA and partial
participation, of 4 to 20 clients, so small that all coalitions of up to ten clients can be trained with many seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flsv.aggregation import FedAdam, FedAvgM, ShapFedWA
from flsv.benchmark import Federation
from flsv.metrics import ClassSpecificShapley
from flsv.sampling import UniformSampler


class Pooled(nn.Sequential):
    """A small network of images of 28 x 28 pixels, which a fit of it in seconds allows."""

    def __init__(self, dropout: float = 0.0) -> None:
        drop = [nn.Dropout(dropout)] if dropout else []
        super().__init__(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), *drop, nn.Linear(24, 10))


class NormedCNN(nn.Sequential):
    """A convolution with BatchNorm."""

    def __init__(self) -> None:
        convolution = nn.Conv2d(1, 6, 3, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)
        super().__init__(nn.AvgPool2d(2), *convolution, nn.Flatten(), nn.Linear(216, 10))


class NormedMLP(nn.Sequential):
    """An MLP of scikit-learn's digits with BatchNorm."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


@dataclass(frozen=True)
class Fresh:
    """A federation, and the arguments of its loop."""

    federation: Federation
    loop: Callable[[], dict[str, Any]] = field(default=dict)


def classifier(network: str | type[nn.Module], optimizer: str, lr: float, **more: Any) -> dict[str, Any]:
    named = {"network": "mlp", "network_args": {"hidden": [16]}} if network == "mlp" else {"network": network}
    sgd = {"class_path": f"torch.optim.{optimizer}", "init_args": {"lr": lr, **more}}
    return {"class_path": "flsv.ClassifierClient", "init_args": {**named, "optimizer": sgd}}


def own(network: str, **arguments: Any) -> Any:
    return {"class_path": network, "init_args": arguments}


def dealt(how: str, clients: int, seed: int, **arguments: Any) -> dict[str, Any]:
    if how == "Dirichlet":
        arguments |= {"num_clients": clients, "min_samples": 16}
    return {"class_path": f"flsv.data.{how}Partitioner", "init_args": {**arguments, "seed": seed}}


def spoilt(kind: str, clients: list[int], **arguments: Any) -> dict[str, Any]:
    return {"class_path": f"flsv.data.{kind}", "init_args": {**arguments, "clients": clients}}


def images(source: str, clients: int, each: int, partitioner: Any, corruptions: Sequence[Any] = ()) -> dict[str, Any]:
    splits = {"max_samples": each * clients + 400, "server_val": 400 / (each * clients + 400), "seed": 7}
    return {
        "source": source,
        "splits": splits,
        "partitioner": partitioner,
        "corruptions": list(corruptions),
        "batch_size": 16,
        "loader": {"class_path": "flsv.data.Loader", "init_args": {"drop_last": True}},
    }


def made(name: str, title: str, rounds: int, data: Any, model: Any, **more: Any) -> Federation:
    files = {"mnist": ["MNIST/raw"], "fashion_mnist": ["FashionMNIST/raw"]}
    needs = more.pop("needs", files.get(data["source"] if isinstance(data["source"], str) else "", []))
    return Federation(name, title, "fresh", rounds, data, model, needs=needs, **more)


TABLE = {
    "source": {
        "class_path": "flsv.data.TableData",
        "init_args": {
            "path": "tables/contraception.csv",
            "target": "use",
            "val_fraction": 0.4,
            "columns": {"exclude": ["woman", "district"], "categorical": ["livch"]},
        },
    },
    "splits": {"max_samples": 1000, "seed": 7},
    "partitioner": dealt("Size", 8, 71, proportions=[1, 1, 2, 2, 3, 3, 5, 8]),
    "corruptions": [spoilt("ClosedSetLabelNoise", [4, 5], rate=0.4)],
    "batch_size": 16,
}
PATIENTS = {
    "source": {
        "class_path": "flsv.benchmark.built_in.BuiltInData",
        "init_args": {"name": "diabetes", "val_fraction": 0.4},
    },
    "splits": {"seed": 7},
    "partitioner": dealt("Size", 5, 72, proportions=[2, 1, 3, 5, 2]),
    "corruptions": [spoilt("GaussianNoise", [3], std=1.5)],
    "batch_size": 10,
}
REGRESSION = {
    "class_path": "flsv.models.RegressorClient",
    "init_args": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.005}}},
}


def catalogue() -> dict[str, Fresh]:
    here = "fresh_federations"
    sizes = [1, 2, 2, 1, 3, 4, 1, 2, 1, 3]
    found = [
        Fresh(
            made(
                "gru_4",
                "digits read row by row, GRU, Adam",
                12,
                images("digits", 4, 100, dealt("Dirichlet", 4, 73, alpha=0.5)),
                classifier(own("bench_fits.Recurrent"), "Adam", 0.01),
            )
        ),
        Fresh(
            made(
                "batch_norm_5",
                "Fashion-MNIST, convolution and BatchNorm, FedAdam",
                10,
                images(
                    "fashion_mnist",
                    5,
                    100,
                    dealt("Dirichlet", 5, 74, alpha=0.3),
                    [spoilt("ClosedSetLabelNoise", [2], rate=0.6)],
                ),
                classifier(own(f"{here}.NormedCNN"), "SGD", 0.05),
            ),
            lambda: {"aggregator": FedAdam(lr=0.03)},
        ),
        Fresh(
            made(
                "regression_5",
                "diabetes, linear regression, noise, FedAvgM",
                12,
                PATIENTS,
                REGRESSION,
                performance="val_loss",
                mode="min",
            ),
            lambda: {"aggregator": FedAvgM(lr=1.0, momentum=0.5)},
        ),
        Fresh(
            made(
                "dropout_6",
                "MNIST, dropout, ShapFed-WA",
                10,
                images("mnist", 6, 100, dealt("Dirichlet", 6, 75, alpha=0.5), [spoilt("GaussianNoise", [1], std=1.5)]),
                classifier(own(f"{here}.Pooled", dropout=0.3), "SGD", 0.1),
            ),
            lambda: {"aggregator": ShapFedWA(metric="cssv"), "metrics": {"cssv": ClassSpecificShapley()}},
        ),
        Fresh(
            made(
                "partial_7",
                "digits, four of seven clients a round",
                12,
                images(
                    "digits",
                    7,
                    100,
                    dealt("Size", 7, 76, proportions=[1, 1, 2, 2, 3, 3, 4]),
                    [spoilt("ClosedSetLabelNoise", [5], rate=0.5)],
                ),
                classifier("mlp", "SGD", 0.05, momentum=0.9),
            ),
            lambda: {"sampler": UniformSampler(4)},
        ),
        Fresh(
            made(
                "auroc_8",
                "contraception in Bangladesh, area under the ROC curve, wrong labels",
                15,
                TABLE,
                classifier("mlp", "SGD", 0.05, momentum=0.9),
                performance="auroc",
                needs=["tables/contraception.csv"],
            )
        ),
        Fresh(
            made(
                "momentum_9",
                "Fashion-MNIST, FedAvgM, wrong labels",
                10,
                images(
                    "fashion_mnist",
                    9,
                    80,
                    dealt("Dirichlet", 9, 77, alpha=0.4),
                    [spoilt("ClosedSetLabelNoise", [3, 6], rate=0.6)],
                ),
                classifier(own(f"{here}.Pooled"), "SGD", 0.1),
            ),
            lambda: {"aggregator": FedAvgM(lr=1.0, momentum=0.5)},
        ),
        Fresh(
            made(
                "dropout_10",
                "MNIST, dropout, 1 to 4 parts, noise",
                10,
                images(
                    "mnist",
                    10,
                    80,
                    dealt("Size", 10, 78, proportions=sizes),
                    [spoilt("GaussianNoise", [4, 9], std=1.5)],
                ),
                classifier(own(f"{here}.Pooled", dropout=0.3), "SGD", 0.1),
            )
        ),
        Fresh(
            made(
                "adam_11",
                "Fashion-MNIST, FedAdam, few classes a client",
                10,
                images("fashion_mnist", 11, 80, dealt("Dirichlet", 11, 79, alpha=0.2)),
                classifier(own(f"{here}.Pooled"), "SGD", 0.1),
                circles=6,
            ),
            lambda: {"aggregator": FedAdam(lr=0.03)},
        ),
        Fresh(
            made(
                "batch_norm_12",
                "digits, BatchNorm, wrong labels",
                10,
                images(
                    "digits",
                    12,
                    80,
                    dealt("Dirichlet", 12, 80, alpha=0.5),
                    [spoilt("ClosedSetLabelNoise", [0, 8], rate=0.6)],
                ),
                classifier(own(f"{here}.NormedMLP"), "SGD", 0.05),
                circles=6,
            )
        ),
        Fresh(
            made(
                "adam_20",
                "MNIST, Adam, few classes a client",
                8,
                images("mnist", 20, 60, dealt("Dirichlet", 20, 81, alpha=0.3)),
                classifier(own(f"{here}.Pooled"), "Adam", 0.005),
                circles=2,
            )
        ),
        Fresh(
            made(
                "sizes_20",
                "digits, 1 to 4 parts, wrong labels",
                12,
                images(
                    "digits",
                    20,
                    60,
                    dealt("Size", 20, 82, proportions=sizes * 2),
                    [spoilt("ClosedSetLabelNoise", [2, 7, 15], rate=0.6)],
                ),
                classifier("mlp", "SGD", 0.05, momentum=0.9),
                circles=2,
            )
        ),
    ]
    return {each.federation.name: each for each in found}
