"""ShapFed's figures 3 and 5 and tables 1 and 2 (Tastan et al., IJCAI 2024), on what is at hand.

    python tools/shapfed_table.py [--root DATA] [--workers 2] [--out docs/results/shapfed.md]
    python tools/shapfed_table.py --full --root DATA              the paper's networks and rounds, for a GPU
    python tools/shapfed_table.py --experiments "figure 3"        no data needed

Figure 3: class-specific Shapley values (CSSV) and true class-wise Shapley values of four clients with four classes in
two blocks. Figure 5: CSSV and CGSV against the true Shapley values of five hospitals with chest X-rays. Tables:
balanced accuracy of each client's model on the test set, training alone and with each algorithm, and collaborative
fairness; once for the models that the clients trained in the last round, since the paper's FedAvg rows differ between
clients, and once for those they then receive.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from common import be_quiet, grid, quiet_trainer, spread
from torch import Tensor

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import CGSV, FedAvg, ShapFedWA
from flsv.cli.compare import Models, Outcome, run
from flsv.data import ProportionPartitioner
from flsv.metrics import ClassSpecificShapley, CosineGradientShapley, PartialFederatedShapley
from flsv.personalization import ShapFedPersonalizer, SparsifiedReward, Standalone

SCENARIOS = Path(__file__).parents[1] / "configs" / "scenarios"


@dataclass(frozen=True)
class Setting:
    """One experiment: data, partition (a file of ``configs/scenarios``), network and training."""

    source: str
    scenario: str
    network: str
    rounds: int
    lr: float
    network_args: dict[str, Any] | None = None
    partition: dict[str, Any] | None = None
    momentum: float = 0.0
    weight_decay: float = 0.0
    local_epochs: int = 1
    batch_size: int = 32
    samples: int | None = None
    scale: float = 1.0  # length of CGSV's normalised updates, near the clients' own
    accelerator: str = "cpu"


# The paper gives neither centres nor training for figure 3. Local training has to be long enough for client 2 to learn
# its rare class 2 (9 % of its samples) within a round: with one local epoch its true value for that class is near 0,
# whereas the cosine does not see how little it has, and the correlation is 0.64 to 0.89.
FIGURE_3 = Setting(
    "gaussians",
    "shapfed_synthetic",
    "mlp",
    rounds=10,
    lr=0.05,
    network_args={"hidden": [16]},
    local_epochs=10,
)
# Equal volumes, as the text to figure 5 has it, and the paper's 50 rounds. With two classes the head's rows are mirror
# images, and a client's update pulls along the mean of its (positive) features, towards the class of which it has more.
# CSSV of updates therefore does not reliably tell P1 and P5 from P2 and P4; CSSV of weights does.
FIGURE_5 = Setting(
    "pneumoniamnist.npz",
    "shapfed_chest_xray",
    "shapfed_cnn",
    rounds=50,
    lr=0.01,
    partition={"of": "client"},
    momentum=0.9,
    weight_decay=5e-4,
    scale=0.5,
)
TABLES = {
    "Chest X-ray, heterogeneous": replace(FIGURE_5, rounds=30),
    "Fashion-MNIST, imbalanced": Setting(
        "fashion_mnist", "shapfed_imbalanced", "lenet5", rounds=40, lr=0.02, momentum=0.9, samples=4000
    ),
    "Fashion-MNIST, heterogeneous": Setting(
        "fashion_mnist", "shapfed_heterogeneous", "lenet5", rounds=40, lr=0.02, momentum=0.9, samples=4000
    ),
    "CIFAR-10, imbalanced": Setting(
        "cifar10", "shapfed_imbalanced", "shapfed_cnn", rounds=20, lr=0.02, momentum=0.9, samples=4000
    ),
    "CIFAR-10, heterogeneous": Setting(
        "cifar10", "shapfed_heterogeneous", "shapfed_cnn", rounds=20, lr=0.02, momentum=0.9, samples=4000
    ),
    "HAM10000, six clinics": Setting("ham10000_28.npz", "shapfed_ham10000", "lenet5", rounds=60, lr=0.02, momentum=0.9),
}


def full(setting: Setting) -> Setting:
    """The paper's (section 5.2): ResNet-34, EfficientNet-B0, 50 and 200 rounds, SGD with rate 0.01, all data."""
    plain = replace(setting, lr=0.01, rounds=50, samples=None, batch_size=64, accelerator="auto")
    if setting.network == "mlp":
        return setting
    if setting.source == "pneumoniamnist.npz":
        return plain
    if setting.source == "ham10000_28.npz":
        return replace(plain, network="timm:efficientnet_b0", rounds=200, momentum=0.0)
    return replace(plain, network="resnet34_small", momentum=0.0)


METHODS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "Individual": lambda s: {"personalizer": Standalone()},
    "FedAvg": lambda s: {"aggregator": FedAvg("uniform")},  # equation 4
    "CGSV": lambda s: {
        "metrics": {"cgsv": CosineGradientShapley()},
        "aggregator": CGSV(scale=s.scale),
        "personalizer": SparsifiedReward(),
    },
    "ShapFed-WA": lambda s: {"metrics": {"cssv": ClassSpecificShapley()}, "aggregator": ShapFedWA()},
    "ShapFed": lambda s: {
        "metrics": {"cssv": ClassSpecificShapley()},
        "aggregator": ShapFedWA(),
        "personalizer": ShapFedPersonalizer(),
    },
}


