"""FedBary: removing samples by value, duplicated samples (table 4), and filtering before training (table 3)."""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from common import be_quiet
from fedbary_common import Check, Setting, cell, learned_features, pca_features, split, table
from fedbary_contributions import model, trainer
from fedbary_detection import through_protocol
from fedbary_loo import leave_one_out
from sklearn.linear_model import LogisticRegression
from table_statistics import paired

from flsv import FederatedDataModule
from flsv.data import ClosedSetLabelNoise, Corruption, Files, GaussianNoise, IIDPartitioner, Splits
from flsv.functional.transport import direct_values, knn_shapley, lava, wasserstein_distance
from flsv.seeding import generator_for
from flsv.valuation import FedBary

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
COPIES = (1, 50, 200)
POINTS = ("cifar10", "fashion_mnist")


def _pixels(setting: Setting) -> FedBary:
    return FedBary("pixels", support=setting.support // 2, iterations=5, workers=1, part="features")


def _components(setting: Setting) -> FedBary:
    return FedBary(
        "pca",
        support=setting.support,
        iterations=setting.iterations,
        workers=1,
        part="labels",
        allow_reconstruction=True,
    )


# Data, what is bad, and how it is looked for. Wrong labels of CIFAR-10 do not show in features that need no training.
FILTERED: dict[str, tuple[str, Callable[[int], Corruption], Callable[[Setting], FedBary]]] = {
    "cifar10, noise on 30 % of the images": (
        "cifar10",
        lambda seed: GaussianNoise(std=3.0, sample_rate=0.3, seed=seed),
        _pixels,
    ),
    "fashion_mnist, noise on 30 % of the images": (
        "fashion_mnist",
        lambda seed: GaussianNoise(std=3.0, sample_rate=0.3, seed=seed),
        _pixels,
    ),
    "fashion_mnist, 30 % of the labels flipped": (
        "fashion_mnist",
        lambda seed: ClosedSetLabelNoise(0.3, to="random", seed=seed),
        _components,
    ),
}

Job = tuple[str, str, str, int]


def jobs(setting: Setting, seeds: Sequence[int]) -> list[Job]:
    kinds = [("points", "cifar10"), ("points", "fashion_mnist"), ("duplicates", "cifar10")]
    kinds += [("filter", what) for what in FILTERED]
    return [("removal", kind, source, seed) for seed in seeds for kind, source in kinds]


def work(job: Job, setting: Setting) -> float:
    """Programmes of m by m for duplicates, as in detection for points; training for filters."""
    if job[1] == "filter":
        return setting.filter_rounds * (setting.filter_samples or 60_000)
    return (setting.duplication_samples if job[1] == "duplicates" else setting.samples) ** 3


def run(job: Job, setting: Setting, root: str) -> dict[Any, Any]:
    _, kind, what, seed = job
    be_quiet()
    return {"points": _points, "duplicates": _duplicates, "filter": _filter}[kind](what, setting, root, seed)


def _points(source: str, setting: Setting, root: str, seed: int) -> dict[str, list[float]]:
    """Test accuracy of logistic regression after removing a share, by order of removal; 15 % of labels flipped."""
    part = split(source, root, setting.samples, setting.validation, seed)
    embed = learned_features(part, source, setting, seed)
    _, y = ClosedSetLabelNoise(0.15, to="random")(part.x.clone(), part.y.clone(), 10, generator_for(seed, "flips"))
    x, val, test = (embed(images) for images in (part.x, part.val_x, part.test_x))
    values = through_protocol(x, y, val, part.val_y, setting, seed, ("both",))["both"]
    orders = {
        "FedBary, worst first": values.argsort(descending=True),
        "ours with access, worst first": direct_values(x, y, val, part.val_y).argsort(descending=True),
        "LAVA, worst first": lava(x, y, val, part.val_y).argsort(descending=True),
        "LOO, worst first": leave_one_out(x, y, val, part.val_y).argsort(descending=True),
        "KNN-Shapley, worst first": knn_shapley(x, y, val, part.val_y).argsort(),
        "random": torch.randperm(len(x), generator=generator_for(seed, "random")),
        "FedBary, best first": values.argsort(),
    }
    return {
        name: [_accuracy(x, y, order, share, test, part.test_y) for share in FRACTIONS]
        for name, order in orders.items()
    }


def _accuracy(x: torch.Tensor, y: torch.Tensor, order: torch.Tensor, share: float, *test: torch.Tensor) -> float:
    kept = order[int(share * len(order)) :]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # convergence
        fitted = LogisticRegression(max_iter=200).fit(x[kept].numpy(), y[kept].numpy())
    return float(fitted.score(test[0].numpy(), test[1].numpy()))


def _duplicates(source: str, setting: Setting, root: str, seed: int) -> dict[str, float]:
    """Distances of a client's set, of the set three times, and with the most valuable sample several times."""
    m = setting.duplication_samples
    part = split(source, root, m, m, seed)
    pca = pca_features(part)
    x, val = pca(part.x).double(), pca(part.val_x).double()
    best = int(direct_values(x, part.y, val, part.val_y).argmin())

    def distance(copies: torch.Tensor) -> float:
        rows = torch.arange(m).repeat_interleave(copies)
        return float(wasserstein_distance(x[rows], val, y=part.y[rows], y2=part.val_y))

    once = torch.ones(m, dtype=torch.long)
    result = {"once": distance(once), "three times": distance(3 * once)}
    for copies in COPIES:
        more = once.clone()
        more[best] += copies
        result[f"+{copies}"] = distance(more)
    return result


def _filter(what: str, setting: Setting, root: str, seed: int) -> dict[str, float]:
    """Test accuracy of FedAvg on all samples, on those not flagged (in more rounds, so that the number of steps is the
    same), and on all of them clean."""
    source, corruption, detector = FILTERED[what]
    result: dict[str, float] = {}
    whole = detector(setting)
    for name, drop in (("before", False), ("after", whole), ("clean", False)):
        bad = [corruption(seed)] if name != "clean" else []
        data = FederatedDataModule(
            source,
            IIDPartitioner(5, seed=seed),
            corruptions=bad,
            batch_size=32,
            splits=Splits(drop_flagged=drop, max_samples=setting.filter_samples, server_val=1 / 6, seed=seed),
            files=Files(root=root),
        )
        data.setup("fit")
        result[f"{name}, samples"] = float(data.num_samples.sum())
        result[f"{name}, bad"] = float(sum(int(data.corrupted_samples(i).sum()) for i in range(5)))
        rounds = round(setting.filter_rounds * result["before, samples"] / result[f"{name}, samples"])
        L.seed_everything(seed, verbose=False)
        client = model()
        with tempfile.TemporaryDirectory() as folder:
            fit = trainer(rounds, setting, folder, seed=seed)
            fit.fit(client, data)
            result[name] = fit.test(client, data, verbose=False)[0]["test_accuracy"]
    return result


def report(results: dict[Job, dict[Any, Any]], setting: Setting, image: object = None) -> tuple[list[str], list[Check]]:
    lines: list[str] = []
    checks: list[Check] = []

    def found(kind: str, source: str) -> list[dict[Any, Any]]:
        return [r for job, r in results.items() if job[1:3] == (kind, source)]

    for source in POINTS:
        if curves := found("points", source):
            lines += [
                "",
                f"**Point removal, {source}**: logistic regression on learned features, {setting.samples} samples, ",
            ]
            lines[-1] += "15 % of labels flipped; test accuracy in % after removing a share of the samples."
            rows = [
                [name, *(cell([c[name][k] for c in curves], 1, 100) for k in range(len(FRACTIONS)))]
                for name in curves[0]
            ]
            lines += ["", *table(["removed", *(f"{100 * f:.0f} %" for f in FRACTIONS)], rows)]
            whole = {name: {s: 100 * statistics.mean(c[name][1:]) for s, c in enumerate(curves)} for name in curves[0]}
            others = [name for name in whole if name.endswith("worst first") and not name.startswith("FedBary")]
            lines += ["", "FedBary, worst first, less (mean of the curve, points, 95 % interval): "]
            lines[-1] += "; ".join(
                f"{name.split(',')[0]} {paired(whole['FedBary, worst first'], whole[name])}"
                for name in (*others, "random")
            )
            lines[-1] += "."
            means = {name: statistics.mean(v for c in curves for v in c[name][1:]) for name in curves[0]}
            worst, chance, best = means["FedBary, worst first"], means["random"], means["FedBary, best first"]
            text = f"{100 * worst:.1f}, {100 * chance:.1f}, {100 * best:.1f} (mean of the curves)"
            checks.append(
                Check(
                    f"point removal, {source}: worst first above random above best first", text, worst > chance > best
                )
            )
    if copies := found("duplicates", "cifar10"):
        header = list(copies[0])
        lines += [
            "",
            "**Duplication, cifar10** (PCA-50 with labels): distance of the set, the set three times, and the set ",
            "",
        ]
        lines[-2] += "with copies of its most valuable sample."
        lines += table(header, [[cell([c[name] for c in copies], 4) for name in header]])
        change = max(abs(c["three times"] / c["once"] - 1) for c in copies)
        checks.append(
            Check("duplication: three times the set, relative change at most 1e-6", f"{change:.1e}", change <= 1e-6)
        )
        growing = all(
            a < b
            for c in copies
            for a, b in zip([c["once"], *(c[f"+{k}"] for k in COPIES[:-1])], [c[f"+{k}"] for k in COPIES])
        )
        text = ", ".join(
            f"{statistics.mean(c[name] for c in copies):.4f}" for name in ("once", *(f"+{k}" for k in COPIES))
        )
        checks.append(Check("duplication: copies of one sample make the distance grow", text, growing))
    rows = []
    for what in FILTERED:
        if runs := found("filter", what):
            bad, left = (statistics.mean(r[f"{name}, bad"] for r in runs) for name in ("before", "after"))
            removed = statistics.mean(r["before, samples"] - r["after, samples"] for r in runs)
            accuracies = [cell([r[name] for r in runs], 1, 100) for name in ("before", "after", "clean")]
            pairs = ({s: 100 * r[name] for s, r in enumerate(runs)} for name in ("after", "before"))
            gain = paired(*pairs)
            rows.append([what, f"{bad:.0f}", f"{removed:.0f}", f"{bad - left:.0f}", *accuracies, str(gain)])
            checks.append(
                Check(f"filter, {what}: better after than before", f"{gain} points", gain.verdict == "better")
            )
    if rows:
        size = "all" if setting.filter_samples is None else str(setting.filter_samples)
        lines += [
            "",
            f"**Filter, then train** (table 3): {size} images, a sixth of them the server's, the rest dealt to five "
            f"clients; FedAvg with LeNet5, {setting.filter_rounds} rounds (after: as many as give the same number of "
            "steps). Noise has a standard deviation of 3. In brackets the paper's: 500 noisy samples of CIFAR-10, of "
            "which it removes 494, and 1,000 of Fashion-MNIST, of which it removes 580.",
            "",
        ]
        header = ["data", "bad", "removed", "of them bad", "accuracy before, %", "after, %", "without bad samples, %"]
        header.append("after - before")
        lines += table(header, rows)
    return lines, checks
