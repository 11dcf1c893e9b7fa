"""What noise for privacy leaves of contributions: rank correlation with the values without noise, against epsilon.

    python tools/run_table.py tools/tables/privacy_contributions.yaml [--columns digits] [--out FILE.md]

Per seed one federation is trained without privacy, and again, from the same start on the same batches, with every
amount of noise: :class:`flsv.privacy.GaussianPrivacy` is all that differs. All metrics watch the same FedAvg. Ranks are
compared by Spearman's correlation over the clients; values that do not tell clients apart at all count as 0. Three rows
say what could be expected: clipping without noise, no privacy with another start and other batches, and the clients'
numbers of samples in place of any values, which the server knows anyway. There is no larger preset: --full is the same.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from common import grid
from scipy.stats import spearmanr
from table_cells import Results
from table_runs import Cell, Measured, built, federated_loop, trained
from table_statistics import paired
from torch import Tensor

from flsv.privacy import gaussian_epsilon
from flsv.report.folder import CONTRIBUTIONS

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
    values = {name: loop.metrics[name].per_client(loop.contributions[name]).tolist() for name in NAMES}  # type: ignore[operator]
    samples = cli.datamodule.num_samples.tolist()
    accuracy = 100 * hits.float().mean().item()
    return {"values": values, "samples": samples, "accuracy": accuracy, "norm": statistics.median_low(norms), **cost}


def last_norms(path: Path) -> list[float]:
    """Of every client's last update, as the server saw it."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "update_norm"]
    return list({row["client"]: float(row["value"]) for row in rows}.values())


# ---- the report


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


def of_column(results: Results, column: str) -> str:
    """The table of one federation."""
    runs = {(row, seed): found for (row, where, seed), found in results.items() if where == column}
    free = {seed: found for (row, seed), found in runs.items() if row == FREE}
    lines = [["", "epsilon", *NAMES.values(), "accuracy"]]
    for row in (FREE, AGAIN, CLIPPED, *NOISE):
        mine = {seed: found for (name, seed), found in runs.items() if name == row and seed in free}
        if not mine:
            continue
        accuracy = f"{statistics.mean(found['accuracy'] for found in mine.values()):.1f}"
        if row == FREE:
            lines.append([row, "∞", *("1" for _ in NAMES), accuracy])
            continue
        epsilon = f"{gaussian_epsilon(NOISE[row], ROUNDS):,.1f}" if row in NOISE else "∞"
        told = [interval([alike(found, free[seed], name) for seed, found in mine.items()]) for name in NAMES]
        lines.append([row, epsilon, *told, accuracy])
    sizes = [
        interval(
            [likeness(torch.tensor(each["samples"]), torch.tensor(each["values"][name])) for each in free.values()]
        )
        for name in NAMES
    ]
    lines.append(["numbers of samples, no values", "-", *sizes, "-"])
    norm = statistics.mean(each["norm"] for each in free.values())
    clip = CLIPS[column]
    about = f"Clipped at {clip}; updates without privacy: {norm:.2f} in the median of the last round."
    return f"## {column}\n\n{about}\n\n{grid(lines)}"


def alike(found: Mapping[str, Any], other: Mapping[str, Any], name: str) -> float:
    return likeness(torch.tensor(found["values"][name]), torch.tensor(other["values"][name]))


def report(results: Results, cells: Sequence[Cell]) -> str:
    there = {column for row, column, _ in results if row == FREE}
    parts = [of_column(results, column) for column in CLIPS if column in there]
    seeds = len({cell.seed for cell in cells})
    parts.append(
        f"Spearman's correlation over the clients with the values without noise: mean of {seeds} seeds, 95 % interval "
        "of the mean. Epsilon of one client after all rounds, delta = 1e-5."
    )
    return "\n\n".join(parts)
