"""FedBary's protocol against POT: distances with S = m and S < m, and the barycenter of three Gaussians (figure 3)."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ot
import torch
from fedbary_common import Check, Setting, cell, pca_features, split, table
from matplotlib.figure import Figure

from flsv.functional.transport import TransportClient, federated_wasserstein, label_embedding, wasserstein_barycenter
from flsv.seeding import generator_for

ITERATIONS = 20
PARTS_OF_M = (1, 2, 5, 10)
STEPS = (1, 2, 3, 5, 10)
MEANS = ((0.0, 0.0), (6.0, 0.0), (3.0, 5.0))
COVARIANCE = ((1.0, 0.4), (0.4, 0.6))

Job = tuple[str, str, int]


def jobs(setting: Setting, seeds: Sequence[int]) -> list[Job]:
    return [("protocol", what, seed) for what in ("normal", "labeled images", "barycenter") for seed in seeds]


def work(job: Job, setting: Setting) -> float:
    """Programmes of m by m; the barycenter is of 300 points at any sizes."""
    return setting.protocol_samples**3 if job[1] != "barycenter" else 1.0


def run(job: Job, setting: Setting, root: str) -> dict[str, Any]:
    _, what, seed = job
    return _barycenter(setting, seed) if what == "barycenter" else _distance(what, setting, root, seed)


def _distance(what: str, setting: Setting, root: str, seed: int) -> dict[str, Any]:
    m = setting.protocol_samples
    if what == "normal":
        generator = generator_for(seed, "samples")
        x, x2 = torch.randn(m, 10, generator=generator), 1.5 * torch.randn(m, 10, generator=generator) + 1
    else:
        part = split("fashion_mnist", root, m, m, seed)
        pca = pca_features(part)
        x, x2 = label_embedding(pca(part.x), part.y), label_embedding(pca(part.val_x), part.val_y)
    cost = ot.dist(x.double().numpy(), x2.double().numpy())
    exact = float(ot.emd2(ot.unif(m), ot.unif(m), cost)) ** 0.5
    found = {
        share: federated_wasserstein(
            x,
            x2,
            support=m // share,
            iterations=ITERATIONS,
            generator=generator_for(seed, "gamma"),
            allow_reconstruction=True,
        ).history
        for share in PARTS_OF_M
    }
    return {"errors": {str(share): (history / exact - 1).tolist() for share, history in found.items()}}


def _barycenter(setting: Setting, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    sets = [rng.multivariate_normal(mean, COVARIANCE, size=100) for mean in MEANS]
    weights = [ot.unif(100)] * 3
    reference = ot.lp.free_support_barycenter(sets, weights, rng.standard_normal((100, 2)) + 3, numItermax=200)
    clients = [TransportClient(torch.from_numpy(points), allow_reconstruction=True) for points in sets]
    found = {
        steps: wasserstein_barycenter(
            clients,
            support=100,
            iterations=steps,
            initial=torch.randn(100, 2, generator=generator_for(seed, "start"), dtype=torch.float64),
            generator=generator_for(seed, "support"),
        ).support_points.numpy()
        for steps in STEPS
    }
    return {
        "sets": [points.tolist() for points in sets],
        "reference": reference.tolist(),
        "found": {str(k): points.tolist() for k, points in found.items()},
        "errors": {str(k): _w2(found[k], reference) for k in STEPS},
    }


def _w2(a: np.ndarray, b: np.ndarray) -> float:
    return float(ot.emd2(ot.unif(len(a)), ot.unif(len(b)), ot.dist(a, b))) ** 0.5


def report(results: dict[Job, dict[str, Any]], setting: Setting, image: Path | None) -> tuple[list[str], list[Check]]:
    lines = [
        f"Relative error of the protocol's distance against `ot.emd2`, {setting.protocol_samples} samples a side.",
        "",
    ]
    checks = []
    kept = (1, 2, 5, 10, 15, 20)
    rows = []
    for what in ("normal", "labeled images"):
        errors = [r["errors"] for (_, name, _), r in results.items() if name == what]
        if not errors:
            continue
        for share in PARTS_OF_M:
            label = "S = m" if share == 1 else f"S = m / {share}"
            medians = [statistics.median(e[str(share)][k - 1] for e in errors) for k in kept]
            rows.append([what, label, *(f"{v:.1e}" for v in medians)])
        worst = max(abs(e["1"][-1]) for e in errors)
        checks.append(Check(f"{what}: S = m within 1e-3 after {ITERATIONS} iterations", f"{worst:.1e}", worst <= 1e-3))
        least = min(e[str(share)][-1] for e in errors for share in PARTS_OF_M[1:])
        checks.append(Check(f"{what}: S < m above the exact distance", f"least excess {least:.1e}", least > 0))
    lines += table(["samples", "support", *(f"K = {k}" for k in kept)], rows)
    found = [r for (_, name, _), r in results.items() if name == "barycenter"]
    if found:
        errors = [r["errors"] for r in found]
        lines += ["", "2-Wasserstein distance from the federated barycenter of three Gaussians (100 points each) to "]
        lines[-1] += "`ot.lp.free_support_barycenter`'s (figure 3):"
        lines += ["", *table([f"K = {k}" for k in STEPS], [[cell([e[str(k)] for e in errors], 3) for k in STEPS]])]
        means = [statistics.mean(e[str(k)] for e in errors) for k in STEPS]
        shrinks = all(later < earlier for earlier, later in pairwise(means)) and means[-1] < means[0] / 2
        checks.append(
            Check("barycenter: shrinks with K, to less than a half", f"{means[0]:.3f} to {means[-1]:.3f}", shrinks)
        )
        if image is not None:
            _draw(found[0], image)
            lines += ["", f"![Three Gaussians and their barycenter](../images/{image.name})"]
    return lines, checks


def _draw(result: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10, 3.2), dpi=110, layout="constrained")
    for axis, steps in zip(figure.subplots(1, 3, sharex=True, sharey=True), (1, 3, 10)):
        for points in result["sets"]:
            axis.scatter(*zip(*points), s=6, color="#b8b8b8")
        axis.scatter(*zip(*result["reference"]), s=14, color="#d95f02", label="with access to the samples")
        axis.scatter(*zip(*result["found"][str(steps)]), s=8, color="#1b6ca8", label="federated")
        axis.set_title(f"K = {steps}, distance {result['errors'][str(steps)]:.3f}", fontsize=10)
    axis.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
