"""What noise for privacy leaves of contributions: rank correlation with the values without noise, against epsilon.

    python tools/privacy_contributions.py [--root DATA] [--out docs/results/privacy_contributions.md]

Per seed one federation is trained without privacy, and again, from the same start on the same batches, with every
amount of noise: :class:`flsv.privacy.GaussianPrivacy` is all that differs. All metrics watch the same FedAvg. Ranks are
compared by Spearman's correlation over the clients; values that do not tell clients apart at all count as 0. Three rows
say what could be expected: clipping without noise, no privacy with another start and other batches, and the clients'
numbers of samples in place of any values, which the server knows anyway. Fashion-MNIST is left out without its files
below --root ($FLSV_DATA_ROOT).
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import lightning as L
import torch
from common import be_quiet, grid, quiet_trainer
from scipy.stats import spearmanr
from table_statistics import paired
from torch import Tensor

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.data import DirichletPartitioner
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionMetric,
    CosineGradientShapley,
    CumulativeShapley,
    SurrogateFederatedShapley,
)
from flsv.privacy import GaussianPrivacy, gaussian_epsilon

NOISE = (0.001, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
CLIPPED, AGAIN = "clipped, no noise", "no privacy, another start"
NAMES = {"cssv": "CSSV", "cgsv": "CGSV", "ssv": "SSV", "fedsv": "FedSV"}


@dataclass(frozen=True)
class Setting:
    """One federation of softmax regressions: few parameters, so that noise does the least. ``clip`` is about twice the
    median norm of its last updates: clipping alone should change little."""

    source: str
    clip: float
    lr: float
    clients: int = 8
    alpha: float = 0.5
    min_samples: int = 20
    samples: int | None = 4000
    rounds: int = 10


SETTINGS = {
    "digits": Setting("digits", clip=1.0, lr=0.1, samples=None),
    "Fashion-MNIST": Setting("fashion_mnist", clip=0.5, lr=0.02),
}

Job = tuple[str, float | str | None, int]  # federation, noise multiplier or the name of a row, seed


@dataclass(frozen=True)
class Trained:
    """One federation's values ``[n]`` by metric, the clients' samples ``[n]``, the global model's validation accuracy,
    and the updates' median norm."""

    values: dict[str, Tensor]
    samples: Tensor
    accuracy: float
    norm: float


class Norms(ContributionMetric):
    """The norms of the updates as the server sees them, ``[num_clients]`` of the last round."""

    per_class = False

    def init_states(self, num_clients: int, num_classes: int | None) -> None:
        self.add_state("norms", torch.full((num_clients,), float("nan")), dist_reduce_fx="max")

    def update(self, client_ids: Tensor, client_updates: Tensor) -> None:
        self.norms[client_ids] = client_updates.norm(dim=1)

    def compute(self) -> Tensor:
        return self.norms


def train(setting: Setting, noise: float | str | None, seed: int, root: str) -> Trained:
    """A federation with this noise; None: without privacy."""
    be_quiet()
    data = FederatedDataModule(
        setting.source,
        DirichletPartitioner(setting.clients, setting.alpha, setting.min_samples, seed=seed),
        root=root,
        batch_size=16,
        max_samples=setting.samples,
        server_val_fraction=0.2,
        seed=seed,
    )
    metrics = {
        "cssv": ClassSpecificShapley(),
        "cgsv": CosineGradientShapley(),
        "ssv": SurrogateFederatedShapley(estimator="exact"),
        "fedsv": CumulativeShapley(estimator="exact"),
        "norms": Norms(),
    }
    privacy = None
    if noise == CLIPPED or isinstance(noise, float):
        privacy = GaussianPrivacy(setting.clip, noise if isinstance(noise, float) else 0.0)
    start = seed + 1000 * (noise == AGAIN)
    loop = FederatedLoop(metrics=metrics, privacy=privacy, figures_every=0, print_table=False, seed=start)
    L.seed_everything(start, verbose=False)
    client = ClassifierClient("softmax", optimizer=partial(torch.optim.SGD, lr=setting.lr))
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, setting.rounds, [loop])
        trainer.fit(client, data)
    client.eval()
    with torch.no_grad():
        hits = torch.cat([client(x).argmax(1) == y for x, y in data.val_dataloader()])
    values = {name: loop.metrics[name].per_client(loop.contributions[name]).cpu() for name in NAMES}  # type: ignore[operator]
    return Trained(values, data.num_samples, hits.float().mean().item(), loop.contributions["norms"].median().item())


