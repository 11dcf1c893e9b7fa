"""pFedSV's figures 8-10 (Wu et al., IEEE TMC 2024): what its rounds cost, on three networks, by counting.

    python tools/pfedsv_communication.py

``tables/pfedsv.yaml`` prints the same from the downloads that it measured; alone, this takes clients who know at the
first look whether a model is relevant, in the paper's setting of 10 clients with 2 of 10 classes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
import torchvision.models
from torch import Generator, Tensor, nn

from flsv.errors import ConfigurationError
from flsv.functional import label_overlap, top_k_download
from flsv.functional.communication import Explore
from flsv.models import LeNet5

Method = Literal["pfedsv", "pfedsv_d", "pfedsv_dc", "fedfomo", "fedamp", "fedavg"]

# Title, network, classes, and the layers that are its classifier. What the paper calls so is the last linear layer in
# ResNet-34 (2.35 %, the paper says 2.3 %), and must be all fully connected layers in VGG-19, where it says 89.74 %:
# torchvision's has 86.06 % there. Its 49.57 % of LeNet-5 are not those of any split by layers of the usual one: for
# (1, 28, 28) it is 94.2 % in all linear layers, 24.8 % in the last two and 1.9 % in the last.
NETWORKS = (
    ("LeNet-5", "lenet5", 10, ["classifier.4"]),
    ("LeNet-5, all linear layers personal", "lenet5", 10, ["classifier"]),
    ("ResNet-34", "resnet34", 1000, ["fc"]),
    ("VGG-19", "vgg19", 1000, ["classifier"]),
)
METHODS = {
    "pfedsv_dc": "pFedSV (D+C)",
    "pfedsv_d": "pFedSV (D)",
    "pfedsv": "pFedSV, k fixed",
    "fedfomo": "FedFomo",
    "fedamp": "FedAMP",
    "fedavg": "FedAvg",
}
# "Classifier-related parameters" in the paper, %.
PAPER_SHARE = {"LeNet-5": 49.57, "ResNet-34": 2.3, "VGG-19": 89.74}


def sizes(name: str, classes: int, layers: list[str]) -> tuple[int, int]:
    """Parameters of the network, and of its classifier."""
    with torch.device("meta"):
        network = LeNet5() if name == "lenet5" else torchvision.models.get_model(name, num_classes=classes)
    return classifier_size(network, layers)


def classifier_size(module: nn.Module, layers: Sequence[str]) -> tuple[int, int]:
    """Parameters of a module and of those of its layers that make up the classifier.

    Args:
        module: the network.
        layers: names of layers as in ``module.named_modules()``.

    Returns:
        (all, the classifier's).

    Raises:
        ConfigurationError: there is no layer of that name, or it has no parameters.
    """
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    missing = [layer for layer in layers if not any(name.startswith(f"{layer}.") for name in sizes)]
    if missing or not layers:
        raise ConfigurationError(
            f"classifier layers {list(layers)}: {missing} are no layers with parameters. There are "
            f"{sorted({name.rpartition('.')[0] for name in sizes})}."
        )
    prefixes = tuple(f"{layer}." for layer in layers)
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name.startswith(prefixes))


def communication_parameters(
    method: Method, size: int, classifier: int, downloads: Tensor, k: int = 5
) -> tuple[Tensor, Tensor]:
    """Parameters that every client sends and receives in every round.

    Every method sends a model up. Down come, of models of P parameters with C of them in the classifier: ``"pfedsv"``
    and ``"fedfomo"``: k P; ``"pfedsv_d"``, with the dynamic top-k: k_t P; ``"pfedsv_dc"``, with a common extractor too:
    (P - C) + k_t C; ``"fedamp"`` and ``"fedavg"``: P.

    Args:
        method: which.
        size: P.
        classifier: C.
        downloads: ``[T, n]`` models that each client downloads in each round (k_t, of :func:`download_schedule`).
        k: models that a client downloads where their number does not change. FedFomo downloads as many as it is told;
            the paper does not say how many that was.

    Returns:
        up and down, int64 ``[T, n]`` each.

    Raises:
        ConfigurationError: an unknown method, or sizes out of range.
    """
    if method not in get_args(Method):
        raise ConfigurationError(f"method={method!r}: expected one of {get_args(Method)}.")
    if not 0 <= classifier <= size or k < 0:
        raise ConfigurationError(
            f"communication_parameters(size={size}, classifier={classifier}, k={k}): expected 0 <= classifier <= size "
            "and k not below 0."
        )
    downloads = downloads.long()
    whole = torch.full_like(downloads, size)
    down = {
        "pfedsv": k * whole,
        "pfedsv_d": downloads * size,
        "pfedsv_dc": (size - classifier) + downloads * classifier,
        "fedfomo": k * whole,
        "fedamp": whole,
        "fedavg": whole,
    }
    return whole, down[method]


def download_schedule(
    truth: Tensor, rounds: int, k: int = 5, explore: Explore = "score", generator: Generator | None = None
) -> Tensor:
    """How many models every client downloads in every round if a look at a model tells at once whether it is relevant.

    All clients take part in every round, and follow :func:`flsv.functional.top_k_download`.

    Args:
        truth: ``[n, n]``, above 0 where column's client is relevant to row's.
        rounds: T.
        k: downloads to start with.
        explore: as there.
        generator: of the order in which clients are looked at.

    Returns:
        int64 ``[T, n]``.
    """
    n = len(truth)
    scores, available = torch.full((n, n), float("nan")), torch.ones(n, dtype=torch.bool)
    counts = torch.zeros(rounds, n, dtype=torch.long)
    for t in range(rounds):
        for client in range(n):
            ids = top_k_download(scores[client], available, client, k, explore, generator)
            counts[t, client] = len(ids)
            scores[client, ids] = torch.where(truth[client, ids].cpu() > 0, 1.0, -1.0)
    return counts


def report(downloads: Tensor, k: int = 5) -> str:
    """Millions of parameters that a client sends and receives in all rounds, on average, in Markdown.

    Args:
        downloads: ``[T, n]``, models (or classifiers) of others that every client downloads in every round.
        k: downloads of FedFomo, and of pFedSV if k does not fall.
    """
    head = ["", "parameters", "classifier, %", "paper, %", *METHODS.values(), "D+C / FedAvg"]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for title, name, classes, layers in NETWORKS:
        size, classifier = sizes(name, classes, layers)
        totals = {}
        for method in METHODS:
            up, down = communication_parameters(method, size, classifier, downloads, k)  # type: ignore[arg-type]
            totals[method] = float((up + down).double().mean(1).sum())
        share = f"{PAPER_SHARE[title]:.2f}" if title in PAPER_SHARE else "-"
        cells = [title, f"{size:,}", f"{100 * classifier / size:.2f}", share]
        cells += [f"{total / 1e6:,.2f}" for total in totals.values()]
        lines.append("| " + " | ".join([*cells, f"{totals['pfedsv_dc'] / totals['fedavg']:.2f}"]) + " |")
    return "\n".join(lines)


def idealised(rounds: int = 20, k: int = 5) -> Tensor:
    """``[T, n]``: downloads of 10 clients on a ring, each of whose two classes it shares with a neighbor."""
    counts = torch.eye(10) + torch.eye(10).roll(1, 1)
    return download_schedule(label_overlap(counts), rounds, k, generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    print(report(idealised()))
