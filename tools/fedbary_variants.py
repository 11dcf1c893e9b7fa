"""FedBary's potentials that one could ask for bad samples (figure 2), and what noise does to the distance (figure 5a).

With P the client's samples, Q the server's, gamma between them, and eta_P and eta_Q the interpolants of either side and
gamma, the five potentials of figure 2 are those of P towards gamma, P towards eta_Q, P towards Q (with access), eta_P
towards eta_Q and eta_P towards Q, the last two being the server's. A row of eta_P is one sample's only where S = m:
so it is here, where the samples can also be read off (``fedbary_reconstruction.py``). All are debiased and calibrated
as equation 11 has it, with labels and features in one cost, as in the paper.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from fedbary_common import Check, Setting, cell, pca_features, split, table
from sklearn.metrics import roc_auc_score
from table_statistics import paired

from flsv.data import ClosedSetLabelNoise, GaussianNoise
from flsv.functional.transport import (
    TransportClient,
    TransportServer,
    calibrated_gradient,
    debiased_potential,
    label_embedding,
)
from flsv.seeding import generator_for

SOURCES = ("mnist", "fashion_mnist", "cifar10")
RATES = (0.0, 0.05, 0.15, 0.3)
NOISES = ("feature noise", "label flips")
POTENTIALS = {
    "gamma": "P to gamma",
    "eta": "P to eta_Q",
    "access": "P to Q",
    "servergamma": "eta_P to eta_Q",
    "servereta": "eta_P to Q",
}
SHOWN = (1, 2, 5, 10)

Job = tuple[str, str, int]


def jobs(setting: Setting, seeds: Sequence[int]) -> list[Job]:
    return [("variants", source, seed) for source in SOURCES for seed in seeds]


def work(job: Job, setting: Setting) -> float:
    """Programmes of m by m."""
    return setting.iterations * setting.variants_samples**3


def run(job: Job, setting: Setting, root: str) -> dict[str, Any]:
    """By noise and rate: the distances of all iterations, and by potential AUROC, how many are positive, and the share
    of the bad samples among them."""
    _, source, seed = job
    m = setting.variants_samples
    part = split(source, root, m, m, seed)
    results = {}
    for noise in NOISES:
        # Noise on all pixels is next to invisible in principal components.
        features = (lambda x: x.flatten(1)) if noise == "feature noise" else pca_features(part)
        server = label_embedding(features(part.val_x), part.val_y)
        for rate in RATES:
            x, y = part.x.clone(), part.y.clone()
            if rate:
                corruption = (
                    GaussianNoise(sample_rate=rate)
                    if noise == "feature noise"
                    else ClosedSetLabelNoise(rate, to="random")
                )
                x, y = corruption(x, y, 10, generator_for(seed, noise))
            bad = (x != part.x).flatten(1).any(1) | (y != part.y)
            client = label_embedding(features(x), y)
            found, distances = potentials(client, server, setting.iterations, seed)
            results[key(noise, rate)] = {"distances": distances}
            if rate:
                results[key(noise, rate)] |= {name: scores(bad, values) for name, values in found.items()}
    return results


def key(noise: str, rate: float) -> str:
    """What a result is kept under."""
    return f"{noise}, {100 * rate:.0f} %"


def potentials(x: Any, x2: Any, iterations: int, seed: int) -> tuple[dict[str, Any], list[float]]:
    """The calibrated gradients ``[m]`` of the five, in the order of the client's samples, and the distances.

    Args:
        x: ``[m, d]`` the client's points.
        x2: ``[m, d]`` the server's.
        iterations: of the protocol.
        seed: draws the first gamma.
    """
    client, server = TransportClient(x, allow_reconstruction=True), TransportServer(x2)
    gamma, distances = server.start(len(x), generator=generator_for(seed, "gamma")), []
    for _ in range(iterations):
        answered = gamma
        eta, distance = client.answer(gamma)
        gamma = server.step(eta, distance)
        distances.append(float(server.distance))
    assert server.eta is not None
    pairs = {
        "gamma": (x, answered),
        "eta": (x, server.eta),
        "access": (x, x2),
        "servergamma": (eta, server.eta),
        "servereta": (eta, x2),
    }
    return {name: calibrated_gradient(debiased_potential(*pair)) for name, pair in pairs.items()}, distances


def scores(bad: Any, values: Any) -> dict[str, float]:
    chosen = values > 0
    return {
        "auroc": float(roc_auc_score(bad, values)),
        "positive": int(chosen.sum()),
        "ratio": int((chosen & bad).sum()) / int(bad.sum()),
    }


def report(results: dict[Job, dict[str, Any]], setting: Setting, image: object = None) -> tuple[list[str], list[Check]]:
    m = setting.variants_samples
    lines = [
        f"{m} samples a side, S = m, K = {setting.iterations}; noise in pixels, flips in PCA-50, both with labels. "
        "AUROC of five potentials for the bad samples; in brackets how many of the values are positive, and the share "
        "of the bad samples among them (the paper's c and r).",
    ]
    checks = []
    sources = [s for s in SOURCES if any(job[1] == s for job in results)]
    for noise in NOISES:
        rows = []
        for source in sources:
            here = [r for job, r in results.items() if job[1] == source]
            for rate in RATES[1:]:
                found = [r[key(noise, rate)] for r in here]
                row = [source, f"{100 * rate:.0f} % ({round(m * rate)})"]
                for name in POTENTIALS:
                    positive, ratio = (statistics.mean(f[name][what] for f in found) for what in ("positive", "ratio"))
                    row.append(f"{cell([f[name]['auroc'] for f in found])} ({positive:.0f}, {ratio:.2f})")
                rows.append(row)
        header = ["data", "bad", *(f"{name}: {what}" for name, what in POTENTIALS.items())]
        lines += ["", f"**Figure 2, {noise}**", "", *table(header, rows)]
    for noise in NOISES:
        rows = []
        for source in sources:
            by_seed = {job[-1]: r for job, r in results.items() if job[1] == source}
            last = {rate: {s: r[key(noise, rate)]["distances"][-1] for s, r in by_seed.items()} for rate in RATES}
            for rate in RATES:
                known = [r[key(noise, rate)]["distances"] for r in by_seed.values()]
                shown = [cell([d[k - 1] for d in known]) for k in SHOWN if k <= setting.iterations]
                more = str(paired(last[rate], last[0.0])) if rate else "-"
                rows.append([source, f"{100 * rate:.0f} %", *shown, more])
            grows = min(paired(last[b], last[a]).mean for a, b in pairwise(RATES))
            checks.append(
                Check(
                    f"{noise}, {source}: the distance grows with every portion", f"least step {grows:+.3f}", grows > 0
                )
            )
        header = ["data", "bad", *(f"K = {k}" for k in SHOWN if k <= setting.iterations), "last, minus no noise"]
        lines += ["", f"**Figure 5 (a), {noise}**: distance by iteration.", "", *table(header, rows)]
    return lines, checks
