"""How far values from predicted outputs lie from those of retrained coalitions, on federations written down before.

    python tools/studies/predicted.py train tuning|held_out [NAME...] [--folder runs/predicted]
    python tools/studies/predicted.py tune                            the rule, on the federations for tuning
    python tools/studies/predicted.py table [--csv FILE]              the held-out federations, once the rule stands
    python tools/studies/predicted.py brackets                        what 90 % brackets hold, on both sets
    python tools/studies/predicted.py lies                            what false own models bring, and which checks see it
    python tools/studies/predicted.py picture docs/images/coalition_simplex.png

`train` trains all 2^n coalitions of a federation at once by torch.func.vmap: plain FedAvg, SGD, weights by samples. It
keeps all utilities, the outputs of each client alone and of all but one, and goes on where it was stopped. The truth
for a seed is the mean of the exact values of the *other* seeds. Data are those of `$FLSV_DATA_ROOT` and scikit-learn's.
"""

from __future__ import annotations

import argparse
import csv
import os
import pickle
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import be_quiet, grid
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from flsv.benchmark.scores import share_error, shares, spearman
from flsv.functional import few_coalitions, few_coalitions_shapley
from flsv.functional.confidence import t_quantile
from flsv.functional.shapley.enumeration import all_coalitions, semivalue, semivalue_of_table, shapley_weights
from flsv.functional.shapley.few_coalitions import interval_over_seeds
from flsv.functional.shapley.one_seed import SEED_DEVIATION, one_seed_stderr
from flsv.functional.shapley.predicted_outputs import PredictedGame, coalition_shares, interpolation_weights

#: The rule: the ensemble's part in the mean of the two games, whatever is trained. On the federations for tuning a
#: smaller part, or logarithms of probabilities in place of capped logits, changes the misallocation by less than the
#: difference's interval, with each alone and with all but one. A larger part is worse. So one rule serves both.
PART = 0.5
ROOT = Path(os.environ.get("FLSV_DATA_ROOT", "."))


@dataclass(frozen=True)
class Federation:
    """One federation: its data, how they are dealt, what is wrong with them, and how it is trained."""

    data: str
    n: int
    split: str  # iid, sizes, dir ALPHA, classes PER CLIENT, groups
    model: str = "mlp 32"  # soft, mlp WIDTH, cnn, lora
    rounds: int = 10
    lr: float = 0.1
    samples: int = 1000  # of all clients together
    validation: int = 300
    epochs: int = 1
    batch: int = 16
    score: str = "accuracy"  # balanced, loss, r2
    wrong: str = ""  # labels, features, duplicate, harm
    components: int = 0  # principal components in place of pixels
    cohort: int = 0  # clients drawn each round, among the coalition's members; 0: all
    classes: int = 10
    apart: bool = False  # the truth is of other samples than the validation set's


