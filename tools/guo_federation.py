"""The federations of Guo et al.'s comparison (``guo_table.py``): settings, algorithms, runs."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
import yaml
from common import be_quiet, build, quiet_trainer
from torch import Tensor

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import DivergenceWeighted, FedAvg
from flsv.functional import (
    MULTI_ROUND_INDICES,
    ShapleyEstimate,
    exact_shapley,
    permutation_shapley,
    stratified_shapley,
)
from flsv.games.retraining import RetrainedUtility
from flsv.metrics import DecayedShapley, OneRoundShapley
from flsv.sampling import FixedCohort
from flsv.seeding import generator_for

CONFIGS = Path(__file__).parents[1] / "configs" / "scenarios"
SOURCES = ("mnist", "fashion_mnist")
SCENARIOS = {
    "same": "same distribution and size: the five values within 10 % of each other",
    "sizes": "same distribution, 2, 3, 4, 5 and 6 of 20 parts: values increase with size",
    "mixtures": "80 % of two classes, the last client two classes only: its value is positive (the paper's claim)",
    "biased": "four clients with two classes, one with all: that one first, the others within 20 % and positive",
    "noisy": "0, 5, 10, 15 and 20 % of noise: values decrease with noise",
}
OURS, OURS_FIXED, OURS_RAW = "ours, renormalised", "ours, fixed", "ours, not divided by the round's sum"
RETRAINING = ("exact", "TMC", "K-subset")
ALGORITHMS = (OURS, OURS_FIXED, OURS_RAW, *RETRAINING, "OR", "MR", "TMR")
OMEGA = 0.8
TMC_ORDERS, TMC_TRUNCATION, K_SUBSET_BUDGET = 15, 0.01, 20


@dataclass(frozen=True)
class Setting:
    """Training of one network; ``total`` images of all clients together (None: as many as there are)."""

    network: str
    total: int | None
    batch_size: int
    lr: float
    momentum: float = 0.0
    validation: float = 0.1
    rounds: int = 20
    accelerator: str = "cpu"


# The paper gives neither learning rate nor batch size. Softmax regression gains in every round at this rate; LeNet5
# needs momentum to leave the plateau at which it starts within a few rounds.
PRESETS = {
    "softmax": Setting("softmax", total=5000, batch_size=200, lr=0.01, validation=1500 / 60000),
    "lenet5": Setting("lenet5", total=600, batch_size=20, lr=0.03, momentum=0.9, validation=300 / 60000),
}
FULL = {
    "softmax": Setting("softmax", total=None, batch_size=64, lr=0.01, accelerator="auto"),
    "lenet5": Setting("lenet5", None, batch_size=64, lr=0.01, momentum=0.9, accelerator="auto"),
}


@dataclass(frozen=True)
class Result:
    """What one algorithm says in one federation.

    ``rows`` are the rounds' own values ``[T, 5]``, where it has them; ``coalitions`` are models evaluated, and
    ``trainings`` federations trained for it, besides the run itself.
    """

    algorithm: str
    values: list[float]
    accuracy: float
    training: float
    valuation: float
    coalitions: int
    trainings: int = 0
    rows: list[list[float]] | None = None


class Played:
    """The exact estimator, which keeps what it finds and how long that takes."""

    def __init__(self) -> None:
        self.estimates: list[ShapleyEstimate] = []
        self.seconds: list[float] = []

    def __call__(self, utility: Any, players: int, generator: Any = None) -> ShapleyEstimate:
        start = time.perf_counter()
        self.estimates.append(exact_shapley(utility, players))
        self.seconds.append(time.perf_counter() - start)
        return self.estimates[-1]

    def again(self, utility: Any, players: int, generator: Any = None) -> ShapleyEstimate:
        """For a metric that is updated later in the same round and plays the same game."""
        return self.estimates[-1]

    @property
    def rows(self) -> list[list[float]]:
        return [estimate.values.tolist() for estimate in self.estimates]


class ClassOrdered(FederatedDataModule):
    """Every client's batches sorted by class and never shuffled, as in the code of the paper's baselines."""

    def client_loader(self, client: int, split: Any = "train", generator: Any = None, shuffle: bool = True) -> Any:
        loader = super().client_loader(client, split, generator, shuffle)
        if split != "train" or not shuffle:
            return loader
        if client not in self.__dict__.setdefault("_ordered", {}):
            x, y = (torch.cat(parts) for parts in zip(*loader))
            order = y.argsort(stable=True)
            self._ordered[client] = list(zip(x[order].split(self.batch_size), y[order].split(self.batch_size)))
        return self._ordered[client]


def federated_data(
    source: str, scenario: str, setting: Setting, seed: int, root: str, kind: type = FederatedDataModule
) -> FederatedDataModule:
    """The scenario of the YAML file, with as many images as the setting says, dealt out by this seed."""
    file = yaml.safe_load((CONFIGS / f"guo_{scenario}.yaml").read_text())["data"]
    return kind(
        source,
        build(file["partitioner"], seed=seed, total=setting.total),
        root=root,
        batch_size=setting.batch_size,
        server_val_fraction=setting.validation,
        corruptions=[build(corruption, seed=seed) for corruption in file.get("corruptions", [])],
        seed=seed,
    )


def client_module(setting: Setting) -> ClassifierClient:
    sgd = partial(torch.optim.SGD, lr=setting.lr, momentum=setting.momentum)
    return ClassifierClient(setting.network, optimizer=sgd)


def make_trainer(loop: FederatedLoop, setting: Setting, folder: str) -> L.Trainer:
    return quiet_trainer(folder, setting.rounds, [loop], setting.accelerator)


def federate(
    data: FederatedDataModule, setting: Setting, seed: int, **strategies: Any
) -> tuple[FederatedLoop, float, float]:
    """One federation: the loop, the test accuracy of its model, and the seconds of the whole fit."""
    L.seed_everything(seed, verbose=False)
    loop = FederatedLoop(**strategies, figures_every=0, print_table=False, seed=seed)
    module = client_module(setting)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(loop, setting, folder)
        start = time.perf_counter()
        trainer.fit(module, data)
        seconds = time.perf_counter() - start
        accuracy = trainer.test(module, data, verbose=False)[0]["test_accuracy"]
    return loop, accuracy, seconds


# ---- the algorithms


def ours(data: FederatedDataModule, setting: Setting, seed: int) -> list[Result]:
    """DivergenceWeighted, its sub-models with renormalised and with fixed weights."""
    renormalised, fixed = Played(), Played()
    metrics = {
        OURS: DecayedShapley(decay=OMEGA, estimator=renormalised),
        OURS_RAW: DecayedShapley(decay=OMEGA, estimator=renormalised.again, normalize=False),
        OURS_FIXED: DecayedShapley(decay=OMEGA, estimator=fixed, coalition_weights="fixed"),
    }
    loop, accuracy, seconds = federate(data, setting, seed, aggregator=DivergenceWeighted(), metrics=metrics)
    training = seconds - sum(renormalised.seconds) - sum(fixed.seconds)
    played = {OURS: renormalised, OURS_RAW: renormalised, OURS_FIXED: fixed}
    return [
        Result(
            name,
            loop.contributions[name].tolist(),
            accuracy,
            training,
            sum(played[name].seconds),
            int(metric.diagnostics()["evaluations"]),
            rows=played[name].rows,
        )
        for name, metric in metrics.items()
    ]


def rebuilt(data: FederatedDataModule, setting: Setting, seed: int) -> list[Result]:
    """FedAvg, and the baselines that rebuild sub-models."""
    rounds, once = Played(), Played()
    metrics = {
        "OR": OneRoundShapley(setting.rounds, estimator=once),
        "MR": DecayedShapley(**MULTI_ROUND_INDICES["MR"], estimator=rounds),
        "TMR": DecayedShapley(**MULTI_ROUND_INDICES["TMR"], estimator=rounds.again),
    }
    loop, accuracy, seconds = federate(data, setting, seed, aggregator=FedAvg(), metrics=metrics)
    evaluated = setting.rounds - int(metrics["TMR"].diagnostics()["truncated"])
    valuation = {"OR": sum(once.seconds), "MR": sum(rounds.seconds), "TMR": sum(rounds.seconds[:evaluated])}
    training = seconds - valuation["OR"] - valuation["MR"]
    return [
        Result(
            name,
            loop.contributions[name].tolist(),
            accuracy,
            training,
            valuation[name],
            int(metric.diagnostics()["evaluations"]),
            rows=None if name == "OR" else rounds.rows,
        )
        for name, metric in metrics.items()
    ]


def retrained(data: FederatedDataModule, setting: Setting, seed: int, accuracy: float) -> list[Result]:
    """The game by retraining, which the three share; each pays for the coalitions that it asks for."""
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:

        def trainer(cohort: FixedCohort) -> L.Trainer:
            loop = FederatedLoop(sampler=cohort, figures_every=0, print_table=False, seed=seed)
            return make_trainer(loop, setting, folder)

        utility = RetrainedUtility(trainer, client_module(setting), data)
        everybody = tuple(range(utility.num_players))
        results = []
        for name in RETRAINING:
            asked: set[tuple[int, ...]] = set()

            def game(masks: Tensor, asked: set[tuple[int, ...]] = asked) -> Tensor:
                asked.update(tuple(mask.nonzero().flatten().tolist()) for mask in masks)
                return utility(masks)

            estimate = estimators()[name](game, utility.num_players, generator=generator_for(seed, name))
            extra = [members for members in asked if members not in ((), everybody)]
            results.append(
                Result(
                    name,
                    estimate.values.tolist(),
                    accuracy,
                    utility.seconds[everybody],
                    sum(utility.seconds[members] for members in extra),
                    len(asked),
                    len(extra),
                )
            )
    return results


def estimators() -> dict[str, Callable[..., ShapleyEstimate]]:
    tmc = partial(permutation_shapley, antithetic=False, truncation=TMC_TRUNCATION, num_permutations=TMC_ORDERS)
    return {"exact": exact_shapley, "TMC": tmc, "K-subset": partial(stratified_shapley, budget=K_SUBSET_BUDGET)}


# ---- jobs

Cell = tuple[str, str, str, int]  # source, network, scenario, seed
Claim = tuple[str, str, str, float, bool, int]  # network, scenario, aggregator, server_lr, class-ordered, seed
AGGREGATORS: dict[str, Callable[[], Any]] = {"FedAvg": FedAvg, "DivergenceWeighted": DivergenceWeighted}
CLAIM_SOURCE, CLAIM_SCENARIOS, SERVER_LRS = "mnist", ("mixtures", "biased"), (1.0, 1.5)


def value_clients(cell: Cell, *, settings: dict[str, Setting], root: str, retrain: bool = True) -> list[Result]:
    """All algorithms in one scenario."""
    be_quiet()
    source, network, scenario, seed = cell
    setting = settings[network]
    data = federated_data(source, scenario, setting, seed, root)
    results = ours(data, setting, seed) + rebuilt(data, setting, seed)
    if retrain:
        results += retrained(data, setting, seed, results[-1].accuracy)
    return results


def claimed_accuracy(claim: Claim, *, settings: dict[str, Setting], root: str) -> float:
    """Accuracy without any valuation."""
    be_quiet()
    network, scenario, aggregator, server_lr, ordered, seed = claim
    setting = settings[network]
    data = federated_data(CLAIM_SOURCE, scenario, setting, seed, root, ClassOrdered if ordered else FederatedDataModule)
    return federate(data, setting, seed, aggregator=AGGREGATORS[aggregator](), server_lr=server_lr)[1]
