"""Data of the federations of ``at_once.py``, of ``$FLSV_DATA_ROOT`` and scikit-learn, and how they are dealt."""

from __future__ import annotations

import os
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from sklearn import datasets
from torch import Tensor, nn
from torchvision.datasets import MNIST, FashionMNIST

ROOT = Path(os.environ.get("FLSV_DATA_ROOT", "."))


@cache
def source(name: str, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``[N, ...]``, targets and groups ``[N]`` of a data set, of classification of the first classes."""
    groups: Any = None
    if name in ("exam", "contraception"):
        samples, targets, groups = table_of_people(name)
    elif name.endswith("_frozen"):
        samples, targets = features_and_labels(name.removesuffix("_frozen"))
    elif name in ("mnist", "fashion", "cifar", "ham10000_28", "pneumoniamnist"):
        samples, targets = images_and_labels(name)
    else:
        samples, targets = from_scikit_learn(name)
    samples = torch.as_tensor(samples).float()
    targets = torch.as_tensor(targets)
    if groups is None:
        groups = torch.zeros(len(targets))
    groups = torch.as_tensor(groups)
    if targets.is_floating_point():
        return samples, targets.float(), groups
    targets = targets.long()
    is_included = targets < classes
    samples = samples[is_included]
    targets = targets[is_included]
    return samples, targets, groups[is_included]


def from_scikit_learn(name: str) -> tuple[Any, Any]:
    """Features and targets of a data set of scikit-learn."""
    if name == "blobs":
        return datasets.make_classification(
            2500,
            20,
            n_informative=8,
            n_classes=4,
            random_state=5,
        )
    load = getattr(datasets, f"load_{name}")
    samples, targets = load(return_X_y=True)
    if name == "digits":
        return samples / 16, targets
    samples = (samples - samples.mean(0)) / samples.std(0)
    return samples, targets


def images_and_labels(name: str) -> tuple[Tensor, Any]:
    """Images of half the side, and their labels."""
    if name in ("mnist", "fashion"):
        dataset_class = MNIST if name == "mnist" else FashionMNIST
        images = dataset_class(ROOT, train=True)
        pixels = images.data[:6000, None]
        return pooled(pixels), images.targets[:6000]
    if name == "cifar":
        path = ROOT / "cifar-10-batches-py/data_batch_1"
        batch = pickle.loads(path.read_bytes(), encoding="latin1")
        flat_pixels = torch.tensor(batch["data"])
        pixels = flat_pixels.view(-1, 3, 32, 32)
        labels = np.array(batch["labels"])
        return pooled(pixels), labels
    arrays = np.load(ROOT / f"{name}.npz")
    pixels = torch.tensor(arrays["train_images"])
    labels = arrays["train_labels"][:, 0]
    if name == "ham10000_28":
        is_nevus = labels == 5
        colors_first = pixels.movedim(-1, 1)
        return pooled(colors_first), is_nevus
    one_color = pixels[:, None]
    return pooled(one_color), labels


def table_of_people(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, targets and groups of a table's rows."""
    columns = {"exam": ("normexam", "school"), "contraception": ("use", "district")}
    target, group = columns[name]
    path = ROOT / "tables" / f"{name}.csv"
    frame = pd.read_csv(path)
    frame = frame.drop(columns="student", errors="ignore")
    targets = frame[target].to_numpy()
    if name == "contraception":
        targets = targets == "Y"
    features = frame.drop(columns=[target, group])
    features = pd.get_dummies(features, dtype=float)
    scaled = (features - features.mean()) / features.std()
    groups = frame[group].to_numpy()
    return scaled.to_numpy(), targets, groups


def pooled(images: Tensor) -> Tensor:
    """Halve the sides of images."""
    half_images = F.avg_pool2d(images.float() / 255, 2)
    return half_images.flatten(1)


@cache
def lesions() -> tuple[Tensor, Tensor]:
    """Skin lesions in 14 x 14 pixels, of the four most frequent kinds."""
    arrays = np.load(ROOT / "ham10000_28.npz")
    kinds = arrays["train_labels"][:, 0]
    counts = Counter(kinds.tolist())
    frequent = [kind for kind, _ in counts.most_common(4)]
    rows = np.isin(kinds, frequent)
    pixels = torch.tensor(arrays["train_images"][rows])
    colors_first = pixels.movedim(-1, 1)
    images = colors_first.float() / 255
    kinds_of_rows = kinds[rows].tolist()
    labels = [frequent.index(kind) for kind in kinds_of_rows]
    half_images = F.avg_pool2d(images, 2)
    return half_images.flatten(1), torch.tensor(labels)


class ConvFeatures(nn.Sequential):
    """Two convolutions, to 64 features."""

    def __init__(
        self,
        colors: int,
        side: int,
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__(
            nn.Unflatten(1, (colors, side, side)),
            nn.Conv2d(colors, 8, 3),
            norm(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            norm(16),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        )


IMAGES: Mapping[str, tuple[int, int]] = {
    "digits": (1, 8),
    "mnist": (1, 14),
    "fashion": (1, 14),
    "pneumoniamnist": (1, 14),
    "cifar": (3, 16),
    "lesions": (3, 14),
}


@cache
def frozen_features(data: str) -> dict[str, Tensor]:
    """Features that were trained on other images: those of fashion for numbers, of numbers for fashion, and others."""
    other_images = {"mnist": "fashion", "fashion": "mnist", "lesions": "cifar"}[data]
    colors, side = IMAGES[other_images]
    samples, labels, _ = source(other_images, 10)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        features = ConvFeatures(colors, side, nn.BatchNorm2d)
        network = nn.Sequential(features, nn.Linear(64, 10))
        optimizer = torch.optim.Adam(network.parameters(), 0.003)
        for _ in range(6):
            for rows in torch.randperm(len(labels)).split(32):
                optimizer.zero_grad()
                outputs = network(samples[rows])
                loss = F.cross_entropy(outputs, labels[rows])
                loss.backward()
                optimizer.step()
    return features.state_dict()


@cache
def features_and_labels(data: str) -> tuple[Tensor, Tensor]:
    """The frozen features ``[N, 64]`` of all samples of a data set, scaled to a variance of 1, and their labels."""
    if data == "lesions":
        samples, labels = lesions()
    else:
        samples, labels, _ = source(data, 10)
    features = ConvFeatures(*IMAGES[data], nn.BatchNorm2d)
    features.load_state_dict(frozen_features(data))
    features.eval()
    with torch.no_grad():
        outputs = features(samples)
    return outputs / outputs.std(), labels


def by_dirichlet(
    rows: np.ndarray,
    labels: np.ndarray,
    num_clients: int,
    alpha: float,
    draw: np.random.Generator,
) -> list[np.ndarray]:
    """Rows of clients whose parts of each class are drawn. Each has at least 12."""
    dealt: list[list[int]] = [[] for _ in range(num_clients)]
    for label in np.unique(labels):
        rows_of_class = rows[labels == label]
        fractions = draw.dirichlet([alpha] * num_clients)
        borders = fractions.cumsum()[:-1] * len(rows_of_class)
        parts = np.split(rows_of_class, borders.astype(int))
        for client, part in enumerate(parts):
            dealt[client] += part.tolist()
    few = rows[:12].tolist()
    for part in dealt:
        if len(part) < 12:
            part += few
    return [np.array(part) for part in dealt]