TUNING = {
    "digits_dir_5": Federation("digits", 5, "dir 0.5", rounds=15),
    "digits_sizes_6": Federation("digits", 6, "sizes", rounds=12),
    "digits_labels_6": Federation("digits", 6, "iid", rounds=12, wrong="labels"),
    "digits_two_5": Federation("digits", 5, "classes 2", rounds=15),
    "mnist_dir_6": Federation("mnist", 6, "dir 0.3", rounds=8),
    "mnist_twins_6": Federation("mnist", 6, "dir 0.5", rounds=8, wrong="duplicate"),
    "fashion_dir_7": Federation("fashion", 7, "dir 0.3", rounds=6),
    "fashion_features_6": Federation("fashion", 6, "iid", "soft", rounds=8, wrong="features"),
    "wine_dir_4": Federation("wine", 4, "dir 1", rounds=15, epochs=2, samples=100, validation=39),
    "breast_labels_5": Federation("breast", 5, "sizes", rounds=12, samples=300, validation=130, wrong="labels"),
    "blobs_dir_6": Federation("blobs", 6, "dir 0.5", rounds=12, samples=1200),
    "blobs_labels_7": Federation("blobs", 7, "iid", rounds=8, samples=1200, wrong="labels"),
    "mnist_cnn_5": Federation("mnist", 5, "dir 0.3", "cnn", rounds=18, samples=700),
    "digits_harm_5": Federation("digits", 5, "dir 0.5", rounds=10, epochs=2, lr=0.05, wrong="harm"),
    "women_5": Federation("contraception", 5, "groups", "mlp 16", 15, samples=1200, score="balanced"),
    "mnist_dir_10": Federation("mnist", 10, "dir 0.5", "mlp 16", 8, components=30),
    "digits_labels_10": Federation("digits", 10, "dir 1", "soft", 12, wrong="labels"),
}
#: Written down, and committed, before any of them was trained.
HELD_OUT = {
    "digits_16": Federation("digits", 16, "dir 1", "soft", 12, 0.3, batch=32, components=20),
    "fashion_labels_14": Federation("fashion", 14, "dir 0.5", "mlp 12", 10, 0.3, components=20, wrong="labels"),
    "lesions_12": Federation("ham", 12, "dir 0.5", "mlp 12", 12, 0.3, samples=1400, score="balanced", components=24),
    "lungs_11": Federation("pneumonia", 11, "sizes", "mlp 12", 10, score="balanced", components=20, wrong="labels"),
    "mnist_disjoint_10": Federation("mnist", 10, "classes 1", "mlp 16", 12, 0.3, components=30),
    "cifar_cnn_4": Federation("cifar", 4, "dir 0.5", "cnn", 25, samples=800, classes=4),
    "fashion_cnn_4": Federation("fashion", 4, "dir 0.3", "cnn", 18, samples=800),
    "pupils_6": Federation("exam", 6, "groups", "mlp 16", 12, 0.05, samples=1200, score="r2"),
    "diabetes_5": Federation("diabetes", 5, "sizes", "mlp 16", 15, 0.02, samples=280, validation=80, score="r2"),
    "topics_lora_4": Federation("reuters", 4, "groups", "lora", 8, 1.5, samples=480, validation=100, score="loss"),
    "mnist_three_of_6": Federation("mnist", 6, "dir 0.5", rounds=40, lr=0.05, cohort=3),
    "digits_two_of_7": Federation("digits", 7, "dir 1", rounds=60, lr=0.05, cohort=2),
    "fashion_labels_6": Federation("fashion", 6, "dir 1", rounds=10, wrong="labels"),
    "digits_disjoint_5": Federation("digits", 5, "classes 2", "mlp 24", 20),
    "fashion_twins_6": Federation("fashion", 6, "dir 0.5", rounds=10, wrong="duplicate"),
    "mnist_harm_6": Federation("mnist", 6, "dir 1", rounds=10, wrong="harm"),
    "mnist_hundred_7": Federation("mnist", 7, "dir 0.3", rounds=10, validation=100, apart=True),
}
ALL = TUNING | HELD_OUT


