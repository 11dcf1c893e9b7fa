"""What is measured for FedBary's comparison (Li et al., CVPR 2024; ``tables/fedbary.yaml``): the protocol against POT
(figure 3), contribution shares (figure 4), distances by portion of bad samples (figure 5a) and time (table 2).

The cells are no ``flsv fit`` runs: what they are about, and their sizes, stands in their overrides.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning as L
import numpy as np
import ot
import torch
import yaml
from cells import CONFIGS, Cell, Measured
from common import quiet_trainer
from scipy.stats import spearmanr
from torch import Tensor

import flsv
from flsv import ClassifierClient, FederatedDataModule, FederatedLoop, Reporting
from flsv.data import ClosedSetLabelNoise, Files, GaussianNoise, IIDPartitioner, Splits, load_image_data
from flsv.functional import (
    TransportClient,
    exact_shapley,
    federated_wasserstein,
    label_embedding,
    permutation_shapley,
    wasserstein_barycenter,
)
from flsv.metrics import CumulativeShapley
from flsv.models import build_network
from flsv.retraining.retrained_utility import RetrainedUtility
from flsv.utilities.seeding import generator_for
from flsv.valuation import FedBary, clients_of, participants_of, server_of
from flsv.valuation.features import PCA, head_inputs

NETWORKS = {"mnist": "shapley_fl_fmnist", "fashion_mnist": "shapley_fl_fmnist", "cifar10": "lenet5"}


def given(cell: Cell) -> SimpleNamespace:
    """What a cell is about, and its sizes."""
    return SimpleNamespace(**cell.overrides)


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


def learned_features(part: Split, at: SimpleNamespace, seed: int) -> Callable[[Tensor], Tensor]:
    """The penultimate layer of a small network that the server has trained on its validation images, by its principal
    components. No client's sample is used; the network goes to the clients."""
    torch.manual_seed(seed)
    network = build_network(NETWORKS[at.source], 10, part.val_x.shape[1:])
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(at.epochs):
        for batch in torch.randperm(len(part.val_x)).split(32):
            if len(batch) > 1:
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(network(part.val_x[batch]), part.val_y[batch]).backward()
                optimizer.step()
    network.eval()
    pca = PCA(at.components)
    pca.fit(head_inputs(network, part.val_x), [])
    return lambda x: pca(head_inputs(network, x))


# ---- figure 3


