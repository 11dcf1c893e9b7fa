"""What is measured for tables that are of no paper: natural clients, in-run values, adapters of a language model,
what an update shows of its data, and what noise for privacy leaves of contributions."""

from __future__ import annotations

import copy
import csv
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from cells import CONFIGS, QUIET, Cell, Measured, built, federated_loop, trained, written
from common import quiet_trainer
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.benchmark.scores import spearman
from flsv.cli.parser import make_cli
from flsv.clients.algorithms import InRunValues
from flsv.data import DirichletPartitioner, Splits
from flsv.data.sources.named import digits
from flsv.metrics import (
    CosineGradientShapley,
    CumulativeShapley,
    GradientAgreement,
    GradientShapley,
    InRunShapley,
    ShadowShapley,
)
from flsv.parameters import ParameterSpace
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.report.folder import CONTRIBUTIONS
from flsv.seeding import generator_for

# ---- natural federations


def natural(cell: Cell, root: str) -> Measured:
    """Contributions and numbers of samples of a natural federation in which a client's targets are dealt out at random
    among its own training samples; of client "nobody": as they are. Pairs of runs share the network's seed, the split
    and the order of the batches; values are losses taken off, in the loss's unit."""
    files, more = [str(CONFIGS / file) for file in cell.files], {**cell.overrides}
    victim = more.pop("victim")
    options = {name: value for name, value in QUIET.items() if not name.endswith((".every", ".figures"))}
    options |= {"data.source.init_args.root": root, "seed_everything": cell.seed, "data.splits.seed": cell.seed}
    options |= {"data.source.init_args.seed": cell.seed, **more}
    with tempfile.TemporaryDirectory() as folder:
        arguments = [f"--{name}={written(value)}" for name, value in options.items()]
        given = [part for file in files for part in ("--config", file)]
        cli = make_cli([*given, *arguments, "--trainer.default_root_dir", folder], run=False)
        cli.datamodule.setup("fit")
        if victim != "nobody":
            rows = cli.datamodule.client_indices(int(victim))
            shuffle_targets(cli.datamodule.source.train_set.tensors[-1], rows, cell.seed)
        cli.trainer.fit(cli.model, cli.datamodule)
    values = federated_loop(cli.trainer).metrics["shapley"].compute()
    return {"values": values.tolist(), "samples": cli.datamodule.num_samples.tolist()}


def shuffle_targets(targets: Tensor, rows: Tensor, seed: int) -> None:
    """Deal the rows' targets out anew among them, in place; characters ``[N, L]`` among all places of the rows."""
    own = targets[rows]
    order = torch.randperm(own.numel(), generator=torch.Generator().manual_seed(seed))
    targets[rows] = own.flatten()[order].view_as(own)


def shuffled(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> dict[str, dict[str, float]]:
    """Of the client whose targets are shuffled: its values in both runs, and whether its own is the lowest of all."""
    if row == "nobody" or "nobody" not in beside:
        return {}
    client, clean = int(row), beside["nobody"]["values"]
    before, after = clean[client], run["values"][client]
    found = {"samples": run["samples"][client], "value": before, "value if shuffled": after}
    lowest = min(range(len(clean)), key=run["values"].__getitem__) == client
    return {f"client {row}": {**found, "difference": after - before, "lower": after < before, "last of all": lowest}}


# ---- in-run values of some steps only


class MislabeledDigits(L.LightningDataModule):
    """Digits of which a fifth of the training labels is wrong at random, and 200 clean ones to validate on.

    Attributes:
        is_wrong: whose label is, by the image's bytes.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        images, labels = digits().train.tensors  # type: ignore[attr-defined]
        draw = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(images), generator=draw)
        mine, clean = order[200:], order[:200]
        wrong = torch.rand(len(mine), generator=draw) < 0.2
        other = (labels[mine] + torch.randint(1, 10, (len(mine),), generator=draw)) % 10
        self.train = TensorDataset(images[mine], torch.where(wrong, other, labels[mine]))
        self.val = TensorDataset(images[clean], labels[clean])
        self.is_wrong = {image.numpy().tobytes(): bool(bad) for image, bad in zip(images[mine], wrong)}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=16)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.val, batch_size=200)


def in_run_every(cell: Cell, root: str) -> Measured:
    """By ``every``: the AUROC of wrong labels by samples' values, and how samples' and classes' values agree with those
    of ``every=1``. A client's whole value does not depend on it."""
    given, clients = MislabeledDigits(cell.seed), range(6)
    samples: dict[int, Tensor] = {}
    classes: dict[int, Tensor] = {}
    for every in (1, 2, 4, 8):
        dealt = DirichletPartitioner(6, alpha=1.0, min_samples=60, seed=cell.seed)
        data = FederatedDataModule(given, dealt, splits=Splits(seed=cell.seed))
        loop = FederatedLoop(
            metrics={"in_run": InRunShapley()},
            client_algorithm=InRunValues(every),
            seed=cell.seed,
            reporting=Reporting(figures=0, table=False),
        )
        torch.manual_seed(cell.seed)
        module = ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8), network_args={"hidden": [64]})
        with tempfile.TemporaryDirectory() as folder:
            quiet_trainer(folder, cell.overrides["rounds"], [loop]).fit(module, data)
        kept = loop.state_dict()["clients"]
        samples[every] = torch.cat([kept[client]["in_run_values"] for client in clients])
        classes[every] = loop.board.contributions["in_run"][:, :10].flatten()
    loaders = [data.client_loader(client, "train", shuffle=False) for client in clients]
    wrong = [given.is_wrong[image.numpy().tobytes()] for loader in loaders for batch in loader for image in batch[0]]
    return {
        f"every={every}": {
            "classes, with every=1": spearman(classes[every], classes[1]),
            "samples, with every=1": spearman(samples[every], samples[1]),
            "AUROC of wrong labels": float(roc_auc_score(wrong, -samples[every])),
        }
        for every in samples
    }


