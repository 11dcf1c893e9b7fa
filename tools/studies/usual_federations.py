"""Thirty small federations as people train them: by Adam, with normalization, transformers, frozen features.

They were written down before any of them was trained. Data are those of ``$FLSV_DATA_ROOT`` and scikit-learn's.
"""

from __future__ import annotations

import csv
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from federation_sources import (
    IMAGES,
    ROOT,
    ConvFeatures,
    by_dirichlet,
    frozen_features,
    lesions,
    source,
)
from torch import Tensor, nn

#: Words of a text, and different words that are known.
WORDS = 40
VOCABULARY = 800
#: Labels of texts, in their order.
TOPICS = ("earn", "acq", "crude", "trade", "money-fx", "interest")


@dataclass(frozen=True)
class UsualFederation:
    """One federation: its data, how they are dealt, what is wrong with them, and how it is trained."""

    data: str
    # one class, dir ALPHA, sizes, iid
    split: str
    network: str
    optimizer: str
    lr: float
    num_clients: int = 4
    num_classes: int = 10
    rounds: int = 8
    # Of all clients together.
    samples: int = 600
    validation: int = 300
    batch: int = 16
    performance: str = "accuracy"
    # liars, drift, twins
    wrong: str = ""


#: Clients with one class each.
ONE_CLASS = {
    "mnist_frozen": UsualFederation(
        "mnist",
        "one class",
        network="frozen",
        optimizer="sgd",
        lr=0.1,
        num_classes=4,
    ),
    "fashion_frozen": UsualFederation(
        "fashion",
        "one class",
        network="frozen",
        optimizer="adam",
        lr=0.003,
        num_clients=5,
        num_classes=5,
    ),
    "mnist_batchnorm": UsualFederation(
        "mnist",
        "one class",
        network="conv batch",
        optimizer="momentum",
        lr=0.02,
        num_classes=4,
        rounds=12,
    ),
    "digits_batchnorm": UsualFederation(
        "digits",
        "one class",
        network="mlp batch",
        optimizer="adam",
        lr=0.003,
        num_clients=5,
        num_classes=5,
        rounds=10,
    ),
    "lesions_groupnorm": UsualFederation(
        "lesions",
        "one class",
        network="conv group",
        optimizer="adam",
        lr=0.003,
        num_classes=4,
        rounds=12,
        performance="balanced_accuracy",
    ),
    "fashion_groupnorm": UsualFederation(
        "fashion",
        "one class",
        network="conv group",
        optimizer="sgd",
        lr=0.05,
        num_classes=4,
        rounds=12,
    ),
    "topics_text": UsualFederation(
        "topics",
        "one class",
        network="text conv",
        optimizer="adamw",
        lr=0.003,
        num_classes=4,
        rounds=10,
    ),
    "digits_transformer": UsualFederation(
        "digits",
        "one class",
        network="transformer",
        optimizer="adam",
        lr=0.003,
        num_classes=4,
        rounds=12,
    ),
}
#: Other clients.
MIXED_CLASSES = {
    "digits_adam": UsualFederation(
        "digits",
        "dir 0.5",
        network="mlp",
        optimizer="adam",
        lr=0.003,
    ),
    "fashion_adamw": UsualFederation(
        "fashion",
        "dir 0.3",
        network="mlp",
        optimizer="adamw",
        lr=0.003,
        num_clients=5,
    ),
    "mnist_momentum": UsualFederation(
        "mnist",
        "dir 0.3",
        network="mlp",
        optimizer="momentum",
        lr=0.02,
        num_clients=5,
    ),
    "wine_momentum": UsualFederation(
        "wine",
        "dir 1",
        network="mlp",
        optimizer="momentum",
        lr=0.02,
        num_classes=3,
        samples=100,
        validation=70,
        batch=8,
    ),
    "cifar_batchnorm": UsualFederation(
        "cifar",
        "dir 0.5",
        network="conv batch",
        optimizer="momentum",
        lr=0.03,
        num_classes=4,
        rounds=10,
        samples=800,
    ),
    "fashion_batchnorm": UsualFederation(
        "fashion",
        "dir 0.3",
        network="conv batch",
        optimizer="adam",
        lr=0.003,
    ),
    "mnist_groupnorm": UsualFederation(
        "mnist",
        "dir 0.5",
        network="conv group",
        optimizer="adam",
        lr=0.003,
        rounds=10,
    ),
    "lesions_groupnorm_sizes": UsualFederation(
        "lesions",
        "dir 0.5",
        network="conv group",
        optimizer="momentum",
        lr=0.03,
        num_classes=4,
        rounds=10,
        performance="balanced_accuracy",
    ),
    "digits_layernorm_sizes": UsualFederation(
        "digits",
        "sizes",
        network="mlp layer",
        optimizer="adamw",
        lr=0.003,
        num_clients=5,
        samples=820,
    ),
    "fashion_sizes": UsualFederation(
        "fashion",
        "sizes",
        network="mlp batch",
        optimizer="adam",
        lr=0.003,
        num_clients=5,
        samples=820,
    ),
    "mnist_transformer": UsualFederation(
        "mnist",
        "dir 0.5",
        network="transformer",
        optimizer="adam",
        lr=0.003,
        rounds=10,
    ),
    "digits_transformer_sizes": UsualFederation(
        "digits",
        "sizes",
        network="transformer",
        optimizer="adamw",
        lr=0.003,
        rounds=10,
    ),
    "topics_transformer": UsualFederation(
        "topics",
        "dir 0.5",
        network="text transformer",
        optimizer="adamw",
        lr=0.003,
        num_classes=6,
        rounds=10,
    ),
    "topics_text_conv": UsualFederation(
        "topics",
        "dir 0.3",
        network="text conv",
        optimizer="adam",
        lr=0.003,
        num_clients=5,
        num_classes=6,
    ),
    "lesions_frozen": UsualFederation(
        "lesions",
        "dir 0.5",
        network="frozen",
        optimizer="adam",
        lr=0.003,
        num_classes=4,
        performance="balanced_accuracy",
    ),
    "mnist_frozen_loss": UsualFederation(
        "mnist",
        "dir 0.5",
        network="frozen",
        optimizer="sgd",
        lr=0.1,
        num_clients=5,
        performance="negative_loss",
    ),
    "digits_liars": UsualFederation(
        "digits",
        "iid",
        network="mlp layer",
        optimizer="adam",
        lr=0.003,
        wrong="liars",
    ),
    "fashion_liars": UsualFederation(
        "fashion",
        "dir 1",
        network="conv group",
        optimizer="adamw",
        lr=0.003,
        rounds=10,
        wrong="liars",
    ),
    "mnist_drift": UsualFederation(
        "mnist",
        "iid",
        network="conv batch",
        optimizer="adam",
        lr=0.003,
        wrong="drift",
    ),
    "fashion_drift": UsualFederation(
        "fashion",
        "dir 1",
        network="mlp",
        optimizer="momentum",
        lr=0.02,
        num_clients=5,
        wrong="drift",
    ),
    "women_adam": UsualFederation(
        "contraception",
        "dir 1",
        network="mlp",
        optimizer="adam",
        lr=0.003,
        num_classes=2,
        samples=800,
        performance="balanced_accuracy",
    ),
    "lungs_twins": UsualFederation(
        "pneumoniamnist",
        "dir 0.5",
        network="conv batch",
        optimizer="adamw",
        lr=0.003,
        num_classes=2,
        performance="balanced_accuracy",
        wrong="twins",
    ),
}
FEDERATIONS = {f"one_class_{name}": ONE_CLASS[name] for name in ONE_CLASS}
FEDERATIONS |= MIXED_CLASSES