def distances(cell: Cell, root: str) -> Measured:
    """Relative errors of the protocol's distance against ``ot.emd2``, by support and number of iterations."""
    m, seed = given(cell).protocol_samples, cell.seed
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
        options: dict[str, Any] = {"generator": generator_for(seed, "gamma"), "allow_reconstruction": True}
        found = federated_wasserstein(x, x2, support=m // share, iterations=20, **options).history / exact - 1
        shown = {f"K = {k}": float(found[k - 1]) for k in (1, 2, 5, 10, 15, 20)}
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
        options: dict[str, Any] = {"initial": start, "generator": generator_for(seed, "support")}
        found = wasserstein_barycenter(clients, support=100, iterations=steps, **options).support_points.numpy()
        errors[f"K = {steps}"] = float(ot.emd2(weights[0], weights[0], ot.dist(found, reference))) ** 0.5
    return {"barycenter": errors}


# ---- figure 5a


def variants(cell: Cell, root: str) -> Measured:
    """By noise, source and rate: the distance."""
    at, seed = given(cell), cell.seed
    m = at.variants_samples
    part = split(at.source, root, m, m, seed)
    found: Measured = {"distances": {}}
    for noise in ("feature noise", "label flips"):
        # Noise on all pixels is next to invisible in principal components.
        features = (lambda x: x.flatten(1)) if noise == "feature noise" else pca_features(part)
        server = label_embedding(features(part.val_x), part.val_y)
        distances = found["distances"].setdefault(f"{noise}, {at.source}", {})
        for rate in (0.0, 0.05, 0.15, 0.3):
            x, y, _ = corrupted(part, noise, rate, seed)
            client = label_embedding(features(x), y)
            options: dict[str, Any] = {"generator": generator_for(seed, "gamma"), "allow_reconstruction": True}
            protocol = federated_wasserstein(client, server, support=m, iterations=at.iterations, **options)
            distances[f"{100 * rate:.0f} %"] = float(protocol.distance)
    return found


def corrupted(part: Split, noise: str, rate: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Samples of which a share is bad, their labels, and which are bad."""
    x, y = part.x.clone(), part.y.clone()
    if rate:
        gaussian, flips = GaussianNoise(sample_rate=rate), ClosedSetLabelNoise(rate, to="random")
        x, y = (gaussian if noise == "feature noise" else flips)(x, y, 10, generator_for(seed, noise))
    return x, y, (x != part.x).flatten(1).any(1) | (y != part.y)


# ---- figure 4


def build(spec: dict[str, Any], seed: int) -> Any:
    """What a configuration's ``class_path`` of ``flsv.data`` and ``init_args`` mean, with this seed."""
    return getattr(flsv.data, spec["class_path"])(**{**spec["init_args"], "seed": seed})


def model() -> ClassifierClient:
    return ClassifierClient("lenet5", optimizer=partial(torch.optim.SGD, lr=0.02, momentum=0.9))


def trainer(rounds: int, at: SimpleNamespace, folder: str, **options: Any) -> L.Trainer:
    """For one federation; options are the loop's."""
    loop = FederatedLoop(**options, reporting=Reporting(figures=0, table=False))
    return quiet_trainer(folder, rounds, [loop], at.accelerator)


def contributions(cell: Cell, root: str) -> Measured:
    """FedBary's distances in the pixels, and shares ``[5]`` in % by method; five kinds of clients.

    MR is the sum of the rounds' exact Shapley values; exact is the Shapley value of the 31 federations trained from
    scratch.
    """
    at, seed = given(cell), cell.seed
    scenario = yaml.safe_load((CONFIGS / f"scenarios/{at.scenario}.yaml").read_text())["data"]
    validation = scenario.get("splits", {}).get("server_val", at.federation_validation)
    data = FederatedDataModule(
        at.source,
        build(scenario["partitioner"], seed),
        corruptions=[build(each, seed) for each in scenario.get("corruptions", [])],
        batch_size=32,
        files=Files(root=root),
        splits=Splits(max_samples=at.federation_samples, server_val=validation, seed=seed),
    )
    data.setup("fit")
    clients, server = participants_of(data)
    valuer = FedBary("pixels", support=at.support // 4, iterations=5, workers=1, allow_reconstruction=True)
    valued = valuer.value(clients, server, generator_for(seed, "fedbary"), judge=False)
    values = {"FedBary": valued.shares.tolist()}
    if at.scenario != "fedbary_no_validation":
        multi_round = CumulativeShapley(estimator="exact")
        L.seed_everything(seed, verbose=False)
        client = model()
        with tempfile.TemporaryDirectory() as folder:
            trainer(at.rounds, at, folder, metrics={"MR": multi_round}, seed=seed).fit(client, data)
            values["MR"] = multi_round.compute().tolist()
            L.seed_everything(seed, verbose=False)
            game = RetrainedUtility(
                lambda cohort: trainer(at.rounds, at, folder, sampler=cohort, seed=seed), model(), data
            )
            values["exact"] = exact_shapley(game, game.num_players).values.tolist()
    return {
        "distances": valued.distances.tolist(),
        "rank": float(spearmanr(range(5), values["FedBary"]).statistic),
        "shares": {name: [100 * v / (sum(each) or torch.nan) for v in each] for name, each in values.items()},
    }


# ---- table 2


def seconds_of_protocol(cell: Cell, root: str) -> Measured:
    """Of the processor, with n clients of normal samples, 50 features and ten classes."""
    at = given(cell)
    generator, y = generator_for(cell.seed, "time"), torch.arange(at.time_samples) % 10

    def draw() -> Tensor:
        return torch.randn(len(y), 50, generator=generator) + y[:, None]

    sets, server = clients_of([(draw(), y) for _ in range(at.clients)]), server_of(draw(), y)
    options: dict[str, Any] = {"iterations": at.time_iterations, "workers": 1, "allow_reconstruction": True}
    method = FedBary("pixels", support=at.points, **options)
    start = time.process_time()
    method.value(sets, server, generator, judge=False)
    return {"seconds": time.process_time() - start}


class Timed(CumulativeShapley):
    """Takes the processor's seconds of its updates."""

    seconds = 0.0

    def update(
        self,
        client_ids: Tensor,
        utility: Any,
        generator: torch.Generator | None = None,
        round_index: int = 0,
        aggregation_weights: Tensor | None = None,
    ) -> None:
        start = time.process_time()
        super().update(client_ids, utility, generator, round_index, aggregation_weights)
        self.seconds += time.process_time() - start


def seconds_of_competitor(cell: Cell, root: str) -> Measured:
    """Of the processor, to value the clients of a federation of Fashion-MNIST. MR and GTG without the training, as in
    the paper; exact and DataSV (truncated Monte Carlo, Ghorbani and Zou) train a federation for every coalition."""
    at, seed, n = given(cell), cell.seed, given(cell).clients
    data = FederatedDataModule(
        "fashion_mnist",
        IIDPartitioner(n, seed=seed),
        batch_size=32,
        files=Files(root=root),
        splits=Splits(max_samples=(n + 1) * at.time_samples, server_val=1 / (n + 1), seed=seed),
    )
    data.setup("fit")
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        if cell.row in ("MR", "GTG"):
            metric = Timed(estimator="exact" if cell.row == "MR" else "gtg")
            trainer(at.time_rounds, at, folder, metrics={cell.row: metric}, seed=seed).fit(model(), data)
            return {"seconds": metric.seconds}
        game = RetrainedUtility(
            lambda cohort: trainer(at.time_rounds, at, folder, sampler=cohort, seed=seed), model(), data, max_clients=n
        )
        start = time.process_time()
        if cell.row == "exact":
            exact_shapley(game, n)
        else:
            permutation_shapley(game, n, num_permutations=10, truncation=0.01, generator=generator_for(seed, "DataSV"))
        return {"seconds": time.process_time() - start}