# ---- a language model, fine-tuned by adapters

LOSS: dict[str, Any] = {"performance": "val_loss", "mode": "min"}
METRICS: dict[str, Callable[[], Any]] = {
    "CosineGradientShapley": CosineGradientShapley,
    "GradientShapley": lambda: GradientShapley(loss="val_loss", momentum=0.5),
    "GradientAgreement": lambda: GradientAgreement(loss="val_loss"),
    "CumulativeShapley": lambda: CumulativeShapley(weighting="samples", **LOSS),
    "InRunShapley": lambda: InRunShapley(loss="val_loss"),
    "ShadowShapley": lambda: ShadowShapley(coalitions="singles", **LOSS),
}


def adapters(cell: Cell, root: str) -> Measured:
    """The federation of ``examples/language_model.py``: five groups of tales, one of them, the seed mod 5, with its
    characters shuffled. ``bad`` and ``others``: values by the row's metric; ``lowest``: whether the bad one's is;
    ``cpu``: the fit's seconds. With ``pieces``, 30 % of everybody's pieces are shuffled, and ``auroc`` says how well
    in-run values of single pieces tell them from the others."""
    sys.path.insert(0, str(CONFIGS.parent / "examples"))
    import language_model as example

    network = example.pretrained(Path(root), Path("runs/language_model/news"))
    rounds, bad = cell.overrides["rounds"], cell.seed % 5
    in_run = cell.row == "InRunShapley"
    metrics = {"it": METRICS[cell.row]()} if cell.row in METRICS else {}
    if cell.overrides.get("pieces"):
        data, shuffled_pieces = pieces(example, Path(root), cell.seed)
    else:
        data = example.federation(Path(root), bad, cell.seed)
    start = time.process_time()
    loop = example.fit(network, data, metrics, rounds, cell.seed, InRunValues() if in_run else None)
    found: Measured = {"cpu": time.process_time() - start}
    if cell.overrides.get("pieces"):
        kept = loop.state_dict()["clients"]
        scores = torch.cat([-kept[client]["in_run_values"] for client in range(5)])
        return {**found, "auroc": float(roc_auc_score(shuffled_pieces.numpy(), scores.numpy()))}
    if metrics:
        values = loop.metrics["it"].per_client(loop.metrics["it"].compute()).roll(-bad).tolist()  # type: ignore[operator]
        found |= {"bad": values[0], "others": values[1:], "lowest": values[0] == min(values)}
    return found


def pieces(example: Any, root: Path, seed: int) -> tuple[FederatedDataModule, Tensor]:
    """Tales of which each piece has its characters shuffled with probability 0.3, and which have."""
    own, val = example.tales(root)
    draw, bad = torch.Generator().manual_seed(seed), []
    for tokens in own.values():
        bad.append(torch.rand(len(tokens), generator=draw) < 0.3)
        for row in bad[-1].nonzero().flatten().tolist():
            tokens[row] = tokens[row][torch.randperm(example.LENGTH, generator=draw)]
    clients = {group: example.Pieces(tokens) for group, tokens in own.items()}
    data = FederatedDataModule(clients=clients, val=example.Pieces(val), batch_size=16, labels=False)
    return data, torch.cat(bad)


