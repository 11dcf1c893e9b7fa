"""The federations of Guo et al.'s comparison (``guo_table.py``): which configurations, and what is measured.

A column is an experiment: data, network and scenario. The cells of the comparison are three runs, of which each gives
the values of several algorithms: the paper's own aggregation, FedAvg whose updates rebuild sub-models, and FedAvg
trained anew for every coalition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import lightning as L
import torch
from common import quiet_trainer
from lightning.pytorch.accelerators import CPUAccelerator
from table_runs import WATCHING, Cell, Measured, built, federated_loop
from torch import Tensor

from flsv import FederatedDataModule
from flsv.cli.own_models import OwnModels
from flsv.cli.parser import FederatedCLI
from flsv.functional import (
    MULTI_ROUND_INDICES,
    ShapleyEstimate,
    exact_shapley,
    label_divergence,
    permutation_shapley,
    stratified_shapley,
)
from flsv.games.retraining import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.seeding import generator_for

SOURCES, NETWORKS = ("mnist", "fashion_mnist"), ("softmax", "lenet5")
SCENARIOS = {
    "same": "same distribution and size: the five values within 10 % of each other",
    "sizes": "same distribution, 2, 3, 4, 5 and 6 of 20 parts: values increase with size",
    "mixtures": "80 % of two classes, the last client two classes only: its value is positive (the paper's claim)",
    "biased": "four clients with two classes, one with all: that one first, the others within 20 % and positive",
    "noisy": "0, 5, 10, 15 and 20 % of noise: values decrease with noise",
}
OURS, OURS_FIXED, OURS_RAW = "ours, renormalised", "ours, fixed", "ours, not divided by the round's sum"
RETRAINING = ("exact", "TMC", "K-subset")
REBUILDING = ("OR", "SOR", "MR", "TMR")
ALGORITHMS = (OURS, OURS_FIXED, OURS_RAW, *RETRAINING, *REBUILDING)
TMC_ORDERS, TMC_TRUNCATION, K_SUBSET_BUDGET = 15, 0.01, 20

# The paper names neither network, learning rate nor batch size; its authors' code is softmax regression in batches of
# 100 with a rate of 0.1. In the preset for two cores softmax regression gains in every round; LeNet5, which is not the
# paper's, needs momentum to leave the plateau at which it starts within a few rounds.
LR, MOMENTUM = "model.init_args.optimizer.init_args.lr", "model.init_args.optimizer.init_args.momentum"
TOTAL, VALIDATION = "data.partitioner.init_args.total", "data.splits.server_val"
ROUNDS, RATE = "trainer.max_epochs", "federation.server_lr"
PRESETS: dict[str, dict[str, Any]] = {
    "softmax": {LR: 0.01, MOMENTUM: 0.0, "data.batch_size": 200, TOTAL: 5000, VALIDATION: 1500 / 60000, ROUNDS: 20},
    "lenet5": {LR: 0.03, MOMENTUM: 0.9, "data.batch_size": 20, TOTAL: 600, VALIDATION: 300 / 60000, ROUNDS: 20},
}
GPU = {"trainer.accelerator": "auto"}
FULL: dict[str, dict[str, Any]] = {
    "softmax": {LR: 0.1, MOMENTUM: 0.0, "data.batch_size": 100, VALIDATION: 0.1, ROUNDS: 20, **GPU},
    "lenet5": {LR: 0.01, MOMENTUM: 0.9, "data.batch_size": 64, VALIDATION: 0.1, ROUNDS: 20, **GPU},
}
#: Beside one round.
SHORT = {TOTAL: 300, VALIDATION: 0.005, "trainer.limit_test_batches": 1}

FEDAVG, WEIGHTED = ("fedavg.yaml",), ("divergence_weighted.yaml",)
A, B = "federation.aggregator.init_args.a", "federation.aggregator.init_args.b"
DECAYED = "flsv.metrics.DecayedShapley"
#: Values of one run of the paper's aggregation: all with the paper's decay, the class's default.
OWN_METRICS = {
    OURS: {"class_path": DECAYED, "init_args": {"estimator": "exact"}},
    OURS_RAW: {"class_path": DECAYED, "init_args": {"estimator": "exact", "normalize": False}},
    OURS_FIXED: {"class_path": DECAYED, "init_args": {"estimator": "exact", "coalition_weights": "fixed"}},
}
#: Values of one run of FedAvg. OR plays one game when all rounds are over.
REBUILT_METRICS = {
    "OR": {"class_path": "flsv.metrics.OneRoundShapley", "init_args": {"estimator": "exact"}},
    **{
        name: {"class_path": DECAYED, "init_args": {"estimator": "exact", **arguments}}
        for name, arguments in MULTI_ROUND_INDICES.items()
    },
}


@dataclass(frozen=True)
class Sweep:
    """Tables 2 and 3: the accuracy's gain over FedAvg by a and b, in the scenario of their captions."""

    a: Sequence[float]
    b: Sequence[float]


