"""FedBary's detection of bad samples (figure 5): ours by the protocol and with access, LAVA, KNN-Shapley and LOO."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from fedbary_common import Check, Setting, cell, learned_features, pca_features, split, table
from fedbary_loo import leave_one_out
from sklearn.metrics import roc_auc_score
from table_statistics import paired
from torch import Tensor

from flsv.data import ClosedSetLabelNoise, GaussianNoise
from flsv.functional.transport import (
    client_values,
    direct_values,
    federated_wasserstein,
    knn_shapley,
    label_embedding,
    lava,
)
from flsv.functional.transport.values import Part
from flsv.seeding import generator_for
from flsv.valuation import flag_samples
from flsv.valuation.questions import calibrated_by_class

SOURCES = ("mnist", "fashion_mnist", "cifar10")
RATES = (0.05, 0.15, 0.3)
# Normal noise on all pixels is almost orthogonal to 50 principal components, so it is looked for in the pixels, too.
FEATURES = {"feature noise": ("pixels", "PCA-50", "learned"), "label flips": ("PCA-50", "learned")}
# Ours, through the protocol: the part of the value that is about the noise in question, and the sum of both parts. With
# access to the validation samples: ours of both parts and of the same part, LAVA as published, KNN-Shapley, LOO.
METHODS = ("ours", "ours, both parts", "ours with access", "ours with access, same part", "LAVA", "KNN-Shapley", "LOO")
# Which differences are told: what asks for the noise in question, and what does not know it, like LAVA.
PAIRS = (
    ("ours", "ours with access, same part"),
    ("ours", "LAVA"),
    ("ours, both parts", "LAVA"),
    ("ours, both parts", "KNN-Shapley"),
    ("ours, both parts", "LOO"),
)

Job = tuple[str, str, int]


def jobs(setting: Setting, seeds: Sequence[int]) -> list[Job]:
    return [("detection", source, seed) for source in SOURCES for seed in seeds]


def work(job: Job, setting: Setting) -> float:
    """LAVA's programmes between classes of m / 10, and the protocol's of m by S, at worst with the cube."""
    return setting.samples**3


def run(job: Job, setting: Setting, root: str) -> dict[str, Any]:
    """Scores of all methods, by :func:`key`."""
    _, source, seed = job
    part = split(source, root, setting.samples, setting.validation, seed)
    maps = {
        "pixels": lambda x: x.flatten(1),
        "PCA-50": pca_features(part),
        "learned": learned_features(part, source, setting, seed),
    }
    results = {}
    for noise, names in FEATURES.items():
        for rate in RATES:
            corruption = GaussianNoise(sample_rate=rate) if noise == "feature noise" else None
            corruption = corruption or ClosedSetLabelNoise(rate, to="random")
            x, y = corruption(part.x.clone(), part.y.clone(), 10, generator_for(seed, noise))
            bad = (x != part.x).flatten(1).any(1) | (y != part.y)
            for name in names:
                features, val = maps[name](x), maps[name](part.val_x)
                which = "features" if noise == "feature noise" else "labels"
                known = through_protocol(features, y, val, part.val_y, setting, seed, (which, "both"))
                found = {
                    "ours": known[which],
                    "ours, both parts": known["both"],
                    "ours with access": direct_values(features, y, val, part.val_y),
                    "ours with access, same part": calibrated_by_class(
                        direct_values(features, y, val, part.val_y, part=which), y
                    ),
                    "LAVA": lava(features, y, val, part.val_y),
                    "KNN-Shapley": -knn_shapley(features, y, val, part.val_y),
                    "LOO": leave_one_out(features, y, val, part.val_y),
                }
                results[key(noise, name, rate)] = {method: scores(bad, values) for method, values in found.items()}
    return results


def through_protocol(
    x: Tensor, y: Tensor, val_x: Tensor, val_y: Tensor, setting: Setting, seed: int, parts: Sequence[Part]
) -> dict[Part, Tensor]:
    """A client's values by part, compared within classes. Of the server it has seen interpolants only."""
    client, server = label_embedding(x, y), label_embedding(val_x, val_y)
    support = {"support": setting.points, "iterations": setting.iterations}
    points = federated_wasserstein(client, server, **support, generator=generator_for(seed, "gamma")).eta
    return {part: calibrated_by_class(client_values(x, y, points, part=part), y) for part in parts}