def cost(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> float | None:
    """Processor seconds, in those of the fine-tuning alone."""
    plain = beside.get("fine-tuning alone")
    return None if plain is None or "auroc" in run else run["cpu"] / plain["cpu"]


# ---- what an update shows of its data

LEARNING_RATE = 0.1
CLIP = 0.3  # below the updates' norms, 0.36 and more on 8x8 digits, 2 and more on MNIST
SMOOTHING = (0.001, 0.01, 0.1)


def inversion(cell: Cell, root: str) -> Measured:
    """How like an attacker's image is to the digit on which a client took one step of SGD; the seed is the digit.

    Zhu, Liu and Han, "Deep Leakage from Gradients" (DLG), NeurIPS 2019: search for the image whose gradient is the one
    observed. The label is read off the gradient (iDLG, arXiv 2001.02610), gradients are compared by their angle, and
    images preferred that are smooth (Geiping et al., NeurIPS 2020, equation 4). Where there is noise, the best of
    several amounts of smoothing is taken, which an attacker could only guess.
    """
    image, label = digit(cell.seed, cell.column, root)
    net, noise = dlg_network(image.shape[-1], seed=cell.seed), cell.overrides["noise"]
    update = one_step(net, image, label)
    if noise is not None:
        update = GaussianPrivacy(CLIP, noise).protect(update, generator_for(cell.seed, "noise"))
    attempts = [invert(net, -update, image.shape, amount) for amount in (SMOOTHING if noise else (0.0,))]
    best, guess = max(attempts, key=lambda each: likeness(each[0].clamp(0, 1), image))
    error = float((best.clamp(0, 1) - image).square().mean())
    found = {"squared error": error, "PSNR (dB)": -10 * math.log10(error), "label found": guess == int(label)}
    epsilon = math.inf if not noise else gaussian_epsilon(noise, 1)
    return {**found, "correlation": likeness(best.clamp(0, 1), image), "epsilon of one release": epsilon}


def digit(which: int, source: str, root: str) -> tuple[Tensor, Tensor]:
    """The first image ``[1, H, W]`` in [0, 1] of a class, and its label."""
    if source == "digits":
        from sklearn.datasets import load_digits

        data = load_digits()
        images, labels = torch.tensor(data.images).float() / 16, torch.tensor(data.target)
    else:
        from torchvision.datasets import MNIST

        mnist = MNIST(root, train=False)
        images, labels = mnist.data.float() / 255, mnist.targets
    first = int((labels == which).nonzero()[0])
    return images[first][None], labels[first]


def dlg_network(size: int, seed: int) -> nn.Sequential:
    """DLG's LeNet: three 5x5 convolutions of 12 channels with sigmoids, and a classifier."""
    width = math.ceil(math.ceil(size / 2) / 2)
    layers = [nn.Conv2d(1, 12, 5, stride=2, padding=2), nn.Sigmoid(), nn.Conv2d(12, 12, 5, stride=2, padding=2)]
    layers += [nn.Sigmoid(), nn.Conv2d(12, 12, 5, padding=2), nn.Sigmoid()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * width**2, 10))
    generator = generator_for(seed, "network")
    for parameter in net.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5, generator=generator)
    return net


def one_step(net: nn.Module, image: Tensor, label: Tensor) -> Tensor:
    """A client's update ``[P]`` after one step of SGD on one image."""
    loss = nn.functional.cross_entropy(net(image[None]), label[None])
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    names = [name for name, _ in net.named_parameters()]
    return -LEARNING_RATE * ParameterSpace(net).flatten(dict(zip(names, gradients)))


