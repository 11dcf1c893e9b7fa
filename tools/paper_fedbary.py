"""FedBary's comparison (Li et al., CVPR 2024; ``tables/fedbary.yaml``): the protocol against POT (figure 3), its
potentials and distances (figures 2 and 5a), contribution shares (figure 4) and time (table 2).

The cells are no ``flsv fit`` runs: what they are about, and their sizes, stands in their overrides.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import Any

import lightning as L
import numpy as np
import ot
import torch
import yaml
from cells import CONFIGS, Cell, Measured
from common import quiet_trainer
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from torch import Tensor

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import ClosedSetLabelNoise, Files, GaussianNoise, IIDPartitioner, Splits, load_image_data
from flsv.features import PCA
from flsv.features.penultimate import head_inputs
from flsv.functional.shapley import exact_shapley, permutation_shapley
from flsv.functional.transport import (
    TransportClient,
    TransportServer,
    calibrated_gradient,
    debiased_potential,
    federated_wasserstein,
    label_embedding,
    wasserstein_barycenter,
)
from flsv.games.retraining import RetrainedUtility
from flsv.metrics import CumulativeShapley
from flsv.models import build_network
from flsv.seeding import generator_for
from flsv.valuation import FedBary, clients_of, participants_of, server_of

NETWORKS = {"mnist": "shapley_fl_fmnist", "fashion_mnist": "shapley_fl_fmnist", "cifar10": "lenet5"}


@dataclass(frozen=True)
class Sizes:
    """What a preset fixes, of two cores by default. ``samples`` are a client's own in detection and removal of points,
    ``points`` their S; the rest is named by its part."""

    support: int = 400
    iterations: int = 10
    samples: int = 600
    points: int = 200
    validation: int = 600
    epochs: int = 10  # of the network behind the learned features
    components: int = 64  # of them that are kept
    protocol_samples: int = 100
    federation_samples: int | None = 2400
    federation_validation: float = 1 / 6
    rounds: int = 6
    filter_samples: int | None = 3600
    filter_rounds: int = 15
    duplication_samples: int = 1000
    variants_samples: int = 200
    time_samples: int = 500
    time_iterations: int = 10
    time_rounds: int = 2
    accelerator: str = "cpu"

    @classmethod
    def of(cls, cell: Cell) -> Sizes:
        """Those in a cell's overrides; the others by default."""
        return cls(**{each.name: cell.overrides[each.name] for each in fields(cls) if each.name in cell.overrides})


@dataclass(frozen=True)
class Split:
    """Images of one data set: a client's training samples, the server's validation set, and a test set."""

    x: Tensor
    y: Tensor
    val_x: Tensor
    val_y: Tensor
    test_x: Tensor
    test_y: Tensor


def split(source: str, root: str, samples: int, validation: int, seed: int) -> Split:
    """Random samples of the training set, and 2000 of the test set."""
    data = load_image_data(source, root)
    x, y = data.train.tensors  # type: ignore[attr-defined]
    test_x, test_y = data.test.tensors  # type: ignore[attr-defined]
    generator = generator_for(seed, "split")
    chosen = torch.randperm(len(x), generator=generator)[: samples + validation]
    client, server = chosen[:samples], chosen[samples:]
    test = torch.randperm(len(test_x), generator=generator)[:2000]
    return Split(x[client], y[client], x[server], y[server], test_x[test], test_y[test])


def pca_features(part: Split, components: int = 50) -> Callable[[Tensor], Tensor]:
    """Principal components of the server's validation images."""
    pca = PCA(components)
    pca.fit(part.val_x, [])
    return pca


