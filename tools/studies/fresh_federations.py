"""Eight federations for the width of brackets, the kernel's third part and sums over rounds with a sampler, whose table
was opened once these stood (see `fresh_payments.py`): two with samplers, four of 8 to 10 clients, two of 5 and 6.
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


def table(clients: list[int], path: str, target: str, seed: int, samples: int, **columns: Any) -> dict[str, Any]:
    """A table's rows, dealt to clients by these proportions."""
    return {
        "source": {
            "class_path": "flsv.data.TableData",
            "init_args": {"path": f"tables/{path}", "target": target, "val_fraction": 0.4, "columns": columns},
        },
        "splits": {"max_samples": samples, "seed": seed},
        "partitioner": dealt("Size", len(clients), seed, proportions=clients),
        "batch_size": 16,
    }


def catalogue() -> dict[str, Fresh]:
    pooled = own("fresh_federations.Pooled")
    momentum, noise = {"lr": 0.05, "momentum": 0.9}, {"std": 1.5}
    women = table([1, 1, 1, 2, 2, 2, 3, 3, 4, 4], "contraception.csv", "use", 187, 1100,
                  exclude=["woman", "district"], categorical=["livch"])  # fmt: skip
    pupils = table(
        [1, 2, 2, 3, 3, 4], "exam.csv", "normexam", 188, 500, task="regression", exclude=["student", "school"]
    )
    regressor = {
        "class_path": "flsv.models.RegressorClient",
        "init_args": {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.03}}},
    }
    found = [
        Fresh(
            made(
                "three_of_7",
                "digits, three of seven clients a round, 1 to 4 parts, noise",
                14,
                images(
                    "digits",
                    7,
                    90,
                    dealt("Size", 7, 181, proportions=[1, 1, 2, 2, 3, 4, 4]),
                    [spoilt("GaussianNoise", [4], **noise)],
                ),
                classifier("mlp", "SGD", **momentum),
            ),
            lambda: {"sampler": UniformSampler(3)},
        ),
        Fresh(
            made(
                "coins_6",
                "MNIST, about half of six clients a round, wrong labels",
                14,
                images(
                    "mnist",
                    6,
                    90,
                    dealt("Dirichlet", 6, 182, alpha=0.5),
                    [spoilt("ClosedSetLabelNoise", [2], rate=0.6)],
                ),
                classifier(pooled, "SGD", 0.1),
            ),
            lambda: {"sampler": BernoulliSampler(2.5)},
        ),
        Fresh(
            made(
                "momentum_8",
                "digits, SGD with momentum, wrong labels",
                10,
                images(
                    "digits",
                    8,
                    80,
                    dealt("Dirichlet", 8, 183, alpha=0.5),
                    [spoilt("ClosedSetLabelNoise", [1, 6], rate=0.5)],
                ),
                classifier("mlp", "SGD", **momentum),
            )
        ),
        Fresh(
            made(
                "fashion_8",
                "Fashion-MNIST, 1 to 4 parts, noise",
                10,
                images(
                    "fashion_mnist",
                    8,
                    70,
                    dealt("Size", 8, 184, proportions=[1, 1, 2, 2, 3, 3, 4, 4]),
                    [spoilt("GaussianNoise", [3, 5], **noise)],
                ),
                classifier(pooled, "SGD", 0.1),
            )
        ),
        Fresh(
            made(
                "adam_9",
                "digits, Adam, few classes a client",
                8,
                images("digits", 9, 70, dealt("Dirichlet", 9, 185, alpha=0.3)),
                classifier("mlp", "Adam", 0.01),
            )
        ),
        Fresh(
            made(
                "women_10",
                "contraception in Bangladesh, 1 to 4 parts",
                8,
                women,
                classifier("mlp", "SGD", **momentum),
                needs=["tables/contraception.csv"],
            )
        ),
        Fresh(
            made(
                "dropout_5",
                "Fashion-MNIST, dropout, few classes a client",
                10,
                images("fashion_mnist", 5, 100, dealt("Dirichlet", 5, 186, alpha=0.3)),
                classifier(own("fresh_federations.Pooled", dropout=0.3), "SGD", 0.1),
            )
        ),
        Fresh(
            made(
                "pupils_6",
                "exam scores in inner London, 1 to 4 parts, regression",
                12,
                pupils,
                regressor,
                performance="val_loss",
                mode="min",
                needs=["tables/exam.csv"],
            )
        ),
    ]
    return {each.federation.name: each for each in found}
