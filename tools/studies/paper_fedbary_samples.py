"""FedBary's comparison (Li et al., CVPR 2024; ``tables/fedbary.yaml``) as far as single samples go: detection of bad
ones (figure 5), their removal, duplicates and filtering (tables 3 and 4)."""

from __future__ import annotations

import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from cells import Cell, Measured
from paper_fedbary import corrupted, given, learned_features, model, pca_features, split, trainer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flsv import FederatedDataModule
from flsv.data import ClosedSetLabelNoise, Files, GaussianNoise, IIDPartitioner, Splits
from flsv.functional import (
    client_values,
    direct_values,
    federated_wasserstein,
    knn_shapley,
    label_embedding,
    lava,
    wasserstein_distance,
)
from flsv.functional.transport.potentials import Part
from flsv.utilities.seeding import generator_for
from flsv.valuation import FedBary
from flsv.valuation.questions import calibrated_by_class

RATES = (0.05, 0.15, 0.3)
#: Normal noise on all pixels is almost orthogonal to 50 principal components, so it is looked for in the pixels, too.
FEATURES = {"feature noise": ("pixels", "PCA-50", "learned"), "label flips": ("PCA-50", "learned")}
FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
COPIES = (1, 50, 200)


def detection(cell: Cell, root: str) -> Measured:
    """AUROC in %, the mean over the rates, by noise, source and features, and method.

    Ours, through the protocol: the part of the value that is about the noise in question, and the sum of both parts.
    With access to the validation samples: ours of both parts and of the same part, LAVA, KNN-Shapley, LOO.
    """
    at, seed = given(cell), cell.seed
    part = split(at.source, root, at.samples, at.validation, seed)
    maps: dict[str, Callable[[Tensor], Tensor]] = {
        "pixels": lambda x: x.flatten(1),
        "PCA-50": pca_features(part),
        "learned": learned_features(part, at, seed),
    }
    means: Measured = {}
    for noise, names in FEATURES.items():
        which: Part = "features" if noise == "feature noise" else "labels"
        for rate in RATES:
            x, y, bad = corrupted(part, noise, rate, seed)
            for name in names:
                features, val = maps[name](x), maps[name](part.val_x)
                known = through_protocol(features, y, val, part.val_y, at, seed, (which, "both"))
                same = direct_values(features, y, val, part.val_y, part=which)
                values = {
                    "ours": known[which],
                    "ours, both parts": known["both"],
                    "ours with access": direct_values(features, y, val, part.val_y),
                    "ours with access, same part": calibrated_by_class(same, y),
                    "LAVA": lava(features, y, val, part.val_y),
                    "KNN-Shapley": -knn_shapley(features, y, val, part.val_y),
                    "LOO": leave_one_out(features, y, val, part.val_y),
                }
                mean = means.setdefault(f"{noise}, {at.source}, {name}", dict.fromkeys(values, 0.0))
                for method, each in values.items():
                    mean[method] += 100 * float(roc_auc_score(bad, each)) / len(RATES)
    return {"mean": means}


def through_protocol(
    x: Tensor, y: Tensor, val_x: Tensor, val_y: Tensor, at: SimpleNamespace, seed: int, parts: Sequence[Part]
) -> dict[Part, Tensor]:
    """A client's values by part, compared within classes. Of the server it has seen interpolants only."""
    client, server = label_embedding(x, y), label_embedding(val_x, val_y)
    support = {"support": at.points, "iterations": at.iterations}
    points = federated_wasserstein(client, server, **support, generator=generator_for(seed, "gamma")).eta
    return {part: calibrated_by_class(client_values(x, y, points, part=part), y) for part in parts}


def leave_one_out(x: Tensor, y: Tensor, x2: Tensor, y2: Tensor, ridge: float = 1.0) -> Tensor:
    """Validation loss of a ridge regression to one-hot classes with all samples less the loss without each.

    With A = X'X + r I and leverage h = x' A^-1 x, the weights without the sample are W - A^-1 x (y - x'W) / (1 - h)
    (Sherman and Morrison). The paper does not say which model its leave-one-out baseline trains.

    ``ridge``: r, in parts of the mean squared norm of the centered training samples, above 0. Gives ``[m]`` float64;
    positive means that the sample does harm.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [5.0], [5.1], [0.05]])
        >>> leave_one_out(x, torch.tensor([0, 0, 1, 1, 1]), x[:4], torch.tensor([0, 0, 1, 1])).argmax()  # mislabeled
        tensor(4)
    """
    classes = int(max(y.max(), y2.max())) + 1
    targets, wanted = (torch.nn.functional.one_hot(labels, classes).double() for labels in (y, y2))
    center = x.double().mean(0)
    # The constant is as long as a sample, so that it is penalized like the rest.
    constant = float((x.double() - center).square().sum(1).mean().sqrt())
    points, others = (torch.nn.functional.pad(samples.double() - center, (0, 1), value=constant) for samples in (x, x2))
    gram = points @ points.T
    regular = gram + ridge * float(gram.diagonal().mean()) * torch.eye(len(x), dtype=gram.dtype)
    # In the space of the samples, not of the features: A^-1 X' = X' (X X' + r I)^-1.
    inverse = torch.linalg.inv(regular)
    errors = targets - gram @ (inverse @ targets)
    leverage = (gram * inverse).sum(1)
    moved = (others @ points.T) @ inverse  # [m2, m]: predictions for a unit error of each sample
    steps = errors / (1 - leverage)[:, None]
    missed = others @ points.T @ (inverse @ targets) - wanted
    # |missed - moved_i steps_i'|^2 - |missed|^2 is what leaving sample i out adds.
    added = -2 * ((missed.T @ moved).T * steps).sum(1) + moved.square().sum(0) * steps.square().sum(1)
    return -added


