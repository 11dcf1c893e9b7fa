"""FedBary's contribution shares beside Shapley values (figure 4): five kinds of clients, and no validation data.

MR is the sum of the rounds' exact Shapley values, GTG and TMC estimates of the same games, all from one federation;
exact is the Shapley value of the 31 federations trained from scratch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from common import be_quiet, build, quiet_trainer
from fedbary_common import Check, Setting, cell, table
from scipy.stats import spearmanr

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import Files, Splits
from flsv.functional.shapley import exact_shapley
from flsv.games.retraining import RetrainedUtility
from flsv.metrics import CumulativeShapley
from flsv.seeding import generator_for
from flsv.valuation import FedBary, Valuation, participants_of

SCENARIOS = Path(__file__).parents[1] / "configs" / "scenarios"
SOURCES = ("cifar10", "fashion_mnist")
CASES = {
    "1 same": "fedbary_same",
    "2 classes": "fedbary_classes",
    "3 sizes": "fedbary_sizes",
    "4 label noise": "fedbary_label_noise",
    "5 feature noise": "fedbary_feature_noise",
    "no validation": "fedbary_no_validation",
}
METHODS = ("FedBary", "exact", "MR", "GTG", "TMC")

Job = tuple[str, str, str, int]


def jobs(setting: Setting, seeds: Sequence[int]) -> list[Job]:
    return [("contributions", case, source, seed) for seed in seeds for source in SOURCES for case in CASES]


def federation(case: str, source: str, seed: int, setting: Setting, root: str, **kwargs: Any) -> FederatedDataModule:
    """The data of a scenario file, with every seed set."""
    scenario = yaml.safe_load((SCENARIOS / f"{CASES[case]}.yaml").read_text())["data"]
    data = FederatedDataModule(
        source,
        build(scenario["partitioner"], seed=seed),
        corruptions=[build(each, seed=seed) for each in scenario.get("corruptions", [])],
        batch_size=32,
        files=Files(root=root),
        splits=Splits(
            max_samples=setting.federation_samples,
            server_val=scenario.get("splits", {}).get("server_val", setting.federation_validation),
            seed=seed,
        ),
        **kwargs,
    )
    data.setup("fit")
    return data


def trainer(rounds: int, setting: Setting, folder: str, **kwargs: Any) -> L.Trainer:
    """For one federation; keywords go to the loop."""
    return quiet_trainer(
        folder, rounds, [FederatedLoop(**kwargs, reporting=Reporting(figures=0, table=False))], setting.accelerator
    )


def model() -> ClassifierClient:
    return ClassifierClient("lenet5", optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9))


def work(job: Job, setting: Setting) -> float:
    """Steps of training: rounds and images; all of a training set are 50,000 or 60,000."""
    return setting.rounds * (setting.federation_samples or 60_000)


def run(job: Job, setting: Setting, root: str) -> dict[str, Any]:
    """FedBary's distances ``[5]`` and every method's values ``[5]`` and seconds."""
    _, case, source, seed = job
    be_quiet()
    data = federation(case, source, seed, setting, root)
    start = time.perf_counter()
    found = value(data, setting, seed)
    result = {
        "distances": found.distances.tolist(),
        "values": {"FedBary": found.shares.tolist()},
        "seconds": {"FedBary": time.perf_counter() - start},
    }
    if case == "no validation":
        return result
    metrics = {
        "MR": CumulativeShapley(estimator="exact"),
        "GTG": CumulativeShapley(estimator="gtg"),
        "TMC": CumulativeShapley(estimator="permutation", estimator_args={"truncation": 0.01, "num_permutations": 10}),
    }
    L.seed_everything(seed, verbose=False)
    client = model()
    with tempfile.TemporaryDirectory() as folder:
        fit = trainer(setting.rounds, setting, folder, metrics=metrics, seed=seed)
        start = time.perf_counter()
        fit.fit(client, data)
        result["seconds"]["MR"] = time.perf_counter() - start
        result["values"] |= {name: metric.compute().tolist() for name, metric in metrics.items()}
        if setting.retrained:
            L.seed_everything(seed, verbose=False)
            start = time.perf_counter()
            game = RetrainedUtility(
                lambda cohort: trainer(setting.rounds, setting, folder, sampler=cohort, seed=seed), model(), data
            )
            result["values"]["exact"] = exact_shapley(game, game.num_players).values.tolist()
            result["seconds"]["exact"] = time.perf_counter() - start
    return result


def value(data: FederatedDataModule, setting: Setting, seed: int) -> Valuation:
    """Distances in the pixels, without judging samples."""
    clients, server = participants_of(data)
    valuer = FedBary("pixels", support=setting.support // 4, iterations=5, workers=1, allow_reconstruction=True)
    return valuer.value(clients, server, generator_for(seed, "fedbary"), judge=False)


def report(results: dict[Job, dict[str, Any]], setting: Setting, image: object = None) -> tuple[list[str], list[Check]]:
    size = "all" if setting.federation_samples is None else str(setting.federation_samples)
    lines = [
        f"Five clients, {size} images with the server's part ({setting.federation_validation:.2f}), LeNet5, "
        f"{setting.rounds} rounds, S = {setting.support // 4}. "
        "Shares in %: FedBary's are (1/W) / sum (1/W) in the pixels with labels; of Shapley values, the value by "
        "the sum of all.",
    ]
    checks = []
    for source in SOURCES:
        here = {job: r for job, r in results.items() if job[2] == source}
        for case in [c for c in CASES if any(job[1] == c for job in here)]:
            found = [r for job, r in here.items() if job[1] == case]
            rows = []
            for method in METHODS:
                shares = [_shares(r["values"][method]) for r in found if method in r["values"]]
                if shares:
                    rows.append([method, *(cell(client, 1, 100) for client in zip(*shares, strict=True))])
            rows.append(["W", *(cell(client, 2) for client in zip(*(r["distances"] for r in found), strict=True))])
            lines += ["", f"**{source}, case {case}**", "", *table(["", *(f"client {i}" for i in range(1, 6))], rows)]
            checks += _checks(source, case, found)
    seconds = {
        m: [r["seconds"][m] for r in results.values() if m in r["seconds"] and "MR" in r["seconds"]] for m in METHODS
    }
    spent = ", ".join(f"{m} {statistics.mean(v):.1f}" for m, v in seconds.items() if v)
    lines += ["", f"Seconds per federation (MR's are of the training and all three coalition metrics): {spent}."]
    return lines, checks


def _shares(values: list[float]) -> list[float]:
    total = sum(values)
    return [v / total if total else float("nan") for v in values]


def _checks(source: str, case: str, found: list[dict[str, Any]]) -> list[Check]:
    shares = torch.tensor([r["values"]["FedBary"] for r in found])
    if case in ("1 same", "3 sizes"):
        far = 100 * float((shares - 0.2).abs().max())
        allowed = 1.0 if case == "1 same" else 2.0
        return [
            Check(
                f"{source}, case {case}: all shares within {allowed:.0f} points of 20 %", f"{far:.2f}", far <= allowed
            )
        ]
    if case in ("4 label noise", "5 feature noise"):
        ranks = [float(spearmanr(range(5), row).statistic) for row in shares.tolist()]
        text = f"Spearman correlation of noise and share {statistics.mean(ranks):.2f} (mean of the seeds)"
        return [
            Check(f"{source}, case {case}: the more noise, the smaller the share", text, statistics.mean(ranks) <= -0.9)
        ]
    if case == "no validation":
        ratios = [r["distances"][4] / max(r["distances"][:4]) for r in found]
        text = f"least ratio to the farthest clean one {min(ratios):.3f}"
        return [Check(f"{source}, no validation: the noisy client is the farthest", text, min(ratios) > 1)]
    return []