@dataclass(frozen=True)
class Dealt:
    """Samples and labels of each client and of the server's validation set."""

    clients: list[tuple[Tensor, Tensor]]
    validation: tuple[Tensor, Tensor]


@cache
def topics() -> tuple[Tensor, Tensor]:
    """Numbers of the first words ``[N, WORDS]`` of news, 0 for rare ones, and their topics."""
    path = ROOT / "text/reuters_r8_train.csv"
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["label"] in TOPICS]
    texts = []
    for row in rows:
        words = re.findall("[a-z]+", row["text"])
        texts.append(words[:WORDS])
    counts = Counter(itertools.chain(*texts))
    frequent = counts.most_common(VOCABULARY - 1)
    vocabulary = ["", *(word for word, _ in frequent)]
    word_numbers = {word: number for number, word in enumerate(vocabulary)}

    samples = torch.zeros(len(texts), WORDS, dtype=torch.long)
    for row, text in enumerate(texts):
        numbers = [word_numbers.get(word, 0) for word in text]
        samples[row, : len(text)] = torch.tensor(numbers)
    labels = [TOPICS.index(row["label"]) for row in rows]
    return samples, torch.tensor(labels)


def samples_and_labels(federation: UsualFederation) -> tuple[Tensor, Tensor]:
    """All samples of a federation's classes."""
    if federation.data == "topics":
        samples, labels = topics()
    elif federation.data == "lesions":
        samples, labels = lesions()
    else:
        samples, labels, _ = source(federation.data, federation.num_classes)
    of_classes = labels < federation.num_classes
    return samples[of_classes], labels[of_classes]


def balanced_rows(labels: Tensor, draw: np.random.Generator) -> np.ndarray:
    """Row numbers in a random order, in which no class has more than twice the rows of the median class."""
    counts = labels.bincount().double()
    limit = int(2 * counts.median())
    rows = []
    for label in range(len(counts)):
        of_class = np.flatnonzero(labels.numpy() == label)
        rows.append(draw.permutation(of_class)[:limit])
    return draw.permutation(np.concatenate(rows))