PAPER_SWEEP = Sweep((0.2, 0.3, 0.4, 0.5, 0.6, 0.7), (0.05, 0.1, 0.2, 0.3, 0.4))
SMALL_SWEEP = Sweep((0.2, 0.4, 0.6, 0.7), (0.05, 0.1, 0.2, 0.4))
#: Data on which nothing was chosen, for the values without the division by the round's sum, which is not in the paper.
HELD_OUT = "cifar10"
CLAIMED, SERVER_LRS, SHARES = ("mixtures", "biased"), (1.0, 1.5), (0.2, 0.4, 0.6, 0.8, 1.0)


def cells(full: bool, seeds: Sequence[int], retrain: Sequence[str] = ("softmax",)) -> list[Cell]:
    """Those of all tables and figures, seed by seed. Coalitions are retrained for the networks named, with ``full`` for
    all: LeNet5 takes two minutes of one core for it."""
    settings = FULL if full else PRESETS
    sweep = PAPER_SWEEP if full else SMALL_SWEEP
    made: list[Cell] = []
    for seed in seeds:
        for network, source in product(NETWORKS, SOURCES):
            at = partial(_cell, source, network, seed, settings[network])
            for scenario in SCENARIOS:
                column = f"{source}, {network}, {scenario}"
                made.append(at("ours", column, scenario, WEIGHTED, {"federation.metrics": OWN_METRICS}, "valued"))
                rounds = settings[network][ROUNDS]
                metrics = {**REBUILT_METRICS, "OR": _with(REBUILT_METRICS["OR"], rounds=rounds)}
                made.append(at("rebuilt", column, scenario, FEDAVG, {"federation.metrics": metrics}, "valued"))
                if full or network in retrain:
                    made.append(at("retrained", column, scenario, FEDAVG, {"federation.metrics": {}}, "retrained"))
        at = partial(_cell, HELD_OUT, "softmax", seed, settings["softmax"])
        for scenario in SCENARIOS:
            column = f"held out: {HELD_OUT}, softmax, {scenario}"
            made.append(at("ours", column, scenario, WEIGHTED, {"federation.metrics": OWN_METRICS}, "valued"))
        for network, scenario in product(NETWORKS, CLAIMED):
            at = partial(_cell, "mnist", network, seed, settings[network])
            for ordered, rate in product((False, True), SERVER_LRS):
                for row, files in {"FedAvg": FEDAVG, "DivergenceWeighted": WEIGHTED}.items():
                    name = f"{'class-ordered' if ordered else 'shuffled'}, server_lr {rate:g}, {row}"
                    changes = {RATE: rate, "federation.metrics": {}}
                    measure = "ordered" if ordered else "shuffled"
                    made.append(at(name, f"claim: {network}, {scenario}", scenario, files, changes, measure))
        for source in SOURCES:
            at = partial(_cell, source, "softmax", seed, settings["softmax"])
            column, nothing = f"sweep: {source}", {"federation.metrics": {}}
            made.append(at("FedAvg", column, "mixtures", FEDAVG, nothing, "shuffled"))
            for a, b in product(sweep.a, sweep.b):
                for name, rate in (("normalised", 1.0), ("as they are", raw_sum(a, b))):
                    changes = {**nothing, A: a, B: b, RATE: rate}
                    made.append(at(f"{a:g}, {b:g}, {name}", column, "mixtures", WEIGHTED, changes, "shuffled"))
            column = f"figure 2: {source}"
            changes = {**nothing, "data.splits.client_test": 0.0}
            made.append(at("Individual", column, "divergence", ("separate.yaml",), changes, "alone"))
    return made


