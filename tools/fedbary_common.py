"""What the parts of FedBary's comparison (``tables/fedbary.yaml``) share: sizes, images, learned features, checks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flsv.data import load_image_data
from flsv.features import PCA
from flsv.features.penultimate import head_inputs
from flsv.models import build_network
from flsv.seeding import generator_for

NETWORKS = {"mnist": "shapley_fl_fmnist", "fashion_mnist": "shapley_fl_fmnist", "cifar10": "lenet5"}


@dataclass(frozen=True)
class Setting:
    """What a preset fixes. ``samples`` are a client's own in detection and removal of points, ``points`` their S; the
    rest is named by its part."""

    support: int = 400
    iterations: int = 10
    samples: int = 600
    points: int = 200
    validation: int = 600
    epochs: int = 10  # of the network behind the learned features
    components: int = 64  # of them that are kept
    protocol_samples: int = 100
    federation_samples: int | None = 2400
    federation_validation: float = 1 / 6
    rounds: int = 6
    filter_samples: int | None = 3600
    filter_rounds: int = 15
    retrained: bool = True
    duplication_samples: int = 1000
    variants_samples: int = 200
    time_samples: int = 500
    time_iterations: int = 10
    time_clients: tuple[int, ...] = (5, 10, 50, 100)
    time_supports: tuple[int, ...] = (100, 500)
    time_rounds: int = 2
    accelerator: str = "cpu"


# The paper's sizes: 5000 training and validation samples in 5.3 and 5.4, all of CIFAR-10 in figure 4.
FULL = Setting(
    support=500,
    samples=5000,
    points=500,
    validation=5000,
    epochs=20,
    federation_samples=None,
    federation_validation=0.1,
    rounds=20,
    filter_samples=None,
    filter_rounds=30,
    duplication_samples=5000,
    variants_samples=1000,
    time_rounds=10,
    time_samples=1000,
    accelerator="auto",
)


@dataclass(frozen=True)
class Check:
    """A figure that has to be reached."""

    name: str
    value: str
    met: bool

    def __str__(self) -> str:
        return f"- {'met' if self.met else '**not met**'}: {self.name}: {self.value}"


@dataclass(frozen=True)
class Split:
    """Images of one data set: a client's training samples, the server's validation set, and a test set."""

    x: Tensor
    y: Tensor
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor


def split(source: str, root: str, samples: int, validation: int, seed: int) -> Split:
    """Random samples of the training set, and 2000 of the test set."""
    data = load_image_data(source, root)
    x, y = data.train.tensors  # type: ignore[attr-defined]
    test_x, test_y = data.test.tensors  # type: ignore[attr-defined]
    generator = generator_for(seed, "split")
    chosen = torch.randperm(len(x), generator=generator)[: samples + validation]
    client, server = chosen[:samples], chosen[samples:]
    test = torch.randperm(len(test_x), generator=generator)[:2000]
    return Split(x[client], y[client], x[server], y[server], test_x[test], test_y[test])


def pca_features(part: Split, components: int = 50) -> Callable[[Tensor], Tensor]:
    """Principal components of the server's validation images."""
    pca = PCA(components)
    pca.fit(part.val_x, [])
    return pca


def learned_features(part: Split, source: str, setting: Setting, seed: int) -> Callable[[Tensor], Tensor]:
    """The penultimate layer of a small network that the server has trained on its validation images, by its principal
    components. No client's sample is used; the network goes to the clients."""
    torch.manual_seed(seed)
    network = build_network(NETWORKS[source], 10, part.val_x.shape[1:])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(setting.epochs):
        for batch in torch.randperm(len(part.val_x)).split(32):
            if len(batch) > 1:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(network(part.val_x[batch]), part.val_y[batch]).backward()
                optimizer.step()
    network.eval()
    pca = PCA(setting.components)
    pca.fit(head_inputs(network, part.val_x), [])
    return lambda x: pca(head_inputs(network, x))


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def cell(values: Sequence[float], digits: int = 2, scale: float = 1.0) -> str:
    """Mean and standard deviation of the seeds."""
    known = [scale * v for v in values if v == v]
    if not known:
        return "-"
    spread = f" ± {statistics.stdev(known):.{digits}f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):.{digits}f}{spread}"
