"""ShapleyFL's comparison: five scenarios x seven algorithms (Sun et al., KDD 2023, figures 1 and 2).

    python tools/shapleyfl_table.py [--root DATA] [--seeds 3] [--rounds 20] [--workers 2] [--out FILE.md]
    python tools/shapleyfl_table.py --full --root DATA      the paper's own setting: CIFAR-10, 100 clients, 150 rounds

The default is Fashion-MNIST on 20 clients with three label shards each (Dirichlet(0.5) for open-set noise), of which
30 % are malicious (none in the long tail). Accuracy of the global model on the test set after the last round, and the
AUROC with which the surrogate federated Shapley value (SSV) of AFedSV and AFedSV+ ranks the malicious clients below the
honest ones.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from common import be_quiet, quiet_trainer
from sklearn.metrics import roc_auc_score

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import FedAvg, GeometricMedian, ShapleySoftmax, ShapleyWeighted
from flsv.attacks import GradientPoisoning
from flsv.clients.algorithms import FedProx
from flsv.data import (
    ClosedSetLabelNoise,
    DirichletPartitioner,
    GaussianNoise,
    LongTail,
    OpenSetLabelNoise,
    ShardPartitioner,
)
from flsv.metrics import CumulativeShapley, PartialFederatedShapley, SurrogateFederatedShapley
from flsv.sampling import BernoulliSampler, ShapleyImportanceSampler, SoftmaxSampler


@dataclass(frozen=True)
class Setting:
    """What a preset fixes."""

    source: str = "fashion_mnist"
    network: str = "lenet5"
    clients: int = 20
    cohort: int = 6
    shards_per_client: int = 3
    malicious: float = 0.3
    samples: int | None = 12000
    validation: float = 0.025
    rounds: int = 20
    local_epochs: int = 2
    batch_size: int = 32
    lr: float = 0.05
    imbalance: float = 20.0
    estimator: str = "auto"
    accelerator: str = "cpu"


FULL = Setting(
    source="cifar10",
    network="shapley_fl_cifar",
    clients=100,
    cohort=20,
    shards_per_client=2,
    samples=None,
    validation=0.05,
    imbalance=100.0,
    rounds=150,
    local_epochs=5,
    lr=0.01,
    estimator="surrogate",
    accelerator="auto",
)

SCENARIOS = ("long tail", "open-set noise", "closed-set noise", "data noise", "gradient poisoning")
METHODS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "FedAvg": lambda s: {"aggregator": FedAvg(), "sampler": BernoulliSampler(s.cohort)},
    "FedProx": lambda s: {
        "aggregator": FedAvg(),
        "sampler": BernoulliSampler(s.cohort),
        "client_algorithm": FedProx(mu=0.01),
    },
    "FedSV": lambda s: {
        "metrics": {"sv": PartialFederatedShapley(estimator=s.estimator)},
        "aggregator": ShapleySoftmax("sv"),
        "sampler": BernoulliSampler(s.cohort),
    },
    "FedSV, by the sum": lambda s: {
        "metrics": {"sv": CumulativeShapley(estimator=s.estimator)},
        "aggregator": ShapleyWeighted("sv", normalize=True),
        "sampler": BernoulliSampler(s.cohort),
    },
    "S-FedAvg": lambda s: {
        "metrics": {"sv": PartialFederatedShapley(estimator=s.estimator, momentum=0.75, init="uniform")},
        "aggregator": FedAvg(),
        "sampler": SoftmaxSampler(s.cohort, "sv"),
    },
    "S-FedAvg, temperature 0.1": lambda s: {
        "metrics": {"sv": PartialFederatedShapley(estimator=s.estimator, momentum=0.75)},
        "aggregator": FedAvg(),
        "sampler": SoftmaxSampler(s.cohort, "sv", temperature=0.1),
    },
    "RFA": lambda s: {"aggregator": GeometricMedian(), "sampler": BernoulliSampler(s.cohort)},
    "AFedSV": lambda s: {
        "metrics": {"ssv": SurrogateFederatedShapley(estimator=s.estimator)},
        "aggregator": ShapleyWeighted("ssv"),
        "sampler": BernoulliSampler(s.cohort),
    },
    "AFedSV+": lambda s: {
        "metrics": {"ssv": SurrogateFederatedShapley(estimator=s.estimator)},
        "aggregator": ShapleyWeighted("ssv"),
        "sampler": ShapleyImportanceSampler(s.cohort, "ssv"),
    },
}


@dataclass(frozen=True)
class Result:
    scenario: str
    method: str
    seed: int
    accuracy: float
    auroc: float
    seconds: float


def scenario(name: str, setting: Setting, seed: int) -> tuple[dict[str, Any], list[Any]]:
    """The data module's arguments and the attacks of a scenario."""
    chosen: dict[str, Any] = {"fraction": setting.malicious, "seed": seed}
    partitioner: Any = ShardPartitioner(setting.clients, shards_per_client=setting.shards_per_client, seed=seed)
    corruptions: list[Any] = []
    attacks: list[Any] = []
    if name == "long tail":
        partitioner = LongTail(partitioner, imbalance_ratio=setting.imbalance)
    elif name == "open-set noise":
        # With shards, a client might have images of unknown classes only, and nothing to train on.
        partitioner = DirichletPartitioner(setting.clients, alpha=0.5, min_samples=50, seed=seed)
        corruptions = [OpenSetLabelNoise(unknown_classes=[0, 2, 4, 6, 8], **chosen)]
    elif name == "closed-set noise":
        corruptions = [ClosedSetLabelNoise(**chosen)]
    elif name == "data noise":
        corruptions = [GaussianNoise(**chosen)]
    elif name == "gradient poisoning":
        attacks = [GradientPoisoning(**chosen)]
    else:
        raise ValueError(f"scenario {name!r}: expected one of {SCENARIOS}.")
    return {"partitioner": partitioner, "corruptions": corruptions}, attacks