def raw_sum(a: float, b: float, clients: int = 5) -> float:
    """What N_k - a F_k + b sum to over the clients, F summing to 1: the server's step, were they not made to sum to 1.

    In the sweep's scenario none is negative.
    """
    return 1 - a + clients * b


def _with(spec: Mapping[str, Any], **arguments: Any) -> dict[str, Any]:
    return {**spec, "init_args": {**spec["init_args"], **arguments}}


def _cell(
    source: str,
    network: str,
    seed: int,
    setting: Mapping[str, Any],
    row: str,
    column: str,
    scenario: str,
    algorithm: Sequence[str],
    changes: Mapping[str, Any],
    measure: str,
) -> Cell:
    overrides = {"data.source": source, "model.init_args.network": network, **setting, **changes}
    files = ("fashion_mnist.yaml", f"scenarios/guo_{scenario}.yaml", *algorithm)
    return Cell(row, column, seed, files, overrides, f"guo_federation:{measure}")


# ---- what is measured


class Played:
    """The exact estimator, which keeps what it finds and how long that takes.

    Args:
        other: where another metric plays the same game earlier in the round: its estimates are taken.
    """

    def __init__(self, other: Played | None = None) -> None:
        self.other = other
        self.estimates: list[ShapleyEstimate] = []
        self.seconds: list[float] = []

    def __call__(self, utility: Any, players: int, generator: Any = None) -> ShapleyEstimate:
        start = time.perf_counter()
        estimate = exact_shapley(utility, players) if self.other is None else self.other.estimates[-1]
        self.estimates.append(estimate)
        self.seconds.append(time.perf_counter() - start)
        return estimate

    @property
    def rows(self) -> list[list[float]]:
        return [estimate.values.tolist() for estimate in self.estimates]


#: Metrics that play the same game as one before them.
SAME_GAME = {OURS_RAW: OURS, "MR": "SOR", "TMR": "SOR"}


def valued(cell: Cell, root: str) -> Measured:
    """Of all metrics of one run: the values, what they cost, and the rounds' own values."""
    with built(cell, root) as cli:
        loop = federated_loop(cli.trainer)
        played: dict[str, Played] = {}
        for name, metric in loop.metrics.items():
            played[name] = Played(played.get(SAME_GAME.get(name, "")))
            metric.estimator, metric.estimator_args = played[name], {}  # timed
        accuracy, seconds = _fitted(cli, cell.seed)
    spent = sum(sum(each.seconds) for each in played.values())
    algorithms = {}
    for name, metric in loop.metrics.items():
        source = played[SAME_GAME.get(name, name)]
        rounds = len(played[name].estimates)  # fewer for a truncated one
        algorithms[name] = {
            "values": loop.contributions[name].tolist(),
            "valuation": sum(source.seconds[:rounds]),
            "coalitions": int(metric.diagnostics()["evaluations"]),
            "trainings": 0,
            "rows": None if name == "OR" else source.rows,
        }
    return {"accuracy": accuracy, "training": seconds - spent, "algorithms": algorithms}