def points(cell: Cell, root: str) -> Measured:
    """Test accuracy in % of logistic regression on learned features after removing a share, by order of removal.

    15 % of the labels are flipped.
    """
    at, seed = given(cell), cell.seed
    part = split(at.source, root, at.samples, at.validation, seed)
    embed = learned_features(part, at, seed)
    _, y = ClosedSetLabelNoise(0.15, to="random")(part.x.clone(), part.y.clone(), 10, generator_for(seed, "flips"))
    x, val, test = (embed(images) for images in (part.x, part.val_x, part.test_x))
    values = through_protocol(x, y, val, part.val_y, at, seed, ("both",))["both"]
    orders = {
        "FedBary, worst first": values.argsort(descending=True),
        "ours with access, worst first": direct_values(x, y, val, part.val_y).argsort(descending=True),
        "LAVA, worst first": lava(x, y, val, part.val_y).argsort(descending=True),
        "LOO, worst first": leave_one_out(x, y, val, part.val_y).argsort(descending=True),
        "KNN-Shapley, worst first": knn_shapley(x, y, val, part.val_y).argsort(),
        "random": torch.randperm(len(x), generator=generator_for(seed, "random")),
        "FedBary, best first": values.argsort(),
    }

    def accuracy(order: Tensor, share: float) -> float:
        kept = order[int(share * len(order)) :]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # convergence
            fitted = LogisticRegression(max_iter=200).fit(x[kept].numpy(), y[kept].numpy())
        return 100 * float(fitted.score(test.numpy(), part.test_y.numpy()))

    curves = {name: {f"{100 * f:.0f} %": accuracy(order, f) for f in FRACTIONS} for name, order in orders.items()}
    return {"curves": curves, "mean": {name: statistics.mean([*curve.values()][1:]) for name, curve in curves.items()}}


def duplicates(cell: Cell, root: str) -> Measured:
    """Distances of a client's set, of the set three times, and with the most valuable sample several times."""
    m = given(cell).duplication_samples
    part = split(given(cell).source, root, m, m, cell.seed)
    pca = pca_features(part)
    x, val = pca(part.x).double(), pca(part.val_x).double()
    best = int(direct_values(x, part.y, val, part.val_y).argmin())

    def distance(copies: Tensor) -> float:
        rows = torch.arange(m).repeat_interleave(copies)
        return float(wasserstein_distance(x[rows], val, y=part.y[rows], y2=part.val_y))

    once = torch.ones(m, dtype=torch.long)
    result = {"once": distance(once), "three times": distance(3 * once)}
    for copies in COPIES:
        more = once.clone()
        more[best] += copies
        result[f"+{copies}"] = distance(more)
    return result


def filtering(cell: Cell, root: str) -> Measured:
    """Test accuracy of FedAvg, in %, on all samples, on those not flagged, and on all clean; how many there are.

    Without the flagged ones there are more rounds, so that the number of steps is the same.

    Wrong labels of CIFAR-10 do not show in features that need no training, so they are not looked for.
    """
    at, seed, labels = given(cell), cell.seed, given(cell).noise == "labels"
    corruption: Any = GaussianNoise(std=3.0, sample_rate=0.3, seed=seed)
    detector = FedBary("pixels", support=at.support // 2, iterations=5, workers=1, part="features")
    if labels:
        corruption = ClosedSetLabelNoise(0.3, to="random", seed=seed)
        more: dict[str, Any] = {"iterations": at.iterations, "part": "labels", "allow_reconstruction": True}
        detector = FedBary("pca", support=at.support, workers=1, **more)
    found: Measured = {"accuracy": {}, "samples": {}, "bad": {}}
    for name in ("before", "after", "clean"):
        data = FederatedDataModule(
            at.source,
            IIDPartitioner(5, seed=seed),
            corruptions=[corruption] if name != "clean" else [],
            batch_size=32,
            splits=Splits(
                drop_flagged=detector if name == "after" else False,
                max_samples=at.filter_samples,
                server_val=1 / 6,
                seed=seed,
            ),
            files=Files(root=root),
        )
        data.setup("fit")
        found["samples"][name] = float(data.num_samples.sum())
        found["bad"][name] = float(sum(int(data.corrupted_samples(i).sum()) for i in range(5)))
        rounds = round(at.filter_rounds * found["samples"]["before"] / found["samples"][name])
        L.seed_everything(seed, verbose=False)
        client = model()
        with tempfile.TemporaryDirectory() as folder:
            fit = trainer(rounds, at, folder, seed=seed)
            fit.fit(client, data)
            found["accuracy"][name] = 100 * fit.test(client, data, verbose=False)[0]["test_accuracy"]
    return found