@cache
def source(name: str, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Features ``[N, ...]``, targets and groups ``[N]`` of a data set."""
    groups: Any = None
    if name in ("digits", "wine", "breast", "diabetes"):
        from sklearn import datasets

        loader = {"breast": "load_breast_cancer"}.get(name, f"load_{name}")
        x, y = getattr(datasets, loader)(return_X_y=True)
        x = x / 16 if name == "digits" else (x - x.mean(0)) / x.std(0)
        y = (y - y.mean()) / y.std() if name == "diabetes" else y
    elif name == "blobs":
        from sklearn.datasets import make_classification

        x, y = make_classification(2500, 20, n_informative=8, n_classes=4, n_clusters_per_class=2, random_state=5)
    elif name in ("mnist", "fashion"):
        from torchvision.datasets import MNIST, FashionMNIST

        of = (MNIST if name == "mnist" else FashionMNIST)(ROOT, train=True)
        x, y = F.avg_pool2d(of.data[:6000, None].float() / 255, 2).flatten(1), of.targets[:6000]
    elif name == "cifar":
        batch = pickle.loads((ROOT / "cifar-10-batches-py/data_batch_1").read_bytes(), encoding="latin1")
        y = np.array(batch["labels"])
        few = y < classes
        x, y = F.avg_pool2d(torch.tensor(batch["data"][few]).view(-1, 3, 32, 32).float() / 255, 2).flatten(1), y[few]
    elif name in ("ham", "pneumonia"):
        kept = np.load(ROOT / {"ham": "ham10000_28.npz", "pneumonia": "pneumoniamnist.npz"}[name])
        x = torch.tensor(kept["train_images"]).float() / 255
        x = F.avg_pool2d(x.movedim(-1, 1) if x.ndim == 4 else x[:, None], 2).flatten(1)
        y = kept["train_labels"][:, 0].astype(np.int64)
        y = (y == 5).astype(np.int64) if name == "ham" else y  # a nevus or not
    elif name in ("exam", "contraception"):
        import pandas as pd

        of, target, group = {
            "exam": ("exam.csv", "normexam", "school"),
            "contraception": ("contraception.csv", "use", "district"),
        }[name]
        frame = pd.read_csv(ROOT / "tables" / of)
        y = frame[target].to_numpy() if name == "exam" else (frame[target] == "Y").to_numpy().astype(np.int64)
        groups = frame[group].to_numpy()
        rest = pd.get_dummies(frame.drop(columns=[target, group, *({"student"} & {*frame.columns})]), dtype=float)
        x = ((rest - rest.mean()) / rest.std()).to_numpy()
    else:  # characters of news, by topic
        x, y, groups = news()
    x, y = (torch.tensor(each) if isinstance(each, np.ndarray) else each for each in (x, y))
    x, y = (x if name == "reuters" else x.float()), (y.float() if y.is_floating_point() else y.long())
    return x, y, torch.zeros(len(y)) if groups is None else torch.as_tensor(groups)


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
    return both[:, :-1], both[:, 1:], torch.cat([torch.full((len(each),), place) for place, each in enumerate(found)])


class Letters(nn.Module):
    """A small transformer that predicts the next letter, with LoRA of rank 4 on its attention's queries and values."""

    def __init__(self, width: int = 48, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(len(LETTERS), width), nn.Parameter(torch.randn(LENGTH, width) * 0.1)
        linear = partial(nn.Linear, width)
        self.parts = nn.ModuleList(
            nn.ModuleList([linear(3 * width), linear(width), linear(2 * width), nn.Linear(2 * width, width)])
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
            q, v = (each + z @ self.lora_a[place, i] @ self.lora_b[place, i] for i, each in enumerate((q, v)))
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
    optimizer = torch.optim.Adam([each for name, each in model.named_parameters() if "lora" not in name], 3e-3)
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
        return nn.Sequential(nn.Linear(x.shape[1], int(width)), nn.ReLU(), nn.Linear(int(width), outputs))
    if kind == "lora":
        model = Letters()
        model.load_state_dict(pretrained(), strict=False)
        return model.requires_grad_(False)
    colors, side = (3, 16) if of.data == "cifar" else (1, 14)
    return nn.Sequential(
        nn.Unflatten(1, (colors, side, side)),
        *(nn.Conv2d(colors, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, outputs)),
    )


def deal(of: Federation, y: Tensor, groups: Tensor, draw: np.random.Generator) -> list[np.ndarray]:
    """Rows of each client."""
    how, _, number = of.split.partition(" ")
    rows, labels = draw.permutation(len(y)), y.numpy()
    if how == "sizes":
        parts = np.array([1.5**client for client in range(of.n)]).cumsum()
        return np.split(rows, (parts[:-1] / parts[-1] * len(y)).astype(int))
    if how == "groups":
        place = np.unique(groups.numpy(), return_inverse=True)[1]
        client = draw.permutation(place.max() + 1)[place] % of.n
        return [np.flatnonzero(client == each) for each in range(of.n)]
    if how == "classes":
        owner = draw.permutation(10)
        return [rows[np.isin(labels[rows], owner[c * int(number) : (c + 1) * int(number)])] for c in range(of.n)]
    if how == "dir":
        dealt: list[list[int]] = [[] for _ in range(of.n)]
        for label in np.unique(labels):
            own = rows[labels[rows] == label]
            cuts = (draw.dirichlet([float(number)] * of.n).cumsum()[:-1] * len(own)).astype(int)
            for client, part in enumerate(np.split(own, cuts)):
                dealt[client] += part.tolist()
        return [np.array(each if len(each) >= 12 else each + rows[:12].tolist()) for each in dealt]
    return np.array_split(rows, of.n)


Samples = tuple[Tensor, Tensor]


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
    held, others, rest = rows[: of.validation], rows[-size:], rows[of.validation : -size][: of.samples]
    parts = deal(of, y[rest], groups[rest], draw)
    clients = [(x[rest[part]].clone(), y[rest[part]].clone()) for part in parts]
    classes = int(y.max()) + 1
    if of.wrong == "labels":
        for client, part in zip(draw.permutation(of.n)[: max(2, of.n // 4)], (0.6, 0.3, 0.8)):
            own = clients[client][1]
            changed = torch.tensor(draw.random(len(own)) < part)
            own[changed] = torch.tensor(draw.integers(0, classes, int(changed.sum())))
    elif of.wrong == "features":
        noise = [torch.tensor(draw.normal(size=own.shape)).float() * 0.25 * c for c, (own, _) in enumerate(clients)]
        clients = [(own + more, label) for (own, label), more in zip(clients, noise)]
    elif of.wrong == "duplicate":
        clients[1] = clients[0]
    elif of.wrong == "harm":  # each label is the next one
        clients[2] = clients[2][0], (clients[2][1] + 1) % classes
    return clients, (x[held], y[held]), (x[others], y[others])


def score(of: Federation, y: Tensor, outputs: Tensor) -> Tensor:
    """Score outputs ``[c, V, ...]`` of c models."""
    if of.score == "r2":
        return 1 - (outputs.squeeze(-1) - y).square().mean(1).double() / y.double().var(unbiased=False)
    if of.score == "loss":
        wrong = [F.cross_entropy(each.flatten(0, -2), y.flatten()) for each in outputs]
        return -torch.stack(wrong).double()
    right = (outputs.argmax(-1) == y).double()
    if of.score == "balanced":
        return torch.stack([right[:, y == label].mean(1) for label in y.unique()]).mean(0)
    return right.flatten(1).mean(1)


Parameters = dict[str, Tensor]


class Training:
    """FedAvg of many coalitions at once, with one seed."""

    def __init__(self, name: str, seed: int) -> None:
        self.of, self.seed = ALL[name], seed
        self.clients, self.validation, self.others = samples_of(name)
        y = source(self.of.data, self.of.classes)[1]
        outputs = 1 if self.of.score == "r2" else len(LETTERS) if self.of.model == "lora" else int(y.max()) + 1
        torch.manual_seed(seed)
        self.base = network(self.of, self.clients[0][0], outputs)
        own = dict(self.base.named_parameters())
        self.start = {k: v.detach() for k, v in own.items() if self.of.model != "lora" or "lora" in k}
        if self.of.model == "lora":
            self.start["lora_a"] = torch.randn_like(self.start["lora_a"]) / 48**0.5
        self.sizes = torch.tensor([len(y) for _, y in self.clients]).double()
        self.slope = vmap(grad(self._loss), in_dims=(0, None, None))

    def _loss(self, p: Parameters, x: Tensor, y: Tensor) -> Tensor:
        out = functional_call(self.base, p, (x,))
        return F.mse_loss(out[:, 0], y) if self.of.score == "r2" else F.cross_entropy(out.flatten(0, -2), y.flatten())

    def local(self, p: Parameters, round_index: int, client: int, data: Samples | None = None) -> Parameters:
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
        order = torch.randperm(self.of.n, generator=torch.Generator().manual_seed(self.seed * 7919 + round_index))
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
            elsewhere.append(score(of, training.others[1], training.outputs(own, training.others[0])))
            outputs |= {at: found[k].clone() for k, at in enumerate(part[some].tolist()) if at in wanted}
            models |= {at: flat(own)[k].clone() for k, at in enumerate(part[some].tolist()) if at in wanted}
    return {
        **{"utilities": torch.cat(utilities), "elsewhere": torch.cat(elsewhere)},
        **{"outputs": outputs, "models": models, "first": first, "total": total, "sizes": training.sizes},
        "seconds": time.process_time() - began,
    }


def game(of: Federation, y: Tensor, kept: dict[str, Any], which: Any) -> PredictedGame:
    """The predicted games of a design: interpolated, and of the ensemble."""
    at = numbers(of.n, which)
    outputs = torch.stack([kept["outputs"][each] for each in at])
    return PredictedGame(
        few_coalitions(of.n, which), kept["utilities"][at], outputs, kept["sizes"], partial(score, of, y),
        logits=of.score != "r2",
    )  # fmt: skip


def estimates(name: str, kept: dict[str, Any]) -> dict[str, Tensor]:
    """Values of one seed in all ways."""
    of, y = ALL[name], samples_of(name)[1][1]
    weight, utilities = shapley_weights(of.n), kept["utilities"]
    found = {"exact": semivalue_of_table(utilities[:, None], weight)[:, 0]}
    found["truth"] = semivalue_of_table(kept["elsewhere"][:, None], weight)[:, 0] if of.apart else found["exact"]
    for which in ("singles", "both", "auto"):
        design = few_coalitions(of.n, which)
        found[f"scores, {which}"] = few_coalitions_shapley(design, utilities[numbers(of.n, which)]).values
    for which in ("singles", "both"):
        columns = semivalue(game(of, y, kept, which), of.n, weight).values
        found |= {f"interpolated, {which}": columns[:, 0], f"ensemble, {which}": columns[:, 1]}
    return found


def train(names: Iterable[str], folder: Path) -> None:
    for name in names:
        for seed in range(6 if name in HELD_OUT else 5):
            path = folder / name / f"{seed}.pt"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                kept = play(name, seed)
                began = time.process_time()
                kept["found"] = estimates(name, kept)
                torch.save(kept, path)
                ends = [f"{float(kept['utilities'][at]):.3f}" for at in (0, -1)]
                times = f"{kept['seconds']:.0f} s and {time.process_time() - began:.0f} s"
                print(f"{name}: {seed}, utility {' to '.join(ends)}, {times}", flush=True)


def loaded(name: str, folder: Path) -> list[dict[str, Any]]:
    return [torch.load(path) for path in sorted((folder / name).glob("?.pt"))]


def others_mean(rows: Tensor, seeds: Iterable[int]) -> Tensor:
    """The mean of the rows of all seeds but these."""
    return rows[[place for place in range(len(rows)) if place not in {*seeds}]].mean(0)


def wrong_by(values: Tensor, truths: Tensor, seeds: int = 1, measure: Callable[..., float] = share_error) -> float:
    """Mean over sets of seeds of the misallocated percent of their mean values ``[seeds, n]``, against other seeds."""
    found = [
        measure(values[list(some)].mean(0), others_mean(truths, some))
        for some in combinations(range(len(values)), seeds)
    ]
    return float(np.mean(found)) * (100 if measure is share_error else 1)


def interval(differences: Iterable[float]) -> str:
    """A mean over federations, with half its 90 % interval."""
    found = torch.tensor([*differences])
    return f"{found.mean():+.2f} ± {t_quantile(0.9, len(found) - 1) * found.std() / len(found) ** 0.5:.2f}"


def clipped(name: str, kept: dict[str, Any], which: str) -> Tensor:
    """Values by interpolated logarithms of probabilities, of at least -5."""
    of, y, design = ALL[name], samples_of(name)[1][1], few_coalitions(ALL[name].n, which)  # type: ignore[arg-type]
    at, rows = numbers(of.n, which), design.any(1)
    logs = torch.stack([kept["outputs"][each] for each in at])[rows].log_softmax(-1).clamp_min(-5)
    masks, utilities = all_coalitions(of.n), torch.empty(2**of.n, dtype=torch.float64)
    for part in torch.arange(1, 2**of.n).split(64):
        mixing = interpolation_weights(masks[part], design[rows], kept["sizes"]).float()
        utilities[part] = score(of, y, (mixing @ logs.flatten(1)).view(-1, *logs.shape[1:]))
    utilities[at] = kept["utilities"][at]
    return semivalue_of_table(utilities[:, None], shapley_weights(of.n))[:, 0]


def tune(folder: Path) -> str:
    """Percent misallocated on the federations for tuning, by the ensemble's part in the mean of the two games."""
    parts, rows = (0.0, 0.25, 0.5, 0.75, 1.0), dict[str, list[float]]()
    for name in TUNING:
        kept = loaded(name, folder)
        found = {key: torch.stack([each["found"][key] for each in kept]) for key in kept[0]["found"]}
        exact = found["exact"]
        ways = {"exact": exact, "scores, singles": found["scores, singles"], "scores, both": found["scores, both"]}
        for which in ("singles", "both"):
            inner, ensemble = found[f"interpolated, {which}"], found[f"ensemble, {which}"]
            ways |= {f"{which}: {100 * part:.0f} % ensemble": (1 - part) * inner + part * ensemble for part in parts}
            logs = torch.stack([clipped(name, each, which) for each in kept])
            ways |= {f"{which}: log p": logs, f"{which}: log p, 50 % ensemble": (logs + ensemble) / 2}
        for way, values in ways.items():
            rows.setdefault(way, []).append(wrong_by(values, exact))
        for which in ("singles", "both"):
            for part in parts:
                mixed = (1 - part) * found[f"interpolated, {which}"] + part * found[f"ensemble, {which}"]
                rows.setdefault(f"three seeds, {which}: {100 * part:.0f} % ensemble", []).append(
                    wrong_by(mixed, exact, 3)
                )
        rows.setdefault("three seeds, exact", []).append(wrong_by(exact, exact, 3))
    lines = [["way", "misallocated, %", "over exact", "worst over exact", "over the rule", *TUNING]]
    for way, each in rows.items():
        over = [a - b for a, b in zip(each, rows["three seeds, exact" if "three" in way else "exact"])]
        rule = rows.get(f"{way.partition(':')[0]}: {100 * PART:.0f} % ensemble", each)
        beside = interval(a - b for a, b in zip(each, rule))
        cells = [interval(over), f"{max(over):.1f}", beside, *(f"{x:.1f}" for x in each)]
        lines.append([way, f"{np.mean(each):.2f}", *cells])
    return grid(lines)


Found = dict[str, dict[str, Tensor]]


def found_of(names: Iterable[str], folder: Path) -> Found:
    """Of each federation the values ``[seeds, n]`` in all ways, and the utilities of the untrained and of all."""
    found: Found = {}
    for name in names:
        if kept := loaded(name, folder):
            of = {key: torch.stack([each["found"][key] for each in kept]) for key in kept[0]["found"]}
            for which in ("singles", "both"):
                pair = of[f"interpolated, {which}"], of[f"ensemble, {which}"]
                of[f"predicted, {which}"] = (1 - PART) * pair[0] + PART * pair[1]
                of[f"disagreement, {which}"] = pair[0] - pair[1]
            of["ends"] = torch.stack([each["utilities"][[0, -1]] for each in kept])
            found[name] = of
    return found


#: Ways of one seed, and of three; the first of each is the floor.
WAYS = {
    "exact": ("exact", 1),
    "1.2.0's default": ("scores, auto", 1),
    "scores: each alone": ("scores, singles", 1),
    "scores: and all but one": ("scores, both", 1),
    "ensemble": ("ensemble, singles", 1),
    "predicted: each alone": ("predicted, singles", 1),
    "predicted: and all but one": ("predicted, both", 1),
    "exact, 3 seeds": ("exact", 3),
    "predicted: each alone, 3 seeds": ("predicted, singles", 3),
    "predicted: and all but one, 3 seeds": ("predicted, both", 3),
}
DECIDABLE = 15.0


def table(folder: Path, path: Path | None) -> str:
    """Percent misallocated on the held-out federations, and what it exceeds the exact game by; rank correlations."""
    found, rows, wrong = found_of(HELD_OUT, folder), [["federation", "gain", *WAYS]], dict[str, list[float]]()
    ranks, lines = dict[str, list[float]](), list[list[str]]()
    for name, of in found.items():
        gain = (of["ends"][:, 1] - of["ends"][:, 0]).mean()
        for way, (key, seeds) in WAYS.items():
            wrong.setdefault(way, []).append(wrong_by(of[key], of["truth"], seeds))
            ranks.setdefault(way, []).append(wrong_by(of[key], of["truth"], seeds, spearman))
            cells = [f"{wrong[way][-1]:.2f}", f"{ranks[way][-1]:.3f}"]
            lines.append([name, str(ALL[name].n), f"{gain:.3f}", way, *cells])
        rows.append([name, f"{gain:.2f}", *(f"{each[-1]:.1f}" for each in wrong.values())])
    few = [place for place, percent in enumerate(wrong["exact"]) if percent <= DECIDABLE]
    many = [place for place, name in enumerate(found) if ALL[name].n >= 10]
    for title, some in {"all": [*range(len(found))], "decidable": few, "10 clients and more": many}.items():
        if len(some) > 1:
            head = [f"**{title}: {len(some)}**", ""]
            rows.append([*head, *(f"{np.mean([each[k] for k in some]):.2f}" for each in wrong.values())])
            over = {
                way: [each[k] - wrong["exact, 3 seeds" if WAYS[way][1] == 3 else "exact"][k] for k in some]
                for way, each in wrong.items()
            }
            rows.append(["over exact", "", *(interval(each) for each in over.values())])
            if some is many:
                default = [[each[k] - wrong["1.2.0's default"][k] for k in some] for each in wrong.values()]
                rows.append(["over 1.2.0's default", "", *(interval(each) for each in default)])
            rows.append(["rank", "", *(f"{np.mean([each[k] for k in some]):.2f}" for each in ranks.values())])
    if path:
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(
                [["federation", "clients", "gain", "way", "misallocated_percent", "rank"], *lines]
            )
    return grid(rows)


#: Standard error of a prediction, as a multiple of the two games' difference: root mean square over the clients.
FIT = 0.75


def half_width(values: Tensor, disagreement: Tensor, untrained: Tensor, level: float = 0.9) -> Tensor:
    """Half a bracket's width ``[n]`` around the mean of the values ``[seeds, n]`` of each seed's own fit."""
    fit = FIT * disagreement.mean(0).square().mean().sqrt().expand(values.shape[1])
    seeds, paid = len(values), values.mean(0).clamp_min(0).sum()
    if seeds == 1:
        return t_quantile(level) * one_seed_stderr(values[0], fit, untrained)
    spread = values.var(0)
    least = torch.maximum(spread.mean(), (SEED_DEVIATION * paid).square())
    variance = ((seeds - 1) * spread + 2 * least) / (seeds + 1)
    return (t_quantile(level, seeds + 1) ** 2 * variance / seeds + (t_quantile(level) * fit).square()).sqrt()


def prototype(values: Tensor, disagreement: Tensor, ends: Tensor) -> Tensor:
    """The prototype's bracket of one run: 0.34 / n of the gain, and half the mean difference of the two games."""
    return 0.34 / values.shape[1] * (ends[0, 1] - ends[0, 0]) + 0.5 * disagreement.abs().mean().expand(values.shape[1])


def brackets(folder: Path) -> str:
    """The part of the other seeds' values that brackets hold, when these are widened by the truth's own error."""
    rows = [["federations", "way", "seeds", "bracket", "held", "least held", "in", "half width, % of the payment"]]
    for title, names in {"tuning": TUNING, "held out": HELD_OUT}.items():
        found = found_of(names, folder)
        for way, seeds, bracket in (
            *(
                (f"predicted, {which}", 1, bracket)
                for which in ("singles", "both")
                for bracket in ("prototype", "rule")
            ),
            *(("exact", seeds, "rule") for seeds in (1, 3)),
            *(
                (f"predicted, {which}", 3, bracket)
                for which in ("singles", "both")
                for bracket in ("rule", "spread alone")
            ),
        ):
            held, width = dict[str, float](), list[float]()
            for name, of in found.items():
                values, truths, inside, wide = of[way], of["truth"], list[Tensor](), list[float]()
                apart = of.get(way.replace("predicted", "disagreement"), torch.zeros_like(values))
                apart = torch.zeros_like(values) if way == "exact" else apart
                for some in map(list, combinations(range(len(values)), seeds)):
                    if bracket == "prototype":
                        half = prototype(values[some], apart[some], of["ends"][some])
                    elif bracket == "spread alone":
                        half = interval_over_seeds(values[some])
                    else:
                        half = half_width(values[some], apart[some], of["ends"][:, 0])
                    rest = truths[[seed for seed in range(len(values)) if seed not in some]]
                    error = t_quantile(0.9) ** 2 * rest.var(0).mean() / len(rest)
                    off = (values[some].mean(0) - rest.mean(0)).abs()
                    inside.append((off <= (half.square() + error).sqrt()).double())
                    wide.append(100 * float(half.mean() / values[some].mean(0).clamp_min(0).sum()))
                held[name] = float(torch.cat(inside).mean())
                width.append(float(np.mean(wide)))
            least = min(held, key=held.__getitem__)
            numbers_of = [f"{np.mean([*held.values()]):.2f}", f"{held[least]:.2f}", least, f"{np.mean(width):.1f}"]
            rows.append([f"{title}: {len(found)}", way, str(seeds), bracket, *numbers_of])
    return grid(rows)


LIES = (
    "the global model",
    "half of it",
    "another's model",
    "trained on data like the validation's",
    "logits times ten",
)
#: The least distance of an honest client's own model to the global one, as a part of its move.
NEAR = 0.1


def lies(folder: Path, names: Iterable[str]) -> str:
    """What a client gains by a false own model, in points of the payment, and how often the checks see it."""
    gains, seen = dict[str, list[Tensor]](), dict[str, list[list[bool]]]()
    for name in names:
        of, weight, y = ALL[name], shapley_weights(ALL[name].n), samples_of(name)[1][1]
        if of.n > 7 or of.cohort or of.model == "lora":
            continue
        for seed, kept in enumerate(loaded(name, folder)[:2]):
            training, models = Training(name, seed), kept["models"]
            start, everybody = models[0], models[2**of.n - 1]
            own = torch.stack([models[1 << client] for client in range(of.n)])
            part = kept["sizes"] / kept["sizes"].sum()
            after = {"the global model": (part[:, None].float() * kept["first"]).sum(0)}  # the first round's update

            def paid(at: int, outputs: Tensor | None, utility: Tensor | None) -> Tensor:
                told = {**kept, "outputs": {**kept["outputs"]}, "utilities": kept["utilities"].clone()}
                if outputs is not None:
                    told["outputs"][at], told["utilities"][at] = outputs, utility
                games = [semivalue(game(of, y, told, which), of.n, weight).values for which in ("singles", "both")]
                ways = [(1 - PART) * each[:, 0] + PART * each[:, 1] for each in games]
                return torch.stack(
                    [shares(way) for way in [*ways, semivalue_of_table(told["utilities"][:, None], weight)[:, 0]]]
                )

            def checks(client: int, model: Tensor, first: Tensor) -> list[bool]:
                """Whether each check raises an alarm."""
                moves = own.clone()
                moves[client] = model
                moves, sums = moves - start, kept["total"]
                cosines = F.cosine_similarity((moves - moves.mean(0))[client], sums - sums.mean(0), dim=1)
                far = (model - everybody).norm() / (model - start).norm()
                differs = (first - kept["first"][client]).norm() > 1e-3 * kept["first"][client].norm()
                return [bool(differs), bool(far < NEAR), int(cosines.argmax()) != client]

            honest = paid(0, None, None)
            for client in range(of.n):
                p = {k: v[None] for k, v in training.start.items()}
                first = flat(training.local(p, 0, client))[0] - start
                seen.setdefault("honest", []).append(checks(client, own[client], first))
                like = p
                for round_index in range(of.rounds):
                    like = training.local(like, round_index, client, training.others)
                trained = flat(training.local(p, 0, client, training.others))[0] - start
                other = (client + 1) % of.n
                told = {
                    LIES[0]: (everybody, after["the global model"]),
                    LIES[1]: ((everybody + own[client]) / 2, (after["the global model"] + kept["first"][client]) / 2),
                    LIES[2]: (own[other], kept["first"][other]),
                    LIES[3]: (flat(like)[0], trained),
                    LIES[4]: (own[client], first),
                }
                for lie, (model, early) in told.items():
                    if of.wrong == "duplicate" and lie == LIES[2] and client == 0:
                        continue
                    outputs, at = kept["outputs"][1 << client] * 10, 1 << client
                    if lie != LIES[4]:
                        sizes = [v.numel() for v in training.start.values()]
                        parts = model.split(sizes)
                        shaped = {k: v.view(1, *training.start[k].shape) for k, v in zip(training.start, parts)}
                        outputs = training.outputs(shaped, training.validation[0])[0]
                    now = paid(at, outputs, score(of, y, outputs[None])[0])
                    gains.setdefault(lie, []).append(100 * (now - honest)[:, client])
                    seen.setdefault(lie, []).append(checks(client, model, early))
    rows = [
        [
            "a client sends",
            *("each alone", "and all but one", "all trained"),
            "round 1",
            "distance",
            "direction",
            "any but round 1",
        ]
    ]
    for lie, alarms in seen.items():
        cells = ["", "", ""]
        if lie in gains:
            all_gains = torch.stack(gains[lie])
            cells = [f"{mean:+.1f} (up to {top:+.0f})" for mean, top in zip(all_gains.mean(0), all_gains.max(0).values)]
        flags = torch.tensor(alarms).double()
        late = flags[:, 1:].any(1).double().mean()
        rows.append([f"{lie} ({len(alarms)})", *cells, *(f"{100 * each:.0f} %" for each in (*flags.mean(0), late))])
    return grid(rows)


def picture(path: str) -> None:
    """Draw the coalitions of three clients as points of a simplex."""
    import matplotlib.pyplot as plt

    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, 0.75**0.5]]).double()
    sizes = torch.tensor([100.0, 200, 300])
    masks = all_coalitions(3)[1:]
    points = coalition_shares(masks, sizes) @ corners
    figure, axes = plt.subplots(figsize=(6.4, 4.6), dpi=130)
    axes.add_patch(plt.Polygon(corners.numpy(), facecolor="#f4f6fa", edgecolor="#8792a6", linewidth=1.2, zorder=0))
    kinds = {
        "trained: each client alone": (masks.sum(1) == 1, {"color": "#1f5fbf", "s": 150}),
        "trained: all clients, the run itself": (masks.sum(1) == 3, {"color": "#d1571b", "s": 170, "marker": "s"}),
        "predicted from the outputs of these four": (
            masks.sum(1) == 2,
            {"facecolors": "white", "edgecolors": "#1f5fbf", "s": 150, "linewidths": 2},
        ),
    }
    for label, (some, look) in kinds.items():
        axes.scatter(*points[some].T, label=label, zorder=3, **look)
    beside = {
        1: (-0.03, -0.075),
        2: (0.03, -0.075),
        4: (0.0, 0.05),
        3: (0.0, -0.075),
        5: (-0.15, 0.0),
        6: (0.15, 0.0),
        7: (0.0, -0.085),
    }
    for number, (right, up) in beside.items():
        members = [str(client) for client in range(3) if number >> client & 1]
        samples = int(sum(sizes[int(client)] for client in members))
        x, y = points[number - 1].tolist()
        axes.text(x + right, y + up, f"{{{', '.join(members)}}}: {samples}", ha="center", va="center", fontsize=10)
    axes.set_title("Three clients with 100, 200 and 300 samples: each coalition is a mixture of data", fontsize=10)
    axes.set(xlim=(-0.25, 1.25), ylim=(-0.32, 1.0), aspect="equal")
    axes.axis("off")
    axes.legend(loc="lower center", fontsize=9, frameon=False, ncols=1)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["train", "tune", "table", "brackets", "lies", "picture"])
    parser.add_argument("names", nargs="*", help="federations, tuning, held_out; the picture's path")
    parser.add_argument("--folder", type=Path, default=Path("runs/predicted"))
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args()
    be_quiet()
    sets = {"tuning": [*TUNING], "held_out": [*HELD_OUT]}
    names = [name for each in options.names for name in sets.get(each, [each])]
    if options.what == "train":
        train(names, options.folder)
    elif options.what == "picture":
        picture(*names)
    else:
        of_kind = {
            "tune": partial(tune, options.folder),
            "table": partial(table, options.folder, options.csv),
            "brackets": partial(brackets, options.folder),
            "lies": partial(lies, options.folder, names or HELD_OUT),
        }
        print(of_kind[options.what]())


if __name__ == "__main__":
    main()