def likeness(values: Tensor, others: Tensor) -> float:
    """Spearman's correlation; 0 where one side does not tell the clients apart, or not all are finite."""
    if not bool((values.isfinite() & others.isfinite()).all()) or min(len(values.unique()), len(others.unique())) < 2:
        return 0.0
    return float(spearmanr(values.double().numpy(), others.double().numpy()).statistic)


def interval(correlations: Sequence[float]) -> str:
    """Mean and 95 % confidence interval of the mean (Student's t over the seeds), which ends at -1 and 1."""
    found = paired(dict(enumerate(correlations)), dict.fromkeys(range(len(correlations)), 0.0))
    if found.pairs < 2:
        return f"{found.mean:.2f}"
    return f"{found.mean:.2f} [{max(found.low, -1):.2f}, {min(found.high, 1):.2f}]"


def report(name: str, setting: Setting, results: dict[Job, Trained]) -> str:
    """The table of one federation."""
    mine = {(noise, seed): found for (which, noise, seed), found in results.items() if which == name}
    rows = [["", "epsilon", *NAMES.values(), "accuracy"]]
    for noise in dict.fromkeys(noise for noise, _ in mine):
        runs = {seed: found for (amount, seed), found in mine.items() if amount == noise}
        accuracy = f"{sum(100 * run.accuracy for run in runs.values()) / len(runs):.1f}"
        if noise is None:
            rows.append(["no privacy", "∞", *("1" for _ in NAMES), accuracy])
            continue
        epsilon = f"{gaussian_epsilon(noise, setting.rounds):,.1f}" if isinstance(noise, float) else "∞"
        title = f"sigma = {noise:g}" if isinstance(noise, float) else noise
        pairs = {m: [likeness(run.values[m], mine[None, seed].values[m]) for seed, run in runs.items()] for m in NAMES}
        rows.append([title, epsilon, *(interval(pairs[m]) for m in NAMES), accuracy])
    alone = [found for (noise, _), found in mine.items() if noise is None]
    sizes = [interval([likeness(run.samples, run.values[m]) for run in alone]) for m in NAMES]
    rows.append(["numbers of samples, no values", "-", *sizes, "-"])
    norm = sum(run.norm for run in alone) / len(alone)
    size = "all" if setting.samples is None else f"{setting.samples:,}"
    about = (
        f"{setting.clients} clients, Dirichlet({setting.alpha}) labels, softmax regression, {size} samples with the "
        f"server's fifth, {setting.rounds} rounds of one epoch, SGD {setting.lr}, clipped at {setting.clip} (updates "
        f"without privacy: {norm:.2f} in the median of the last round)."
    )
    return f"## {name}\n\n{about}\n\n{grid(rows)}"


def work(job: Job, settings: dict[str, Setting], root: str) -> Trained:
    name, noise, seed = job
    return train(settings[name], noise, seed, root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--noise", type=float, nargs="+", default=list(NOISE), help="noise multipliers")
    parser.add_argument("--federations", nargs="+", default=list(SETTINGS), choices=list(SETTINGS), metavar="NAME")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    arguments = parser.parse_args()
    there = Path(arguments.root, "FashionMNIST").is_dir()
    chosen = {name: SETTINGS[name] for name in arguments.federations if there or not name.startswith("Fashion")}
    amounts: list[float | str | None] = [None, AGAIN, CLIPPED, *arguments.noise]
    jobs: list[Job] = [(name, noise, seed) for name in chosen for noise in amounts for seed in range(arguments.seeds)]
    start = time.perf_counter()
    with ProcessPoolExecutor(arguments.workers) as pool:
        found = pool.map(partial(work, settings=chosen, root=arguments.root), jobs)
        results = dict(zip(jobs, found))
    parts = [report(name, setting, results) for name, setting in chosen.items()]
    parts.append(
        f"Spearman's correlation over the clients with the values without noise: mean of {arguments.seeds} seeds, 95 % "
        f"interval of the mean. Epsilon of one client after all rounds, delta = 1e-5. {len(jobs)} federations in "
        f"{time.perf_counter() - start:.0f} s, {arguments.workers} worker of one thread, torch {torch.__version__}."
    )
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


if __name__ == "__main__":
    main()
