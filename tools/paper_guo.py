"""What is measured for Guo et al.'s comparison (Sensors 2024, ``tables/guo.yaml``).

A column is an experiment: data, network and scenario. The cells of the comparison are three runs, of which each gives
the values of several algorithms: the paper's own aggregation, FedAvg whose updates rebuild sub-models, and FedAvg
trained anew for every coalition.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import lightning as L
from cells import Cell, Measured, built, federated_loop
from common import quiet_trainer
from lightning.pytorch.accelerators import CPUAccelerator
from scipy.stats import spearmanr
from torch import Tensor

from flsv.cli.own_models import OwnModels
from flsv.cli.parser import FederatedCLI
from flsv.functional import (
    ShapleyEstimate,
    exact_shapley,
    label_divergence,
    permutation_shapley,
    stratified_shapley,
)
from flsv.games.retraining import RetrainedUtility
from flsv.sampling import FixedCohort
from flsv.seeding import generator_for

TMC_ORDERS, TMC_TRUNCATION, K_SUBSET_BUDGET = 15, 0.01, 20
#: Metrics that play the same game as one before them.
SAME_GAME = {"ours, not divided by the round's sum": "ours, renormalized", "MR": "SOR", "TMR": "SOR"}
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


def valued(cell: Cell, root: str) -> Measured:
    """Of all metrics of one run: the values, what they cost, and the rounds' own values."""
    with built(cell, root) as cli:
        loop = federated_loop(cli.trainer)
        played: dict[str, Played] = {}
        for name, metric in loop.metrics.items():
            played[name] = Played(played.get(SAME_GAME.get(name, "")))
            metric._estimate = played[name]  # timed
        accuracy, seconds = _fitted(cli, cell.seed)
    spent = sum(sum(each.seconds) for each in played.values())
    algorithms = {}
    for name, metric in loop.metrics.items():
        source = played[SAME_GAME.get(name, name)]
        rounds = len(played[name].estimates)  # fewer for a truncated one
        algorithms[name] = {
            "values": loop.board.contributions[name].tolist(),
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
            return quiet_trainer(folder, rounds, [loop.replace(sampler=cohort)], accelerator)

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


def tested(cell: Cell, root: str) -> Measured:
    """``accuracy`` of the last global model on the test set, in %."""
    with built(cell, root) as cli:
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


def _fitted(cli: FederatedCLI, seed: int) -> tuple[float, float]:
    """Test accuracy of the last global model, in %, and the seconds of the fit."""
    L.seed_everything(seed, verbose=False)  # all rows start from the same weights
    start = time.perf_counter()
    cli.trainer.fit(cli.model, cli.datamodule)
    seconds = time.perf_counter() - start
    return 100 * cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]["test_accuracy"], seconds


# ---- what a run's values show


def shares(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> dict[str, list[float]]:
    """Of every algorithm the values divided by the sum of their sizes, so that algorithms compare."""
    found = {}
    for name, each in run["algorithms"].items():
        total = sum(map(abs, each["values"]))
        found[name] = [value / total if total else 0.0 for value in each["values"]]
    return found


def checks(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> dict[str, dict[str, bool]]:
    """By algorithm and scenario: whether a run's values show what they have to."""
    scenario = column.rpartition(", ")[2]
    return {name: {scenario: check(scenario, each)} for name, each in shares(run, beside, row, column).items()}


def agreements(run: Measured, beside: Mapping[str, Measured], row: str, column: str) -> dict[str, float]:
    """By algorithm :func:`agreement`."""
    scenario = column.rpartition(", ")[2]
    return {name: agreement(scenario, each) for name, each in shares(run, beside, row, column).items()}


def apart(values: Sequence[float]) -> float:
    """The distance of the outermost values, as a share of the larger of their sizes."""
    return (max(values) - min(values)) / max(map(abs, values), default=0.0) if any(values) else 0.0


def check(scenario: str, values: Sequence[float]) -> bool:
    """Same: within 10 % of each other. Sizes: increasing; noisy: decreasing. Mixtures: the last client's, of two
    classes, is positive. Biased: the last client first, the others within 20 % and positive."""
    steps = [after - before for before, after in pairwise(values)]
    if scenario == "same":
        return apart(values) <= 0.1
    if scenario == "sizes":
        return min(steps) > 0
    if scenario == "noisy":
        return max(steps) < 0
    if scenario == "mixtures":
        return values[-1] > 0
    others = values[:-1]
    return values[-1] > max(others) and min(others) > 0 and apart(others) <= 0.2


def agreement(scenario: str, values: Sequence[float]) -> float:
    """One number for how well shares show what they have to: the larger, the better.

    Same: minus how far apart they are, in %. Sizes and noise: Spearman's correlation with the size, with minus the
    noise. Mixtures: the last client's share. Biased: the last client's share minus the largest other one.
    """
    if scenario == "same":
        return -100 * apart(values)
    if scenario == "mixtures":
        return values[-1]
    if scenario == "biased":
        return values[-1] - max(values[:-1])
    order = range(len(values)) if scenario == "sizes" else range(len(values), 0, -1)
    return float(spearmanr(list(order), values).statistic) if len(set(values)) > 1 else 0.0
