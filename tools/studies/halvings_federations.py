"""Twenty-two federations: of clients with one or two classes each on frozen features, and of seven or eight clients.

They were written down, for a study of halvings, before any of them was trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from federation_sources import by_dirichlet, source
from torch import Tensor, nn
from usual_federations import Dealt


@dataclass(frozen=True)
class HalvingsFederation:
    """One federation: its data, how they are dealt, what is wrong with them, and how it is trained."""

    data: str
    num_clients: int
    # iid, sizes, dir ALPHA, groups, few CLASSES PER CLIENT
    split: str
    # soft, mlp WIDTH
    model: str = "mlp 32"
    rounds: int = 10
    lr: float = 0.1
    # Of all clients together.
    samples: int = 1000
    validation: int = 300
    epochs: int = 1
    batch: int = 16
    performance: str = "accuracy"
    # labels
    wrong: str = ""
    # Principal components in place of pixels.
    components: int = 0
    classes: int = 10


#: Clients with one or two classes each, unequal sizes, frozen features. For the doubt about halvings.
FEW_CLASSES = {
    "few_mnist_1_5": HalvingsFederation(
        "mnist_frozen",
        5,
        "few 1",
        "soft",
        10,
        0.1,
        classes=5,
    ),
    "few_mnist_1_6": HalvingsFederation(
        "mnist_frozen",
        6,
        "few 1",
        "soft",
        20,
        0.05,
        classes=6,
    ),
    "few_mnist_2_7": HalvingsFederation(
        "mnist_frozen",
        7,
        "few 2",
        "soft",
        10,
        0.1,
        classes=7,
    ),
    "few_mnist_2_8": HalvingsFederation("mnist_frozen", 8, "few 2", "soft", 15, 0.1),
    "few_fashion_1_5": HalvingsFederation(
        "fashion_frozen",
        5,
        "few 1",
        "soft",
        15,
        0.1,
        classes=5,
    ),
    "few_fashion_1_7": HalvingsFederation(
        "fashion_frozen",
        7,
        "few 1",
        "soft",
        12,
        0.2,
        classes=7,
    ),
    "few_fashion_1_8": HalvingsFederation(
        "fashion_frozen",
        8,
        "few 1",
        "soft",
        20,
        0.1,
        classes=8,
    ),
    "few_fashion_2_5": HalvingsFederation("fashion_frozen", 5, "few 2", "soft", 10, 0.1),
    "few_fashion_2_6": HalvingsFederation(
        "fashion_frozen",
        6,
        "few 2",
        "soft",
        15,
        0.05,
        epochs=2,
    ),
    "few_lesions_1_6": HalvingsFederation(
        "lesions_frozen", 6, "few 1", "soft", 15, 0.05, performance="balanced_accuracy", classes=4
    ),
    "few_lesions_2_5": HalvingsFederation(
        "lesions_frozen", 5, "few 2", "soft", 15, 0.05, performance="balanced_accuracy", classes=4
    ),
    "few_mnist_1_8": HalvingsFederation(
        "mnist_frozen",
        8,
        "few 1",
        "mlp 16",
        12,
        0.1,
        classes=8,
    ),
}
#: Seven and eight clients, for the other doubt.
SEVEN_OR_EIGHT = {
    "eight_digits_dir": HalvingsFederation("digits", 8, "dir 0.5", "mlp 24", 12),
    "seven_digits_labels": HalvingsFederation(
        "digits",
        7,
        "dir 1",
        "mlp 24",
        12,
        wrong="labels",
    ),
    "eight_mnist_dir": HalvingsFederation("mnist", 8, "dir 0.3", "mlp 24", 8),
    "seven_mnist_sizes": HalvingsFederation("mnist", 7, "sizes", "mlp 24", 10),
    "seven_fashion_dir": HalvingsFederation("fashion", 7, "dir 0.5", "mlp 24", 10),
    "eight_fashion_labels": HalvingsFederation(
        "fashion",
        8,
        "iid",
        "soft",
        10,
        wrong="labels",
    ),
    "eight_blobs_dir": HalvingsFederation(
        "blobs",
        8,
        "dir 1",
        "mlp 24",
        10,
        samples=1200,
    ),
    "seven_lesions_dir": HalvingsFederation(
        "ham10000_28",
        7,
        "dir 0.5",
        "mlp 12",
        10,
        0.3,
        performance="balanced_accuracy",
        components=24,
    ),
    "eight_women": HalvingsFederation(
        "contraception", 8, "groups", "mlp 16", 12, samples=1200, performance="balanced_accuracy"
    ),
    "seven_mnist_disjoint": HalvingsFederation(
        "mnist",
        7,
        "few 1",
        "mlp 24",
        10,
        classes=7,
    ),
}

FEDERATIONS = FEW_CLASSES | SEVEN_OR_EIGHT


def deal(
    federation: HalvingsFederation,
    labels: Tensor,
    groups: Tensor,
    draw: np.random.Generator,
) -> list[np.ndarray]:
    """Rows of each client."""
    how, _, number = federation.split.partition(" ")
    num_clients = federation.num_clients
    rows = draw.permutation(len(labels))
    labels_of_rows = labels.numpy()[rows]
    if how == "sizes":
        sizes = [1.5**client for client in range(num_clients)]
        ends_of_parts = np.array(sizes).cumsum()
        borders = ends_of_parts[:-1] / ends_of_parts[-1] * len(labels)
        return np.split(rows, borders.astype(int))
    if how == "groups":
        _, group_numbers = np.unique(groups.numpy(), return_inverse=True)
        order = draw.permutation(group_numbers.max() + 1)
        clients = order[group_numbers] % num_clients
        return [np.flatnonzero(clients == client) for client in range(num_clients)]
    if how == "few":
        return few_classes(rows, labels_of_rows, num_clients, int(number), draw)
    if how == "dir":
        return by_dirichlet(rows, labels_of_rows, num_clients, float(number), draw)
    return np.array_split(rows, num_clients)


def few_classes(
    rows: np.ndarray,
    labels: np.ndarray,
    num_clients: int,
    per_client: int,
    draw: np.random.Generator,
) -> list[np.ndarray]:
    """Rows of clients with this many classes each, in turn. A client has 30 to 100 % of its part of each."""
    num_classes = int(labels.max()) + 1
    order = draw.permutation(num_classes)
    numbers = np.arange(num_clients * per_client) % num_classes
    classes = order[numbers].reshape(num_clients, per_client)
    parts: list[list[int]] = [[] for _ in range(num_clients)]
    for label in range(num_classes):
        holders = np.flatnonzero((classes == label).any(1))
        if not len(holders):
            continue
        rows_of_class = rows[labels == label]
        parts_of_class = np.array_split(rows_of_class, len(holders))
        for holder, part in zip(holders, parts_of_class):
            size = int(len(part) * draw.uniform(0.3, 1))
            parts[holder] += part[:size].tolist()
    return [np.array(part) for part in parts]


@cache
def dealt(name: str) -> Dealt:
    """The samples of a federation."""
    federation = FEDERATIONS[name]
    draw = np.random.default_rng(sum(map(ord, name)))
    samples, labels, groups = source(federation.data, federation.classes)
    if federation.components:
        samples = samples - samples.mean(0)
        directions = torch.linalg.svd(samples[:3000], full_matrices=False)[2]
        samples = samples @ directions[: federation.components].T
        samples = samples / samples.std()
    rows = draw.permutation(len(labels))
    num_held_out = federation.validation
    held_out = rows[:num_held_out]
    training = rows[num_held_out:-num_held_out][: federation.samples]
    parts = deal(federation, labels[training], groups[training], draw)
    clients = [(samples[training[part]], labels[training[part]].clone()) for part in parts]
    if federation.wrong == "labels":
        num_classes = int(labels.max()) + 1
        num_liars = max(2, federation.num_clients // 4)
        liars = draw.permutation(federation.num_clients)[:num_liars]
        for client, fraction in zip(liars, (0.6, 0.3, 0.8)):
            _, labels_of_client = clients[client]
            lies = torch.tensor(draw.random(len(labels_of_client)) < fraction)
            random_labels = draw.integers(0, num_classes, int(lies.sum()))
            labels_of_client[lies] = torch.tensor(random_labels)
    return Dealt(clients, (samples[held_out], labels[held_out]))


class HalvingsModule(L.LightningModule):
    """A classifier, trained by cross-entropy."""

    def __init__(self, federation: HalvingsFederation, samples: Tensor) -> None:
        super().__init__()
        self.lr = federation.lr
        num_features = samples.shape[1]
        _, labels, _ = source(federation.data, federation.classes)
        num_classes = int(labels.max()) + 1
        kind, _, width = federation.model.partition(" ")
        if kind == "soft":
            self.network: nn.Module = nn.Linear(num_features, num_classes)
        else:
            self.network = nn.Sequential(
                nn.Linear(num_features, int(width)),
                nn.ReLU(),
                nn.Linear(int(width), num_classes),
            )

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        samples, labels = batch
        return F.cross_entropy(self(samples), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.lr)
