"""Small federations whose coalitions are all trained at once, for ``predicted.py``.

They are trained by torch.func.vmap: plain FedAvg, SGD, weights by samples. Data are those of ``$FLSV_DATA_ROOT`` and
scikit-learn's.
"""

from __future__ import annotations

import csv
import os
import pickle
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from predicted_sets import ALL, Federation
from sklearn import datasets
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torchvision.datasets import MNIST, FashionMNIST

from flsv.functional import few_coalitions
from flsv.functional.shapley.exact import all_coalitions
from flsv.functional.shapley.mixtures import coalition_shares

ROOT = Path(os.environ.get("FLSV_DATA_ROOT", "."))
Samples = tuple[Tensor, Tensor]
Parameters = dict[str, Tensor]


@cache
def source(name: str, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``[N, ...]``, targets and groups ``[N]`` of a data set, of classification of the first classes."""
    groups: Any = None
    if name == "reuters":
        samples, targets, groups = news()
        return samples.long(), targets.long(), groups
    if name in ("exam", "contraception"):
        samples, targets, groups = table_of_people(name)
    elif name in ("mnist", "fashion", "cifar", "ham10000_28", "pneumoniamnist"):
        samples, targets = images_and_labels(name)
    else:
        samples, targets = from_scikit_learn(name)
    samples = torch.as_tensor(samples).float()
    targets = torch.as_tensor(targets)
    if groups is None:
        groups = torch.zeros(len(targets))
    groups = torch.tensor(groups)
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
    if name == "diabetes":
        targets = (targets - targets.mean()) / targets.std()
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


LETTERS, LENGTH = " abcdefghijklmnopqrstuvwxyz", 48


def pieces(text: str) -> Tensor:
    kept = torch.tensor([max(0, LETTERS.find(letter)) for letter in text.lower()])
    return kept[: len(kept) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


def news() -> tuple[Tensor, Tensor, Tensor]:
    """Pieces of news of four topics: to predict the next letter."""
    with (ROOT / "text/reuters_r8_train.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    found = [
        pieces(" ".join(row["text"] for row in rows if row["label"] == topic)[:60000])
        for topic in ("earn", "acq", "crude", "grain")
    ]
    both = torch.cat(found)
    return (
        both[:, :-1],
        both[:, 1:],
        torch.cat([torch.full((len(each),), place) for place, each in enumerate(found)]),
    )


class Letters(nn.Module):
    """A small transformer that predicts the next letter, with LoRA of rank 4 on its attention's queries and values."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = (
            nn.Embedding(len(LETTERS), width),
            nn.Parameter(torch.randn(LENGTH, width) * 0.1),
        )
        linear = partial(nn.Linear, width)
        self.parts = nn.ModuleList(
            nn.ModuleList(
                [linear(3 * width), linear(width), linear(2 * width), nn.Linear(2 * width, width)]
            )
            for _ in range(layers)
        )
        self.head = linear(len(LETTERS))
        self.lora_a = nn.Parameter(torch.randn(layers, 2, width, 4) / width**0.5)
        self.lora_b = nn.Parameter(torch.zeros(layers, 2, 4, width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place
        late = torch.ones(LENGTH, LENGTH).triu(1).bool()
        for place, (qkv, out, up, down) in enumerate(self.parts):  # type: ignore[misc]
            z = F.layer_norm(h, h.shape[-1:])
            q, k, v = qkv(z).chunk(3, -1)
            q, v = (
                each + z @ self.lora_a[place, i] @ self.lora_b[place, i]
                for i, each in enumerate((q, v))
            )
            attention = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(late, -1e9).softmax(-1)
            h = h + out(attention @ v)
            h = h + down(up(F.layer_norm(h, h.shape[-1:])).relu())
        return self.head(h)


@cache
def pretrained() -> dict[str, Tensor]:
    """Train the transformer for a minute on the tales of the brothers Grimm."""
    torch.manual_seed(0)
    with (ROOT / "text/grimm_tales.csv").open(newline="") as file:
        text = pieces(" ".join(row["text"] for row in csv.DictReader(file)))
    model = Letters()
    optimizer = torch.optim.Adam(
        [each for name, each in model.named_parameters() if "lora" not in name], 3e-3
    )
    for _ in range(8):
        for rows in torch.randperm(len(text)).split(32):
            optimizer.zero_grad()
            out = model(text[rows, :-1])
            F.cross_entropy(out.flatten(0, 1), text[rows, 1:].flatten()).backward()
            optimizer.step()
    return {name: each for name, each in model.state_dict().items() if "lora" not in name}


def network(of: Federation, x: Tensor, outputs: int) -> nn.Module:
    kind, _, width = of.model.partition(" ")
    if kind == "soft":
        return nn.Linear(x.shape[1], outputs)
    if kind == "mlp":
        return nn.Sequential(
            nn.Linear(x.shape[1], int(width)), nn.ReLU(), nn.Linear(int(width), outputs)
        )
    if kind == "lora":
        model = Letters()
        model.load_state_dict(pretrained(), strict=False)
        return model.requires_grad_(False)
    colors, side = (3, 16) if of.data == "cifar" else (1, 14)
    return nn.Sequential(
        nn.Unflatten(1, (colors, side, side)),
        *(
            nn.Conv2d(colors, 8, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ),
        *(nn.Flatten(), nn.Linear(64, outputs)),
    )


def deal(
    federation: Federation,
    labels: Tensor,
    groups: Tensor,
    draw: np.random.Generator,
) -> list[np.ndarray]:
    """Rows of each client."""
    how, _, number = federation.split.partition(" ")
    num_clients = federation.n
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
    if how == "classes":
        order = draw.permutation(10)
        per_client = int(number)
        rows_of_clients = []
        for client in range(num_clients):
            begin = client * per_client
            classes = order[begin:][:per_client]
            is_dealt = np.isin(labels_of_rows, classes)
            rows_of_clients.append(rows[is_dealt])
        return rows_of_clients
    if how == "dir":
        return by_dirichlet(rows, labels_of_rows, num_clients, float(number), draw)
    return np.array_split(rows, num_clients)


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


@cache
def samples_of(name: str) -> tuple[list[Samples], Samples, Samples]:
    """Samples of the clients, of the validation set, and as many others."""
    of = ALL[name]
    draw = np.random.default_rng(sum(map(ord, name)))
    x, y, groups = source(of.data, of.classes)
    if of.components:
        x = x - x.mean(0)
        x = x @ torch.linalg.svd(x[:3000], full_matrices=False)[2][: of.components].T
        x = x / x.std()
    rows = draw.permutation(len(y))
    size = 300 if of.apart else of.validation
    held, others, rest = (
        rows[: of.validation],
        rows[-size:],
        rows[of.validation : -size][: of.samples],
    )
    parts = deal(of, y[rest], groups[rest], draw)
    clients = [(x[rest[part]].clone(), y[rest[part]].clone()) for part in parts]
    classes = int(y.max()) + 1
    if of.wrong == "labels":
        for client, part in zip(draw.permutation(of.n)[: max(2, of.n // 4)], (0.6, 0.3, 0.8)):
            own = clients[client][1]
            changed = torch.tensor(draw.random(len(own)) < part)
            own[changed] = torch.tensor(draw.integers(0, classes, int(changed.sum())))
    elif of.wrong == "features":
        noise = [
            torch.tensor(draw.normal(size=own.shape)).float() * 0.25 * c
            for c, (own, _) in enumerate(clients)
        ]
        clients = [(own + more, label) for (own, label), more in zip(clients, noise)]
    elif of.wrong == "duplicate":
        clients[1] = clients[0]
    elif of.wrong == "harm":  # each label is the next one
        clients[2] = clients[2][0], (clients[2][1] + 1) % classes
    return clients, (x[held], y[held]), (x[others], y[others])


def score(of: Federation, y: Tensor, outputs: Tensor) -> Tensor:
    """Score outputs ``[c, V, ...]`` of c models."""
    if of.score == "r2":
        return 1 - (outputs.squeeze(-1) - y).square().mean(1).double() / y.double().var(
            unbiased=False
        )
    if of.score == "loss":
        wrong = [F.cross_entropy(each.flatten(0, -2), y.flatten()) for each in outputs]
        return -torch.stack(wrong).double()
    right = (outputs.argmax(-1) == y).double()
    if of.score == "balanced":
        return torch.stack([right[:, y == label].mean(1) for label in y.unique()]).mean(0)
    return right.flatten(1).mean(1)


class Training:
    """FedAvg of many coalitions at once, with one seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.of, self.seed = ALL[name], seed
        self.clients, self.validation, self.others = samples_of(name)
        y = source(self.of.data, self.of.classes)[1]
        outputs = (
            1
            if self.of.score == "r2"
            else len(LETTERS)
            if self.of.model == "lora"
            else int(y.max()) + 1
        )
        torch.manual_seed(seed)
        self.base = network(self.of, self.clients[0][0], outputs)
        own = dict(self.base.named_parameters())
        self.start = {
            k: v.detach() for k, v in own.items() if self.of.model != "lora" or "lora" in k
        }
        if self.of.model == "lora":
            self.start["lora_a"] = torch.randn_like(self.start["lora_a"]) / 48**0.5
        self.sizes = torch.tensor([len(y) for _, y in self.clients]).double()
        self.slope = vmap(grad(self._loss), in_dims=(0, None, None))

    def _loss(self, p: Parameters, x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(self.base, p, (x,))
        return (
            F.mse_loss(out[:, 0], y)
            if self.of.score == "r2"
            else F.cross_entropy(out.flatten(0, -2), y.flatten())
        )

    def local(
        self, p: Parameters, round_index: int, client: int, data: Samples | None = None
    ) -> Parameters:
        """One client's training of many models, on its own samples or on others."""
        x, y = data or self.clients[client]
        draw = torch.Generator().manual_seed(self.seed * 100003 + round_index * 1009 + client)
        for _ in range(self.of.epochs):
            for rows in torch.randperm(len(y), generator=draw).split(self.of.batch):
                slope = self.slope(p, x[rows], y[rows])
                p = {k: v - self.of.lr * slope[k] for k, v in p.items()}
        return p

    def cohorts(self, masks: Tensor, round_index: int) -> Tensor:
        """Members of each coalition that take part in a round."""
        if not self.of.cohort:
            return masks
        order = torch.randperm(
            self.of.n, generator=torch.Generator().manual_seed(self.seed * 7919 + round_index)
        )
        ordered = masks[:, order]
        return (ordered & (ordered.cumsum(1) <= self.of.cohort))[:, order.argsort()]

    def __call__(self, masks: Tensor) -> tuple[Parameters, Tensor, Tensor]:
        """The models of coalitions, and of the last of them each client's updates: in the first round, and the sum."""
        p = {k: v[None].repeat(len(masks), *[1] * v.ndim) for k, v in self.start.items()}
        first = total = torch.zeros(self.of.n, flat(self.start, 0).numel())
        for round_index in range(self.of.rounds):
            cohorts = self.cohorts(masks, round_index)
            weights = coalition_shares(cohorts, self.sizes).float()
            empty = (~masks.any(1)).float()
            new = {k: v * empty.view(-1, *[1] * (v.ndim - 1)) for k, v in p.items()}
            moves = torch.zeros_like(first)
            for client in range(self.of.n):
                at = cohorts[:, client].nonzero()[:, 0]
                if not len(at):
                    continue
                before = {k: v[at] for k, v in p.items()}
                after = self.local(before, round_index, client)
                for k, v in after.items():
                    new[k].index_add_(0, at, v * weights[at, client].view(-1, *[1] * (v.ndim - 1)))
                if at[-1] == len(masks) - 1:
                    moves[client] = flat(after)[-1] - flat(before)[-1]
            p, total, first = new, total + moves, first if round_index else moves
        return p, first, total

    def outputs(self, p: Parameters, x: Tensor) -> Tensor:
        with torch.no_grad():
            return vmap(lambda own: functional_call(self.base, own, (x,)))(p)


def flat(p: Parameters, start: int = 1) -> Tensor:
    return torch.cat([v.flatten(start) for v in p.values()], -1)


def numbers(n: int, which: Any) -> list[int]:
    """Numbers of a design's coalitions in :func:`all_coalitions`."""
    return (few_coalitions(n, which).long() @ (1 << torch.arange(n))).tolist()


def play(name: str, seed: int) -> dict[str, Any]:
    """All that is kept of one seed of a federation."""
    began, training = time.process_time(), Training(name, seed)
    of, masks = training.of, all_coalitions(ALL[name].n)
    wanted = numbers(of.n, "both")
    chunk = max(8, min(2048, 2**22 // flat(training.start, 0).numel()))
    utilities, elsewhere, outputs, models = [], [], {}, {}
    for part in torch.arange(len(masks)).split(chunk):
        p, first, total = training(masks[part])
        for some in torch.arange(len(part)).split(16 if of.model in ("cnn", "lora") else 256):
            own = {k: v[some] for k, v in p.items()}
            found = training.outputs(own, training.validation[0])
            utilities.append(score(of, training.validation[1], found))
            elsewhere.append(
                score(of, training.others[1], training.outputs(own, training.others[0]))
            )
            outputs |= {
                at: found[k].clone() for k, at in enumerate(part[some].tolist()) if at in wanted
            }
            models |= {
                at: flat(own)[k].clone() for k, at in enumerate(part[some].tolist()) if at in wanted
            }
    return {
        **{"utilities": torch.cat(utilities), "elsewhere": torch.cat(elsewhere)},
        **{
            "outputs": outputs,
            "models": models,
            "first": first,
            "total": total,
            "sizes": training.sizes,
        },
        "seconds": time.process_time() - began,
    }
