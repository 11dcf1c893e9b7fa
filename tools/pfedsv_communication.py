"""pFedSV's figures 8-10 (Wu et al., IEEE TMC 2024): what its rounds cost, on three networks, by counting.

    python tools/pfedsv_communication.py

``tables/pfedsv.yaml`` prints the same from the downloads that it measured; alone, this takes clients who know at the
first look whether a model is relevant, in the paper's setting of 10 clients with 2 of 10 classes each.
"""

from __future__ import annotations

import torch
import torchvision.models
from torch import Tensor

from flsv.functional import classifier_size, communication_parameters, download_schedule, label_overlap
from flsv.models import LeNet5

# Title, network, classes, and the layers that are its classifier. Why these: flsv.functional.communication.
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
    """``[T, n]``: downloads of 10 clients on a ring, each of whose two classes it shares with a neighbour."""
    counts = torch.eye(10) + torch.eye(10).roll(1, 1)
    return download_schedule(label_overlap(counts), rounds, k, generator=torch.Generator().manual_seed(0))


if __name__ == "__main__":
    print(report(idealised()))