def retrained(cell: Cell, root: str) -> Measured:
    """The game by retraining, which three algorithms share; each pays for the coalitions that it asks for."""
    with built(cell, root) as cli:
        loop = federated_loop(cli.trainer)
        L.seed_everything(cell.seed, verbose=False)

        def trainer(cohort: FixedCohort) -> L.Trainer:
            accelerator = "cpu" if isinstance(cli.trainer.accelerator, CPUAccelerator) else "auto"
            folder, rounds = cli.trainer.default_root_dir, int(cli.trainer.max_epochs or 1)
            return quiet_trainer(folder, rounds, [*WATCHING, loop.replace(sampler=cohort)], accelerator)

        utility = RetrainedUtility(trainer, cli.model, cli.datamodule)
        everybody = tuple(range(utility.num_players))
        algorithms = {}
        for name, estimator in estimators().items():
            asked: set[tuple[int, ...]] = set()

            def game(masks: Tensor, asked: set[tuple[int, ...]] = asked) -> Tensor:
                asked.update(tuple(mask.nonzero().flatten().tolist()) for mask in masks)
                return utility(masks)

            estimate = estimator(game, utility.num_players, generator=generator_for(cell.seed, name))
            extra = [members for members in asked if members not in ((), everybody)]
            algorithms[name] = {
                "values": estimate.values.tolist(),
                "valuation": sum(utility.seconds[members] for members in extra),
                "coalitions": len(asked),
                "trainings": len(extra),
                "rows": None,
            }
        return {"accuracy": None, "training": utility.seconds[everybody], "algorithms": algorithms}


def estimators() -> dict[str, Callable[..., ShapleyEstimate]]:
    tmc = partial(permutation_shapley, antithetic=False, truncation=TMC_TRUNCATION, num_permutations=TMC_ORDERS)
    return {"exact": exact_shapley, "TMC": tmc, "K-subset": partial(stratified_shapley, budget=K_SUBSET_BUDGET)}


def shuffled(cell: Cell, root: str) -> Measured:
    """``accuracy`` of the last global model on the test set, in %."""
    with built(cell, root) as cli:
        return {"accuracy": _fitted(cli, cell.seed)[0]}


def ordered(cell: Cell, root: str) -> Measured:
    """The same with class-ordered batches, which no option of ``flsv fit`` gives."""
    with built(cell, root) as cli:
        cli.datamodule.__class__ = ClassOrdered
        return {"accuracy": _fitted(cli, cell.seed)[0]}


def alone(cell: Cell, root: str) -> Measured:
    """Figure 2: ``divergence`` of each client's labels from equal ones, and ``accuracy`` of the model that it trains
    alone, in %."""
    with built(cell, root, **{"federation.evaluation.keep_trained": True}) as cli:
        tested = OwnModels(federated_loop(cli.trainer))
        cli.trainer.callbacks.append(tested)  # type: ignore[attr-defined]
        _fitted(cli, cell.seed)
        divergence = [float(label_divergence(counts)) for counts in cli.datamodule.class_counts]
    return {"divergence": divergence, "accuracy": (100 * tested.scores["trained"]["accuracy"]).tolist()}


class ClassOrdered(FederatedDataModule):
    """Every client's batches sorted by class and never shuffled, as in the authors' code."""

    def client_loader(self, client: int, split: Any = "train", generator: Any = None, shuffle: bool = True) -> Any:
        loader = super().client_loader(client, split, generator, shuffle)
        if split != "train" or not shuffle:
            return loader
        if client not in self.__dict__.setdefault("_ordered", {}):
            x, y = (torch.cat(parts) for parts in zip(*loader))
            order = y.argsort(stable=True)
            self._ordered[client] = list(zip(x[order].split(self.batch_size), y[order].split(self.batch_size)))
        return self._ordered[client]


def _fitted(cli: FederatedCLI, seed: int) -> tuple[float, float]:
    """Test accuracy of the last global model, in %, and the seconds of the fit."""
    L.seed_everything(seed, verbose=False)  # all rows start from the same weights
    start = time.perf_counter()
    cli.trainer.fit(cli.model, cli.datamodule)
    seconds = time.perf_counter() - start
    return 100 * cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]["test_accuracy"], seconds