def federation(setting: Setting, strategies: dict[str, Any], seed: int, root: str) -> tuple[Outcome, FederatedLoop]:
    """One federation, trained."""
    be_quiet()
    scenario = yaml.safe_load((SCENARIOS / f"{setting.scenario}.yaml").read_text())["data"]
    arguments = {**scenario["partitioner"]["init_args"], **(setting.partition or {}), "seed": seed}
    data = FederatedDataModule(
        setting.source,
        ProportionPartitioner(**arguments),
        root=root,
        batch_size=setting.batch_size,
        max_samples=setting.samples,
        server_val_fraction=0.1,
        seed=seed,
    )
    quiet = {"figures_every": 0, "print_table": False}
    loop = FederatedLoop(**strategies, local_epochs=setting.local_epochs, keep_trained=True, seed=seed, **quiet)
    L.seed_everything(seed, verbose=False)
    sgd = partial(torch.optim.SGD, lr=setting.lr, momentum=setting.momentum, weight_decay=setting.weight_decay)
    client = ClassifierClient(setting.network, setting.network_args, optimizer=sgd)
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, setting.rounds, [loop], setting.accelerator)
        return run(setting.scenario, trainer, client, data), loop


@dataclass(frozen=True)
class Figure3:
    """CSSV and the true class-wise values ``[4, 4]``, and what they have to show."""

    cssv: Tensor
    true: Tensor

    @property
    def blocks(self) -> Tensor:
        """``[2, 2]``: the means of CSSV's blocks, own classes on the diagonal."""
        return self.cssv.unflatten(0, (2, 2)).unflatten(2, (2, 2)).mean((1, 3))

    @property
    def gap(self) -> float:
        """The least diagonal block's mean minus the largest off-diagonal one's."""
        (a, b), (c, d) = self.blocks.tolist()
        return min(a, d) - max(b, c)

    @property
    def correlation(self) -> float:
        """Pearson's, over the 16 cells."""
        return correlation(self.cssv.flatten(), self.true.flatten())


def figure_3(seed: int, setting: Setting = FIGURE_3, root: str = "data") -> Figure3:
    """Both kinds of values in one federation, with the same momentum."""
    metrics = {
        "cssv": ClassSpecificShapley(),
        "true": PartialFederatedShapley(per_class=True, estimator="exact", momentum=0.9),
    }
    _, loop = federation(setting, {"aggregator": FedAvg("uniform"), "metrics": metrics}, seed, root)
    return Figure3(loop.contributions["cssv"], loop.contributions["true"])


@dataclass(frozen=True)
class Figure5:
    """``[5]`` each: gamma of CSSV, of updates and of weights, CGSV's reputations, true Shapley values."""

    cssv: Tensor
    cssv_of_weights: Tensor
    cgsv: Tensor
    true: Tensor


def figure_5(seed: int, setting: Setting = FIGURE_5, root: str = "data") -> Figure5:
    """All of them in one federation; the true values are those of the balanced accuracy on the server's set."""
    metrics = {
        "cssv": ClassSpecificShapley(),
        "cssv_of_weights": ClassSpecificShapley(source="weights"),
        "cgsv": CosineGradientShapley(),
        "true": PartialFederatedShapley(performance="balanced_accuracy", estimator="exact", momentum=0.9),
    }
    _, loop = federation(setting, {"aggregator": FedAvg("uniform"), "metrics": metrics}, seed, root)
    values = {name: metric.per_client(loop.contributions[name]) for name, metric in loop.metrics.items()}
    return Figure5(**values)


def correlation(x: Tensor, y: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([x.double(), y.double()]))[0, 1])


# ---- reports


def report_figure_3(results: Sequence[Figure3]) -> str:
    def matrix(name: str, values: Sequence[Tensor]) -> list[list[str]]:
        mean = torch.stack(list(values)).mean(0)
        head = [name, *(f"class {j}" for j in range(mean.shape[1]))]
        return [head, *([f"client {i}", *(f"{v:.2f}" for v in row)] for i, row in enumerate(mean.tolist()))]

    gaps, correlations = [result.gap for result in results], [result.correlation for result in results]
    return "\n\n".join(
        [
            grid(matrix("CSSV", [result.cssv for result in results])),
            grid(matrix("true", [result.true for result in results])),
            f"Least diagonal block's mean minus largest off-diagonal one's: {spread(gaps, 2)} "
            f"({', '.join(f'{gap:.2f}' for gap in gaps)}). Pearson's correlation over the 16 cells: "
            f"{spread(correlations, 3)} ({', '.join(f'{r:.3f}' for r in correlations)}).",
        ]
    )