def deal(
    federation: UsualFederation, labels: np.ndarray, draw: np.random.Generator
) -> list[np.ndarray]:
    """Places of each client's samples in ``labels``."""
    how, _, number = federation.split.partition(" ")
    num_clients = federation.num_clients
    if how == "one":
        parts = []
        for label in range(num_clients):
            of_class = np.flatnonzero(labels == label)
            size = int(len(of_class) * draw.uniform(0.4, 1))
            parts.append(of_class[:size])
        return parts
    if how == "sizes":  # from 1 to 50
        totals = np.geomspace(1, 50, num_clients).cumsum()
        borders = totals[:-1] / totals[-1] * len(labels)
        return np.split(np.arange(len(labels)), borders.astype(int))
    if how == "dir":
        return by_dirichlet(np.arange(len(labels)), labels, num_clients, float(number), draw)
    return np.array_split(np.arange(len(labels)), num_clients)


@cache
def dealt(name: str) -> Dealt:
    """The samples of a federation."""
    federation = FEDERATIONS[name]
    draw = np.random.default_rng(sum(map(ord, name)))
    samples, labels = samples_and_labels(federation)
    rows = balanced_rows(labels, draw)
    held_out = rows[: federation.validation]
    training = rows[federation.validation :][: federation.samples]
    parts = deal(federation, labels[training].numpy(), draw)

    clients = []
    for client, part in enumerate(parts):
        if len(part) % federation.batch == 1:  # batch normalization needs two samples
            part = part[:-1]
        client_rows = training[part]
        client_samples, client_labels = samples[client_rows], labels[client_rows].clone()
        if federation.wrong == "liars" and client < 2:
            lies = torch.tensor(draw.random(len(part)) < (0.8, 0.4)[client])
            random_labels = draw.integers(0, federation.num_classes, int(lies.sum()))
            client_labels[lies] = torch.tensor(random_labels)
        if federation.wrong == "drift":  # ever paler, the last nearly the negative
            paler = 0.8 * client / (federation.num_clients - 1)
            client_samples = (1 - paler) * client_samples + paler * (1 - client_samples)
        clients.append((client_samples, client_labels))
    if federation.wrong == "twins":
        clients[1] = clients[0]
    return Dealt(clients, (samples[held_out], labels[held_out]))


class Transformer(nn.Module):
    """One layer of attention over the rows of an image or the words of a text."""

    def __init__(self, tokens: nn.Module, length: int, num_classes: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.places = nn.Parameter(0.1 * torch.randn(length, 24))
        self.layer = nn.TransformerEncoderLayer(24, 2, 48, dropout=0, batch_first=True)
        self.head = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.layer(self.tokens(x) + self.places)
        return self.head(features.mean(1))


class TextConv(nn.Module):
    """A convolution over the words of a text, and each channel's largest output."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 24)
        self.conv = nn.Conv1d(24, 32, 3)
        self.head = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        channels = self.conv(self.embed(x).mT).relu()
        return self.head(channels.amax(2))


NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "": lambda width: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "group": partial(nn.GroupNorm, 4),
}
ROW_NORMS: Mapping[str, Callable[[int], nn.Module]] = {
    "": lambda width: nn.Identity(),
    "batch": nn.BatchNorm1d,
    "layer": nn.LayerNorm,
}


class Frozen(nn.Module):
    """Frozen features, whose statistics are frozen, too, and a layer that is trained."""

    def __init__(self, data: str, num_classes: int) -> None:
        super().__init__()
        colors, side = IMAGES[data]
        self.features = ConvFeatures(colors, side, nn.BatchNorm2d)
        self.features.load_state_dict(frozen_features(data))
        self.features.requires_grad_(False)
        self.head = nn.Linear(64, num_classes)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.features.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def network(federation: UsualFederation, samples: Tensor) -> nn.Module:
    """A new network of a federation."""
    kind, _, norm = federation.network.partition(" ")
    num_classes = federation.num_classes
    if kind == "frozen":
        return Frozen(federation.data, num_classes)
    if kind == "text" and norm == "conv":
        return TextConv(num_classes)
    if kind == "text":
        return Transformer(nn.Embedding(VOCABULARY, 24), WORDS, num_classes)
    if kind == "transformer":
        side = IMAGES[federation.data][1]
        tokens = nn.Sequential(nn.Unflatten(1, (side, side)), nn.Linear(side, 24))
        return Transformer(tokens, side, num_classes)
    if kind == "conv":
        features = ConvFeatures(*IMAGES[federation.data], NORMS[norm])
        return nn.Sequential(features, nn.Linear(64, num_classes))
    width = samples.shape[1]
    return nn.Sequential(
        nn.Linear(width, 32), ROW_NORMS[norm](32), nn.ReLU(), nn.Linear(32, num_classes)
    )


class UsualModule(L.LightningModule):
    """A classifier, trained by cross-entropy."""

    def __init__(self, federation: UsualFederation, samples: Tensor) -> None:
        super().__init__()
        self.federation = federation
        self.network = network(federation, samples)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self, batch: Any, batch_index: int) -> Tensor:
        samples, labels = batch
        return F.cross_entropy(self(samples), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        lr = self.federation.lr
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.federation.optimizer == "adam":
            return torch.optim.Adam(trained, lr)
        if self.federation.optimizer == "adamw":
            return torch.optim.AdamW(trained, lr)
        momentum = 0.9 if self.federation.optimizer == "momentum" else 0
        return torch.optim.SGD(trained, lr, momentum=momentum)
