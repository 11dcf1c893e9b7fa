"""FedBary's time against the number of clients (table 2). To be measured while nothing else runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fedbary_common import Check, Setting, table

from flsv.seeding import generator_for
from flsv.valuation import FedBary, clients_of, server_of

DIMENSIONS = 50
LIMIT = 120.0

Job = tuple[str, int, int]


def jobs(setting: Setting, seeds: Sequence[int]) -> list[Job]:
    return [("time", support, n) for support in setting.time_supports for n in setting.time_clients]


def run(job: Job, setting: Setting, root: str, workers: int = 2) -> dict[str, Any]:
    """Seconds of the protocol with n clients of normal samples, ten classes, on a thread pool."""
    _, support, n = job
    generator = generator_for(0, "time")
    y = torch.arange(setting.time_samples) % 10

    def draw() -> torch.Tensor:
        return torch.randn(len(y), DIMENSIONS, generator=generator) + y[:, None]

    clients, server = clients_of([(draw(), y) for _ in range(n)]), server_of(draw(), y)
    start = time.perf_counter()
    method = FedBary(
        "pixels", support=support, iterations=setting.time_iterations, workers=workers, allow_reconstruction=True
    )
    method.value(clients, server, generator, judge=False)
    return {"seconds": time.perf_counter() - start}


def report(results: dict[Job, dict[str, Any]], setting: Setting, image: object = None) -> tuple[list[str], list[Check]]:
    paper = {(100, 5): "1 m", (100, 10): "2 m", (100, 50): "14 m", (100, 100): "21 m"}
    paper |= {(500, 5): "2 m", (500, 10): "4 m", (500, 50): "30 m", (500, 100): "1 h"}
    lines = [
        f"{setting.time_samples} samples a client, {DIMENSIONS} features and labels, K = {setting.time_iterations}, "
        "two threads; in brackets the paper's.",
        "",
    ]
    rows, checks = [], []
    for support in sorted({job[1] for job in results}):
        seconds = {n: r["seconds"] for (_, s, n), r in results.items() if s == support}
        rows.append(
            [f"S = {support}", *(f"{seconds[n]:.1f} s ({paper.get((support, n), '-')})" for n in setting.time_clients)]
        )
        if len(seconds) > 2:
            r2 = float(np.corrcoef(list(seconds), list(seconds.values()))[0, 1] ** 2)
            checks.append(Check(f"S = {support}: linear in n, R^2 at least 0.98", f"{r2:.4f}", r2 >= 0.98))
        if support == 100 and 100 in seconds:
            checks.append(
                Check(f"n = 100, S = 100 in less than {LIMIT:.0f} s", f"{seconds[100]:.1f} s", seconds[100] < LIMIT)
            )
    return lines + table(["", *(f"n = {n}" for n in setting.time_clients)], rows), checks