def report_figure_5(results: Sequence[Figure5]) -> str:
    rows = [["", *(f"P{i + 1}" for i in range(5)), "r with true", "P3 first", "P1, P5 last"]]
    for name in ("cssv", "cssv_of_weights", "cgsv", "true"):
        values = [getattr(result, name) for result in results]
        orders = [value.argsort(descending=True).tolist() for value in values]
        digits = 3 if name != "true" else 4
        cells = [spread([float(value[i]) for value in values], digits) for i in range(5)]
        r = spread([correlation(value, result.true) for value, result in zip(values, results)], 2)
        first = sum(order[0] == 2 for order in orders)
        last = sum(set(order[3:]) == {0, 4} for order in orders)
        rows.append([name.replace("_", " "), *cells, r, f"{first}/{len(orders)}", f"{last}/{len(orders)}"])
    return grid(rows)


def report_table(results: dict[tuple[str, int], Outcome], models: Models) -> str:
    """One experiment, its results by method and seed; a negative mean gain in bold, as the paper's red."""
    measure = "balanced_accuracy"
    methods = [method for method in METHODS if any(m == method for m, _ in results)]
    seeds = sorted({seed for _, seed in results})
    alone = {seed: results["Individual", seed] for seed in seeds}
    clients = len(alone[seeds[0]].scores[models][measure])
    rows = [["", *(f"P{i + 1}" for i in range(clients)), "mean", "Corr.", "global", "seconds"]]
    for method in methods:
        runs = {seed: results[method, seed] for seed in seeds}
        own = torch.stack([100 * run.scores[models][measure] for run in runs.values()])
        gains = torch.stack([run.gains(alone[seed], measure, models) for seed, run in runs.items()]).mean(0)
        cells = [spread(own[:, i].tolist(), 1) for i in range(clients)]
        cells = [f"**{cell}**" if gain < 0 else cell for cell, gain in zip(cells, gains.tolist())]
        fairness, overall = "-", "-"
        if method != "Individual":
            fairness = spread([run.fairness(alone[seed], measure, models) for seed, run in runs.items()], 2)
            overall = spread([100 * run.scores["global"][measure].item() for run in runs.values()], 1)
        seconds = spread([run.seconds for run in runs.values()], 1)
        rows.append([method, *cells, spread(own.mean(1).tolist(), 1), fairness, overall, seconds])
    return grid(rows)


# ---- jobs

Job = tuple[str, str, int]  # experiment, method (or "") and seed


def work(job: Job, *, settings: dict[str, Setting], root: str) -> Figure3 | Figure5 | Outcome:
    name, method, seed = job
    setting = settings[name]
    if name == "figure 3":
        return figure_3(seed, setting, root)
    if name == "figure 5":
        return figure_5(seed, setting, root)
    return federation(setting, METHODS[method](setting), seed, root)[0]


def main() -> None:
    everything = {"figure 3": FIGURE_3, "figure 5": FIGURE_5, **TABLES}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--full", action="store_true", help="the paper's networks and rounds, for a GPU")
    parser.add_argument("--seeds", type=int, default=3, help="of the tables")
    parser.add_argument("--figure-seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, help="of every experiment")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--experiments", nargs="+", default=list(everything), choices=list(everything), metavar="NAME")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, help="write the report there, too")
    arguments = parser.parse_args()
    settings = {name: full(everything[name]) if arguments.full else everything[name] for name in arguments.experiments}
    if arguments.rounds:
        settings = {name: replace(setting, rounds=arguments.rounds) for name, setting in settings.items()}
    methods = [method for method in METHODS if method in {"Individual", *arguments.methods}]
    jobs: list[Job] = []
    for name in settings:
        figure = name.startswith("figure")
        for seed in range(arguments.figure_seeds if figure else arguments.seeds):
            jobs += [(name, method, seed) for method in ([""] if figure else methods)]
    start, results = time.perf_counter(), {}
    with ProcessPoolExecutor(arguments.workers) as pool:
        for job, result in zip(jobs, pool.map(partial(work, settings=settings, root=arguments.root), jobs)):
            results[job] = result
            print(f"{len(results)}/{len(jobs)} {job} {time.perf_counter() - start:.0f} s", flush=True)
    parts = [report(name, setting, results) for name, setting in settings.items()]
    seconds = time.perf_counter() - start
    parts.append(f"{seconds:.0f} s with {arguments.workers} workers, torch {torch.__version__}.")
    text = "\n\n".join(parts) + "\n"
    print(text)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text)


def report(name: str, setting: Setting, results: dict[Job, Any]) -> str:
    """One experiment's section."""
    mine = {(method, seed): result for (experiment, method, seed), result in results.items() if experiment == name}
    if name == "figure 3":
        body = report_figure_3(list(mine.values()))
    elif name == "figure 5":
        body = report_figure_5(list(mine.values()))
    else:
        trained, received = (report_table(mine, models) for models in ("trained", "received"))
        body = f"Models after the last local training:\n\n{trained}\n\nModels received after it:\n\n{received}"
    seeds = len({seed for _, seed in mine})
    return f"## {name[0].upper()}{name[1:]}\n\n{body}\n\n{setting}; {seeds} seeds."


if __name__ == "__main__":
    main()