def learned_features(part: Split, source: str, sizes: Sizes, seed: int) -> Callable[[Tensor], Tensor]:
    """The penultimate layer of a small network that the server has trained on its validation images, by its principal
    components. No client's sample is used; the network goes to the clients."""
    torch.manual_seed(seed)
    network = build_network(NETWORKS[source], 10, part.val_x.shape[1:])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(sizes.epochs):
        for batch in torch.randperm(len(part.val_x)).split(32):
            if len(batch) > 1:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(network(part.val_x[batch]), part.val_y[batch]).backward()
                optimizer.step()
    network.eval()
    pca = PCA(sizes.components)
    pca.fit(head_inputs(network, part.val_x), [])
    return lambda x: pca(head_inputs(network, x))


# ---- figure 3


def distances(cell: Cell, root: str) -> Measured:
    """Relative errors of the protocol's distance against ``ot.emd2``, by support and number of iterations."""
    m, seed = Sizes.of(cell).protocol_samples, cell.seed
    if cell.row == "normal":
        generator = generator_for(seed, "samples")
        x, x2 = torch.randn(m, 10, generator=generator), 1.5 * torch.randn(m, 10, generator=generator) + 1
    else:
        part = split("fashion_mnist", root, m, m, seed)
        pca = pca_features(part)
        x, x2 = label_embedding(pca(part.x), part.y), label_embedding(pca(part.val_x), part.val_y)
    cost = ot.dist(x.double().numpy(), x2.double().numpy())
    exact = float(ot.emd2(ot.unif(m), ot.unif(m), cost)) ** 0.5
    errors = {}
    for share in (1, 2, 5, 10):
        given: dict[str, Any] = {"generator": generator_for(seed, "gamma"), "allow_reconstruction": True}
        history = federated_wasserstein(x, x2, support=m // share, iterations=20, **given).history / exact - 1
        shown = {f"K = {k}": float(history[k - 1]) for k in (1, 2, 5, 10, 15, 20)}
        errors[f"{cell.row}, S = m / {share}" if share > 1 else f"{cell.row}, S = m"] = shown
    return {"errors": errors}


def barycenter(cell: Cell, root: str) -> Measured:
    """2-Wasserstein distance from the federated barycenter of three Gaussians to
    ``ot.lp.free_support_barycenter``'s, by the number of iterations."""
    seed, rng = cell.seed, np.random.default_rng(cell.seed)
    covariance = ((1.0, 0.4), (0.4, 0.6))
    sets = [rng.multivariate_normal(mean, covariance, size=100) for mean in ((0.0, 0.0), (6.0, 0.0), (3.0, 5.0))]
    weights = [ot.unif(100)] * 3
    reference = ot.lp.free_support_barycenter(sets, weights, rng.standard_normal((100, 2)) + 3, numItermax=200)
    clients = [TransportClient(torch.from_numpy(points), allow_reconstruction=True) for points in sets]
    errors = {}
    for steps in (1, 2, 3, 5, 10):
        start = torch.randn(100, 2, generator=generator_for(seed, "start"), dtype=torch.float64)
        given: dict[str, Any] = {"initial": start, "generator": generator_for(seed, "support")}
        found = wasserstein_barycenter(clients, support=100, iterations=steps, **given).support_points.numpy()
        errors[f"K = {steps}"] = float(ot.emd2(weights[0], weights[0], ot.dist(found, reference))) ** 0.5
    return {"barycenter": errors}


# ---- figures 2 and 5a


def variants(cell: Cell, root: str) -> Measured:
    """By noise, source and rate: the last distance; and by potential AUROC, how many are positive, and the share of the
    bad samples among them (the paper's c and r)."""
    sizes, seed, source = Sizes.of(cell), cell.seed, cell.overrides["source"]
    m = sizes.variants_samples
    part = split(source, root, m, m, seed)
    found: Measured = {"potentials": {}, "distances": {}}
    for noise in ("feature noise", "label flips"):
        # Noise on all pixels is next to invisible in principal components.
        features = (lambda x: x.flatten(1)) if noise == "feature noise" else pca_features(part)
        server = label_embedding(features(part.val_x), part.val_y)
        for rate in (0.0, 0.05, 0.15, 0.3):
            x, y, name = part.x.clone(), part.y.clone(), f"{100 * rate:.0f} %"
            if rate:
                gaussian, flips = GaussianNoise(sample_rate=rate), ClosedSetLabelNoise(rate, to="random")
                corruption = gaussian if noise == "feature noise" else flips
                x, y = corruption(x, y, 10, generator_for(seed, noise))
            bad = (x != part.x).flatten(1).any(1) | (y != part.y)
            values, distance = potentials(label_embedding(features(x), y), server, sizes.iterations, seed)
            found["distances"].setdefault(f"{noise}, {source}", {})[name] = distance[-1]
            if rate:
                found["potentials"][f"{noise}, {source}, {name}"] = {
                    which: {
                        "auroc": float(roc_auc_score(bad, each)),
                        "positive": int((each > 0).sum()),
                        "ratio": int(((each > 0) & bad).sum()) / int(bad.sum()),
                    }
                    for which, each in values.items()
                }
    return found


def potentials(x: Tensor, x2: Tensor, iterations: int, seed: int) -> tuple[dict[str, Tensor], list[float]]:
    """The calibrated gradients ``[m]`` of the five potentials of figure 2, in the client's order, and the distances.

    With P the client's samples ``x [m, d]``, Q the server's, gamma between them, eta_P and eta_Q the interpolants of
    either side and gamma. A row of eta_P is one sample's only where S = m, as here.
    """
    client, server = TransportClient(x, allow_reconstruction=True), TransportServer(x2)
    gamma, found = server.start(len(x), generator=generator_for(seed, "gamma")), []
    for _ in range(iterations):
        answered = gamma
        eta, distance = client.answer(gamma)
        gamma = server.step(eta, distance)
        found.append(float(server.distance))
    assert server.eta is not None
    pairs = {
        "P to gamma": (x, answered),
        "P to eta_Q": (x, server.eta),
        "P to Q": (x, x2),
        "eta_P to eta_Q": (eta, server.eta),
        "eta_P to Q": (eta, x2),
    }
    return {name: calibrated_gradient(debiased_potential(*pair)) for name, pair in pairs.items()}, found


# ---- figure 4


def build(spec: dict[str, Any], **more: Any) -> Any:
    """The object that a configuration file's ``class_path`` and ``init_args`` mean; ``more`` overrides arguments."""
    module, _, name = spec["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**{**spec["init_args"], **more})


def model() -> ClassifierClient:
    return ClassifierClient("lenet5", optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9))


def trainer(rounds: int, sizes: Sizes, folder: str, **options: Any) -> L.Trainer:
    """For one federation; options are the loop's."""
    loop = FederatedLoop(**options, reporting=Reporting(figures=0, table=False))
    return quiet_trainer(folder, rounds, [loop], sizes.accelerator)


def contributions(cell: Cell, root: str) -> Measured:
    """FedBary's distances in the pixels, and every method's shares ``[5]`` in % and seconds; five kinds of clients.

    MR is the sum of the rounds' exact Shapley values, GTG and TMC estimates of the same games, all from one federation;
    exact is the Shapley value of the 31 federations trained from scratch.
    """
    sizes, seed = Sizes.of(cell), cell.seed
    scenario = yaml.safe_load((CONFIGS / f"scenarios/{cell.overrides['scenario']}.yaml").read_text())["data"]
    validation = scenario.get("splits", {}).get("server_val", sizes.federation_validation)
    data = FederatedDataModule(
        cell.overrides["source"],
        build(scenario["partitioner"], seed=seed),
        corruptions=[build(each, seed=seed) for each in scenario.get("corruptions", [])],
        batch_size=32,
        files=Files(root=root),
        splits=Splits(max_samples=sizes.federation_samples, server_val=validation, seed=seed),
    )
    data.setup("fit")
    start = time.perf_counter()
    clients, server = participants_of(data)
    valuer = FedBary("pixels", support=sizes.support // 4, iterations=5, workers=1, allow_reconstruction=True)
    valued = valuer.value(clients, server, generator_for(seed, "fedbary"), judge=False)
    values, seconds = {"FedBary": valued.shares.tolist()}, {"FedBary": time.perf_counter() - start}
    found: Measured = {"distances": valued.distances.tolist(), "seconds": seconds}
    found["rank"] = float(spearmanr(range(5), values["FedBary"]).statistic)
    if cell.overrides["scenario"] != "fedbary_no_validation":
        metrics = {
            "MR": CumulativeShapley(estimator="exact"),
            "GTG": CumulativeShapley(estimator="gtg"),
            "TMC": CumulativeShapley(
                estimator="permutation", estimator_args={"truncation": 0.01, "num_permutations": 10}
            ),
        }
        L.seed_everything(seed, verbose=False)
        client = model()
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            trainer(sizes.rounds, sizes, folder, metrics=metrics, seed=seed).fit(client, data)
            seconds["MR"] = time.perf_counter() - start
            values |= {name: metric.compute().tolist() for name, metric in metrics.items()}
            L.seed_everything(seed, verbose=False)
            start = time.perf_counter()
            game = RetrainedUtility(
                lambda cohort: trainer(sizes.rounds, sizes, folder, sampler=cohort, seed=seed), model(), data
            )
            values["exact"] = exact_shapley(game, game.num_players).values.tolist()
            seconds["exact"] = time.perf_counter() - start
    found["shares"] = {name: [100 * v / (sum(each) or torch.nan) for v in each] for name, each in values.items()}
    return found


# ---- table 2


def seconds_of_protocol(cell: Cell, root: str) -> Measured:
    """Of the processor, with n clients of normal samples, 50 features and ten classes."""
    sizes, clients = Sizes.of(cell), cell.overrides["clients"]
    generator, y = generator_for(cell.seed, "time"), torch.arange(sizes.time_samples) % 10

    def draw() -> Tensor:
        return torch.randn(len(y), 50, generator=generator) + y[:, None]

    sets, server = clients_of([(draw(), y) for _ in range(clients)]), server_of(draw(), y)
    method = FedBary(
        "pixels",
        support=cell.overrides["points"],
        iterations=sizes.time_iterations,
        workers=1,
        allow_reconstruction=True,
    )
    start = time.process_time()
    method.value(sets, server, generator, judge=False)
    return {"seconds": time.process_time() - start}


def seconds_of_competitor(cell: Cell, root: str) -> Measured:
    """Of the processor, to value the clients of a federation of Fashion-MNIST. MR and GTG without the training, as in
    the paper; exact and DataSV (truncated Monte Carlo, Ghorbani and Zou) train a federation for every coalition."""
    sizes, seed, name, n = Sizes.of(cell), cell.seed, cell.row, cell.overrides["clients"]
    data = FederatedDataModule(
        "fashion_mnist",
        IIDPartitioner(n, seed=seed),
        batch_size=32,
        files=Files(root=root),
        splits=Splits(max_samples=(n + 1) * sizes.time_samples, server_val=1 / (n + 1), seed=seed),
    )
    data.setup("fit")
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        if name in ("MR", "GTG"):
            metric = CumulativeShapley(estimator="exact" if name == "MR" else "gtg")
            spent = _timed(metric)
            trainer(sizes.time_rounds, sizes, folder, metrics={name: metric}, seed=seed).fit(model(), data)
            return {"seconds": sum(spent)}
        game = RetrainedUtility(
            lambda cohort: trainer(sizes.time_rounds, sizes, folder, sampler=cohort, seed=seed),
            model(),
            data,
            max_clients=n,
        )
        start = time.process_time()
        if name == "exact":
            exact_shapley(game, n)
        else:
            permutation_shapley(game, n, num_permutations=10, truncation=0.01, generator=generator_for(seed, "DataSV"))
        return {"seconds": time.process_time() - start}


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