def invert(net: nn.Module, gradient: Tensor, shape: Sequence[int], smoothness: float = 0.0) -> tuple[Tensor, int]:
    """The one image ``[C, H, W]`` behind a gradient ``[P]`` times any positive number, and its label."""
    head = ParameterSpace(net).head
    assert head is not None
    observed = gradient.double()
    # Of one image's logits only the true class's has a negative gradient; a row is that times positive features.
    label = int(head.rows(gradient).sum(-1).argmin())
    network = copy.deepcopy(net).double().eval()
    parameters = list(network.parameters())
    image = observed.new_zeros(1, *shape).requires_grad_()

    def objective() -> float:
        image.grad = None
        loss = nn.functional.cross_entropy(network(image), torch.tensor([label]))
        mine = torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters, create_graph=True)])
        value = 1 - torch.dot(mine, observed) / (mine.norm() * observed.norm())
        if smoothness:  # times the mean total variation
            value = value + smoothness * (image.diff(dim=-1).abs().mean() + image.diff(dim=-2).abs().mean())
        value.backward(inputs=[image])
        return value.item()

    search = {"max_iter": 150, "max_eval": 300, "history_size": 50, "line_search_fn": "strong_wolfe"}
    torch.optim.LBFGS([image], tolerance_grad=1e-12, tolerance_change=1e-14, **search).step(objective)
    return image.detach()[0].to(gradient.dtype), label


def likeness(found: Tensor, image: Tensor) -> float:
    """Pearson's correlation over the pixels, 0 for an empty image."""
    return torch.corrcoef(torch.stack([found.flatten(), image.flatten()]))[0, 1].nan_to_num().item()


# ---- what noise for privacy leaves of contributions

FREE, AGAIN, CLIPPED = "no privacy", "no privacy, another start", "clipped, no noise"
NOISE = {f"sigma = {sigma:g}": sigma for sigma in (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)}
NAMES = {"cssv": "CSSV", "cgsv": "CGSV", "ssv": "SSV", "fedsv": "FedSV"}
ROUNDS = 10
CLIPS = {"digits": 1.0, "Fashion-MNIST": 0.5}


def noise(at: Mapping[str, Any], full: bool) -> dict[str, Any]:
    """The noise of a row; another start only of :data:`AGAIN`."""
    if at["row"] == FREE:
        return {}
    if at["row"] == AGAIN:
        return {"seed_everything": at["seed"] + 1000, "federation.seed": at["seed"] + 1000}
    arguments = {"clip": CLIPS[at["column"]], "noise_multiplier": NOISE.get(at["row"], 0.0)}
    return {"federation.uploads": [{"class_path": "flsv.privacy.GaussianPrivacy", "init_args": arguments}]}


def watched(cell: Cell, root: str) -> Measured:
    """Every metric's values and the clients' samples, ``n`` numbers each; the global model's accuracy on the server's
    validation set, in %, and the median norm of the last round's updates."""
    with built(cell, root) as cli:
        cost = trained(cli)
        loop = federated_loop(cli.trainer)
        module = cli.model.eval()
        with torch.no_grad():
            hits = torch.cat([module(x).argmax(1) == y for x, y in cli.datamodule.val_dataloader()])
        norms = last_norms(Path(cli.trainer.default_root_dir) / CONTRIBUTIONS)
    values = {name: loop.metrics[name].per_client(loop.board.contributions[name]).tolist() for name in NAMES}  # type: ignore[operator]
    samples = cli.datamodule.num_samples.tolist()
    accuracy = 100 * hits.float().mean().item()
    return {"values": values, "samples": samples, "accuracy": accuracy, "norm": statistics.median_low(norms), **cost}


def last_norms(path: Path) -> list[float]:
    """Of every client's last update, as the server saw it."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "update_norm"]
    return list({row["client"]: float(row["value"]) for row in rows}.values())


def rank_likeness(values: Tensor, others: Tensor) -> float:
    """Spearman's correlation; 0 where one side does not tell the clients apart, or not all are finite."""
    if not bool((values.isfinite() & others.isfinite()).all()) or min(len(values.unique()), len(others.unique())) < 2:
        return 0.0
    return float(spearmanr(values.double().numpy(), others.double().numpy()).statistic)


def alike(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> dict[str, dict[str, float]]:
    """By row and metric: the correlation with the values without noise; of the run without, of the samples' numbers."""
    if FREE not in beside:
        return {}
    name, free = ("numbers of samples, no values" if row == FREE else row), beside[FREE]["values"]
    own = dict.fromkeys(free, run["samples"]) if row == FREE else run["values"]
    return {name: {NAMES[m]: rank_likeness(torch.tensor(own[m]), torch.tensor(free[m])) for m in NAMES}}


def epsilon(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> float | None:
    """Of one client after all rounds, delta = 1e-5."""
    return gaussian_epsilon(NOISE[row], ROUNDS) if row in NOISE else None
