"""FedBary's time against the number of clients, and its competitors' (table 2), in the processor's seconds.

These change less than the clock's with what else the machine does. Competitors value the clients of a federation of
Fashion-MNIST. MR (exact values of every round) and GTG are timed without the training, as in the paper; exact and
DataSV (truncated Monte Carlo, Ghorbani and Zou) train a federation for every coalition that they ask for, which is
their time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import wraps
from typing import Any

import lightning as L
import numpy as np
import torch
from fedbary_common import Check, Setting, cell, table
from fedbary_contributions import model, trainer
from table_statistics import against, gather

from flsv import FederatedDataModule
from flsv.data import Files, IIDPartitioner, Splits
from flsv.functional.shapley import exact_shapley, permutation_shapley
from flsv.games.retraining import RetrainedUtility
from flsv.metrics import CumulativeShapley
from flsv.seeding import generator_for
from flsv.valuation import FedBary, clients_of, server_of

DIMENSIONS = 50
LIMIT = 120.0
COMPARED = (5, 10)
# By how many clients they are run: 2^10 trainings are too many here.
COMPETITORS = {"MR": (5, 10), "GTG": (5, 10), "DataSV": (5, 10), "exact": (5,)}
PAPER = {
    "S = 100": ("1 m", "2 m", "14 m", "21 m"),
    "S = 500": ("2 m", "4 m", "30 m", "1 h"),
    "MR": ("5 m", "40 m"),
    "GTG": ("33 s", "7 m"),
    "DataSV": ("25 m", "2 h 30 m"),
    "exact": ("31 m", "3 h 20 m"),
}
PAPER_CLIENTS = (5, 10, 50, 100)

Job = tuple[str, str, int, int]


def jobs(setting: Setting, seeds: Sequence[int]) -> list[Job]:
    """What is timed, for every seed, which also says how much a time changes from run to run."""
    wanted = [(f"S = {support}", n) for support in setting.time_supports for n in setting.time_clients]
    wanted += [(name, n) for name, sizes in COMPETITORS.items() for n in sizes if n in setting.time_clients]
    return [("time", name, n, seed) for name, n in wanted for seed in seeds]


def work(job: Job, setting: Setting) -> float:
    """Programmes of m by S, of which S is the job's; or rounds and images."""
    if job[1] in COMPETITORS:
        return setting.time_rounds * setting.time_samples
    return setting.time_iterations * setting.time_samples**2


def run(job: Job, setting: Setting, root: str) -> dict[str, Any]:
    """``seconds``."""
    _, name, n, seed = job
    return {"seconds": _competitor(name, n, setting, root, seed) if name in COMPETITORS else _fedbary(job, setting)}


def _fedbary(job: Job, setting: Setting) -> float:
    """Of the protocol with n clients of normal samples, ten classes."""
    _, name, n, seed = job
    generator = generator_for(seed, "time")
    y = torch.arange(setting.time_samples) % 10

    def draw() -> torch.Tensor:
        return torch.randn(len(y), DIMENSIONS, generator=generator) + y[:, None]

    clients, server = clients_of([(draw(), y) for _ in range(n)]), server_of(draw(), y)
    support = int(name.removeprefix("S = "))
    method = FedBary(
        "pixels", support=support, iterations=setting.time_iterations, workers=1, allow_reconstruction=True
    )
    start = time.process_time()
    method.value(clients, server, generator, judge=False)
    return time.process_time() - start


def _competitor(name: str, n: int, setting: Setting, root: str, seed: int) -> float:
    samples = setting.time_samples
    data = FederatedDataModule(
        "fashion_mnist",
        IIDPartitioner(n, seed=seed),
        batch_size=32,
        files=Files(root=root),
        splits=Splits(max_samples=(n + 1) * samples, server_val=1 / (n + 1), seed=seed),
    )
    data.setup("fit")
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        if name in ("MR", "GTG"):
            metric = CumulativeShapley(estimator="exact" if name == "MR" else "gtg")
            spent = _timed(metric)
            trainer(setting.time_rounds, setting, folder, metrics={name: metric}, seed=seed).fit(model(), data)
            return sum(spent)
        game = RetrainedUtility(
            lambda cohort: trainer(setting.time_rounds, setting, folder, sampler=cohort, seed=seed),
            model(),
            data,
            max_clients=n,
        )
        start = time.process_time()
        if name == "exact":
            exact_shapley(game, n)
        else:
            permutation_shapley(game, n, num_permutations=10, truncation=0.01, generator=generator_for(seed, "DataSV"))
        return time.process_time() - start


def _timed(metric: CumulativeShapley) -> list[float]:
    """The seconds of the metric's updates to come."""
    update, spent = metric.update, []

    @wraps(update)
    def timed(*arguments: Any, **named: Any) -> None:
        start = time.process_time()
        update(*arguments, **named)
        spent.append(time.process_time() - start)

    metric.update = timed  # type: ignore[method-assign]
    return spent


def report(results: dict[Job, dict[str, Any]], setting: Setting, image: object = None) -> tuple[list[str], list[Check]]:
    lines = [
        f"Processor's seconds, {setting.time_samples} samples a client; in brackets the paper's. FedBary: {DIMENSIONS} "
        f"features and labels, K = {setting.time_iterations}. The others: Fashion-MNIST, LeNet5, {setting.time_rounds} "
        "rounds, as many validation images as a client has; the time of all but FedBary grows with the rounds.",
        "",
    ]
    rows, checks = [], []
    for name in dict.fromkeys(job[1] for job in results):
        runs: dict[int, list[float]] = {}
        for (_, each, n, _), result in results.items():
            if each == name:
                runs.setdefault(n, []).append(result["seconds"])
        seconds = {n: statistics.mean(found) for n, found in runs.items()}
        paper = dict(zip(PAPER_CLIENTS, PAPER.get(name, ())))
        shown = [f"{cell(runs[n], 1)} s ({paper.get(n, '-')})" if n in runs else "-" for n in setting.time_clients]
        rows.append([f"FedBary, {name}" if name not in COMPETITORS else name, *shown])
        if name in COMPETITORS:
            continue
        if len(seconds) > 2:
            r2 = float(np.corrcoef(list(seconds), list(seconds.values()))[0, 1] ** 2)
            checks.append(Check(f"{name}: linear in n, R^2 at least 0.98", f"{r2:.4f}", r2 >= 0.98))
        if name == "S = 100" and 100 in seconds:
            checks.append(
                Check(f"n = 100, S = 100 in less than {LIMIT:.0f} s", f"{seconds[100]:.1f} s", seconds[100] < LIMIT)
            )
    lines += table(["", *(f"n = {n}" for n in setting.time_clients)], rows)
    beside = gather(
        {(name, f"n = {n}", seed): found for (_, name, n, seed), found in results.items() if n in COMPARED},
        lambda found: found["seconds"],
    )
    ours, others = f"S = {setting.time_supports[0]}", [name for name in COMPETITORS if name in beside.get("n = 5", {})]
    if others:
        lines += ["", "FedBary's seconds minus the others', 95 % paired interval:", "", against(beside, ours, others)]
    return lines, checks
