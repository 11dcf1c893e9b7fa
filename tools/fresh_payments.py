"""How much of a payment goes to the wrong clients, on twelve federations that were made after every choice.

    python tools/fresh_payments.py train [NAME...] [--truths 6] [--folder runs/fresh_payments]
    python tools/fresh_payments.py cost [NAME...]
    python tools/fresh_payments.py table

`train` fits each federation as a user does, by a FederatedLoop with ShadowShapley, keeps what its coalitions came to,
and goes on where it was stopped; `table` is arithmetic on that, and is looked at once. Three seeds are runs, and
together `flsv retrain`; the others are the truth: all coalitions of up to ten clients, of more those along circles of
the clients (`flsv.benchmark.truth`). `cost` measures ShadowShapley in fits without metrics, on one thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import be_quiet
from torch import Tensor, nn

from flsv import FederatedLoop, Reporting
from flsv.aggregation import FedAdam, FedAvgM, ShapFedWA
from flsv.benchmark import Federation
from flsv.benchmark.federation import quiet
from flsv.benchmark.truth import arcs
from flsv.functional import few_coalitions
from flsv.functional.shapley.game import all_coalitions
from flsv.metrics import ClassSpecificShapley, ShadowShapley
from flsv.sampling import UniformSampler
from flsv.seeding import isolated_rngs

RUNS, TRUTH, MOST = (0, 1, 2), 100, 10
#: The default's coalitions of more than seven clients in 1.0.0 and now.
BEFORE, NOW = "pairs+leave-one-out", "pairs+leave-one-out"
SIZES = {9: "4 to 9", 12: "10 to 12", 99: "20"}


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
    here = "fresh_payments"
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


class Game(ShadowShapley):
    """ShadowShapley that keeps the last game."""

    def _share_out(self, masks: Tensor, utilities: Tensor) -> None:
        self.game = masks, utilities.double().cpu().flatten()


def fit(each: Fresh, seed: int, metrics: dict[str, Any], **changes: Any) -> None:
    arguments = {**each.loop(), **changes}
    arguments["metrics"] = {**arguments.get("metrics", {}), **metrics}
    with isolated_rngs(seed, "fresh"), quiet():
        loop = FederatedLoop(seed=seed, reporting=Reporting(table=False, figures=0, files=False), **arguments)
        each.federation.trainer(loop).fit(each.federation.module(), each.federation.datamodule())


def play(each: Fresh, seed: int, masks: Tensor, **changes: Any) -> dict[str, Tensor]:
    """What coalitions come to with a seed, by ShadowShapley."""
    of, members = each.federation, [mask.nonzero().flatten().tolist() for mask in masks]
    measure = {"performance": of.performance, "mode": of.mode}
    metric = Game(coalitions=[some for some in members if 0 < len(some) < masks.shape[1]], every=of.rounds, **measure)
    fit(each, seed, {"value": metric}, **changes)
    masks, utilities = metric.game
    return {"masks": masks, "utilities": utilities}


def coalitions_of(each: Federation, seed: int) -> Tensor:
    clients = len(each.num_samples)
    if clients <= MOST:
        return all_coalitions(clients)
    return arcs(clients, seed, each.circles) if seed >= TRUTH else few_coalitions(clients, "pairs+leave-two-out")


def train(wanted: Sequence[Fresh], folder: Path, truths: int) -> None:
    """All federations' coalitions, seed after seed."""
    for seed in (*RUNS, *range(TRUTH, TRUTH + truths)):
        for each in wanted:
            everybody = (
                {"all": {"sampler": None}} if "sampler" in each.loop() and seed in RUNS else {}
            )  # flsv retrain's
            for kind, changes in {"run": {}, **everybody}.items():
                path, began = folder / each.federation.name / f"{kind}_{seed}.pt", time.process_time()
                path.parent.mkdir(parents=True, exist_ok=True)
                if not path.exists():
                    torch.save(play(each, seed, coalitions_of(each.federation, seed), **changes), path)
                    print(f"{path.parent.name}: {path.stem}, {time.process_time() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "cost", "table"))
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--truths", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("runs/fresh_payments"))
    options = parser.parse_args()
    be_quiet()
    known = catalogue()
    wanted = [known[name] for name in options.names or known]
    if options.what == "train":
        train(wanted, options.folder, options.truths)


if __name__ == "__main__":
    main()
