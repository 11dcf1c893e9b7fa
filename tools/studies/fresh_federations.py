"""Seven federations for drawn cohorts, designs for many clients and brackets, whose table was opened once these stood
(see `fresh_payments.py`): two with samplers, three of 13 to 20 clients, two in which all of a few clients take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from flsv.benchmark import Federation
from flsv.sampling import BernoulliSampler, UniformSampler


class Pooled(nn.Sequential):
    """A small network of images of 28 x 28 pixels, which a fit of it in seconds allows."""

    def __init__(self, dropout: float = 0.0) -> None:
        drop = [nn.Dropout(dropout)] if dropout else []
        super().__init__(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, 24), nn.ReLU(), *drop, nn.Linear(24, 10))


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


WOMEN: dict[str, Any] = {
    "source": {
        "class_path": "flsv.data.TableData",
        "init_args": {
            "path": "tables/contraception.csv",
            "target": "use",
            "val_fraction": 0.4,
            "columns": {"exclude": ["woman", "district"], "categorical": ["livch"]},
        },
    },
    "splits": {"max_samples": 900, "seed": 17},
    "partitioner": dealt("Size", 6, 171, proportions=[1, 2, 2, 3, 4, 4]),
    "corruptions": [spoilt("ClosedSetLabelNoise", [3], rate=0.5)],
    "batch_size": 16,
}


def catalogue() -> dict[str, Fresh]:
    pooled = own("fresh_federations.Pooled")
    found = [
        Fresh(
            made(
                "three_of_6",
                "digits, three of six clients a round, wrong labels",
                16,
                images(
                    "digits",
                    6,
                    90,
                    dealt("Dirichlet", 6, 172, alpha=0.6),
                    [spoilt("ClosedSetLabelNoise", [1], rate=0.5)],
                ),
                classifier("mlp", "SGD", 0.05, momentum=0.9),
            ),
            lambda: {"sampler": UniformSampler(3)},
        ),
        Fresh(
            made(
                "coins_8",
                "Fashion-MNIST, about three of eight clients a round, 1 to 4 parts, noise",
                14,
                images(
                    "fashion_mnist",
                    8,
                    90,
                    dealt("Size", 8, 173, proportions=[1, 1, 2, 2, 3, 3, 4, 4]),
                    [spoilt("GaussianNoise", [5], std=1.5)],
                ),
                classifier(pooled, "SGD", 0.1),
            ),
            lambda: {"sampler": BernoulliSampler(3)},
        ),
        Fresh(
            made(
                "momentum_13",
                "digits, SGD with momentum, noise",
                10,
                images(
                    "digits",
                    13,
                    70,
                    dealt("Dirichlet", 13, 174, alpha=0.5),
                    [spoilt("GaussianNoise", [2, 7], std=1.5)],
                ),
                classifier("mlp", "SGD", 0.03, momentum=0.9),
                circles=3,
            )
        ),
        Fresh(
            made(
                "fashion_16",
                "Fashion-MNIST, 1 to 4 parts, wrong labels",
                8,
                images(
                    "fashion_mnist",
                    16,
                    64,
                    dealt("Size", 16, 175, proportions=[1, 2, 3, 4] * 4),
                    [spoilt("ClosedSetLabelNoise", [4, 10, 15], rate=0.6)],
                ),
                classifier(pooled, "SGD", 0.1),
                circles=3,
            )
        ),
        Fresh(
            made(
                "labels_20",
                "digits, Adam, few classes a client",
                8,
                images("digits", 20, 60, dealt("Dirichlet", 20, 176, alpha=0.4)),
                classifier("mlp", "Adam", 0.01),
                circles=2,
            )
        ),
        Fresh(
            made(
                "women_6",
                "contraception in Bangladesh, accuracy, wrong labels",
                12,
                WOMEN,
                classifier("mlp", "SGD", 0.05, momentum=0.9),
                needs=["tables/contraception.csv"],
            )
        ),
        Fresh(
            made(
                "mnist_5",
                "MNIST, few classes a client, noise",
                10,
                images("mnist", 5, 100, dealt("Dirichlet", 5, 177, alpha=0.3), [spoilt("GaussianNoise", [0], std=1.5)]),
                classifier(pooled, "SGD", 0.1),
            )
        ),
    ]
    return {each.federation.name: each for each in found}