def run(scenario_name: str, method: str, seed: int, *, setting: Setting, root: str) -> Result:
    """One federation."""
    be_quiet()
    arguments, attacks = scenario(scenario_name, setting, seed)
    data = FederatedDataModule(
        setting.source,
        root=root,
        batch_size=setting.batch_size,
        max_samples=setting.samples,
        server_val_fraction=setting.validation,
        seed=seed,
        **arguments,
    )
    loop = FederatedLoop(
        **METHODS[method](setting),
        attacks=attacks,
        local_epochs=setting.local_epochs,
        figures_every=0,
        print_table=False,
        seed=seed,
    )
    L.seed_everything(seed, verbose=False)
    client = ClassifierClient(setting.network, optimizer=partial(torch.optim.SGD, lr=setting.lr))
    with tempfile.TemporaryDirectory() as folder:
        trainer = quiet_trainer(folder, setting.rounds, [loop], setting.accelerator)
        start = time.perf_counter()
        trainer.fit(client, data)
        seconds = time.perf_counter() - start
        accuracy = trainer.test(client, data, verbose=False)[0]["test_accuracy"]
    malicious = attacks[0].chosen(setting.clients) if attacks else data.malicious
    auroc = float("nan")
    if "ssv" in loop.contributions and 0 < len(malicious) < setting.clients:
        bad = torch.zeros(setting.clients)
        bad[malicious] = 1
        auroc = float(roc_auc_score(bad, -loop.board.with_priors()["ssv"]))
    return Result(scenario_name, method, seed, accuracy, auroc, seconds)


def report(results: list[Result], setting: Setting, seeds: int) -> str:
    """The tables, in Markdown."""

    def cell(values: list[float], scale: float, digits: int) -> str:
        known = [v * scale for v in values if v == v]
        if not known:
            return "-"
        spread = statistics.stdev(known) if len(known) > 1 else 0.0
        return f"{statistics.mean(known):.{digits}f} ± {spread:.{digits}f}"

    def rows(methods: list[str], value: Callable[[Result], float], scale: float, digits: int) -> Iterator[str]:
        yield "| | " + " | ".join(SCENARIOS) + " |"
        yield "|---" * (len(SCENARIOS) + 1) + "|"
        for method in methods:
            cells = [
                cell([value(r) for r in results if (r.scenario, r.method) == (name, method)], scale, digits)
                for name in SCENARIOS
            ]
            yield f"| {method} | " + " | ".join(cells) + " |"

    done = [m for m in METHODS if any(r.method == m for r in results)]
    ranked = [m for m in done if m.startswith("AFedSV")]
    lines = [
        "**Test accuracy, %**, mean ± standard deviation of the seeds",
        "",
        *rows(done, lambda r: r.accuracy, 100, 1),
    ]
    lines += ["", "**AUROC of SSV**, malicious clients below honest ones", "", *rows(ranked, lambda r: r.auroc, 1, 2)]
    lines += ["", "**Seconds per run**", "", *rows(done, lambda r: r.seconds, 1, 1)]
    values = ", ".join(f"{name} {value}" for name, value in asdict(setting).items())
    return "\n".join([*lines, "", f"Setting: {values}; {seeds} seeds (0 to {seeds - 1})."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", default=os.environ.get("FLSV_DATA_ROOT", "data"))
    parser.add_argument("--full", action="store_true", help="the paper's own setting, for a GPU")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=SCENARIOS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--out", type=Path, help="write the tables there, too")
    arguments = parser.parse_args()
    setting = FULL if arguments.full else Setting()
    if arguments.rounds:
        setting = replace(setting, rounds=arguments.rounds)
    jobs = [(s, m, seed) for seed in range(arguments.seeds) for s in arguments.scenarios for m in arguments.methods]
    start, results = time.perf_counter(), []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for result in pool.map(partial(_call, setting=setting, root=arguments.root), jobs):
            results.append(result)
            print(f"{len(results)}/{len(jobs)} {result}", flush=True)
    text = report(results, setting, arguments.seeds)
    text += f"\n\n{time.perf_counter() - start:.0f} s with {arguments.workers} workers, torch {torch.__version__}."
    print(text)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")


def _call(job: tuple[str, str, int], *, setting: Setting, root: str) -> Result:
    return run(*job, setting=setting, root=root)


if __name__ == "__main__":
    main()