def key(noise: str, features: str, rate: float) -> str:
    """What a result is kept under."""
    return f"{noise}, {features}, {100 * rate:.0f} %"


def scores(bad: Tensor, values: Tensor) -> dict[str, float]:
    """AUROC, and precision and recall of two rules: values above 0, and outliers."""
    result = {"auroc": float(roc_auc_score(bad, values))}
    for rule, chosen in (("positive", values > 0), ("outlier", flag_samples(values))):
        hits, total = int((chosen & bad).sum()), int(chosen.sum())
        result[f"{rule} precision"] = hits / total if total else float("nan")
        result[f"{rule} recall"] = hits / int(bad.sum())
    return result


def report(results: dict[Job, dict[str, Any]], setting: Setting, image: object = None) -> tuple[list[str], list[Check]]:
    sources = [s for s in SOURCES if any(job[1] == s for job in results)]
    lines = [
        f"One client with {setting.samples} samples, {setting.validation} validation images at the server, "
        f"S = {setting.points}, K = {setting.iterations}. Learned features: the penultimate layer (its first "
        f"{setting.components} principal components) of a small CNN that the server has trained on its validation "
        f"images for {setting.epochs} epochs. Precision and recall of ours: of the positive values, as in the paper; "
        "in brackets of the outliers (`flag_samples`).",
    ]
    checks = []

    def values(source: str, of: str, method: str, what: str) -> list[float]:
        return [r[of][method][what] for job, r in results.items() if job[1] == source]

    for noise, names in FEATURES.items():
        rows = []
        for source in sources:
            for name in names:
                for rate in RATES:
                    of = key(noise, name, rate)
                    row = [source, name, f"{100 * rate:.0f} %"]
                    row += [cell(values(source, of, method, "auroc"), 3) for method in METHODS]
                    for what in ("precision", "recall"):
                        positive, outlier = (
                            statistics.mean(values(source, of, "ours", f"{rule} {what}"))
                            for rule in ("positive", "outlier")
                        )
                        row.append(f"{positive:.2f} ({outlier:.2f})")
                    rows.append(row)
        header = ["data", "features", "noise", *(f"AUROC {m}" for m in METHODS), "precision, ours", "recall, ours"]
        lines += ["", f"**{noise[0].upper() + noise[1:]}**", "", *table(header, rows)]
    lines += [
        "",
        "**Differences**: AUROC in points (hundredths), mean of the three rates, seed by seed, with the 95 % interval; "
        "bold where it excludes 0. Ours asks for the part of the value that fits the noise; LAVA, as the others, does "
        "not know which it is.",
        "",
        *table(["noise", "data", "features", *(f"{a} - {b}" for a, b in PAIRS)], _differences(results, sources)),
    ]
    targets = [("feature noise", "pixels", 0.98, sources)]
    targets += [
        ("label flips", name, least, [s for s in sources if s != "cifar10"])
        for name, least in (("PCA-50", 0.9), ("learned", 0.95))
    ]
    for noise, name, target, concerned in targets:
        for source in concerned:
            found = [statistics.mean(values(source, key(noise, name, rate), "ours", "auroc")) for rate in RATES]
            text = ", ".join(f"{v:.3f}" for v in found)
            checks.append(
                Check(f"{noise}, {source}, {name}: AUROC at least {target} at 5, 15, 30 %", text, min(found) >= target)
            )
    return lines, checks


def _differences(results: dict[Job, dict[str, Any]], sources: Sequence[str]) -> list[list[str]]:
    rows = []
    for noise, names in FEATURES.items():
        for source in sources:
            for name in names:
                found = {
                    method: {
                        job[-1]: 100 * statistics.mean(r[key(noise, name, rate)][method]["auroc"] for rate in RATES)
                        for job, r in results.items()
                        if job[1] == source
                    }
                    for method in METHODS
                }
                rows.append([noise, source, name, *(str(paired(found[a], found[b])) for a, b in PAIRS)])
    return rows
