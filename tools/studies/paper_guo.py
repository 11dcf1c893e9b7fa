"""What is measured for Guo et al.'s comparison (Sensors 2024, ``tables/guo.yaml``).

A column is an experiment: data, network and scenario. The cells of the comparison are three runs, of which each gives
the values of several algorithms: the paper's own aggregation, FedAvg whose updates rebuild sub-models, and FedAvg
trained anew for every coalition.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise

import lightning as L
import torch
from cells import Cell, Measured, built, federated_loop
from own_models import OwnModels
from scipy.stats import spearmanr
from torch import Tensor

from benchmark.truth import train_copies
from flsv.cli.parser import FederatedCLI
from flsv.functional import (
    ShapleyEstimate,
    exact_shapley,
    label_divergence,
    permutation_shapley,
)
from flsv.functional.shapley.exact import all_coalitions
from flsv.utilities.seeding import generator_for

#: Of coalitions that are trained anew.
ESTIMATORS: dict[str, Callable[..., ShapleyEstimate]] = {
    "exact": exact_shapley,
    "TMC": partial(permutation_shapley, antithetic=False, truncation=0.01, num_permutations=15),
}


# ---- what is measured


def valued(cell: Cell, root: str) -> Measured:
    """Accuracy, and the values of all metrics of one run."""
    with built(cell, root) as cli:
        accuracy = _fitted(cli, cell.seed)
        found = federated_loop(cli.trainer).contributions
    return {
        "accuracy": accuracy,
        "values": {name: values.tolist() for name, values in found.items()},
    }


def retrained(cell: Cell, root: str) -> Measured:
    """Values of the game by retraining, which three algorithms share."""
    with built(cell, root) as cli:
        data = cli.datamodule
        data.prepare_data()
        data.setup("fit")
        L.seed_everything(cell.seed, verbose=False)
        masks = all_coalitions(data.num_clients)
        utilities = train_copies(cli.trainer, cli.model, data, "accuracy", masks, cell.seed)

    bits = 1 << torch.arange(data.num_clients)

    def game(masks: Tensor) -> Tensor:
        numbers = (masks * bits).sum(1)
        return utilities[numbers]

    values_by_estimator = {}
    for name, estimator in ESTIMATORS.items():
        generator = generator_for(cell.seed, name)
        estimate = estimator(
            game,
            data.num_clients,
            generator=generator,
        )
        values_by_estimator[name] = estimate.values.tolist()
    return {"values": values_by_estimator}


def tested(cell: Cell, root: str) -> Measured:
    """``accuracy`` of the last global model on the test set, in %."""
    with built(cell, root) as cli:
        return {"accuracy": _fitted(cli, cell.seed)}


def alone(cell: Cell, root: str) -> Measured:
    """Figure 2: ``divergence`` of each client's labels from equal ones, and ``accuracy`` of the model that it trains
    alone, in %."""
    with built(cell, root, **{"federation.evaluation.keep_trained": True}) as cli:
        tested = OwnModels(federated_loop(cli.trainer))
        cli.trainer.callbacks.append(tested)  # type: ignore[attr-defined]
        _fitted(cli, cell.seed)
        divergence = [float(label_divergence(counts)) for counts in cli.datamodule.class_counts]
    return {
        "divergence": divergence,
        "accuracy": (100 * tested.scores["trained"]["accuracy"]).tolist(),
    }


def _fitted(cli: FederatedCLI, seed: int) -> float:
    """Test accuracy of the last global model, in %."""
    L.seed_everything(seed, verbose=False)  # all rows start from the same weights
    cli.trainer.fit(cli.model, cli.datamodule)
    return 100 * cli.trainer.test(cli.model, cli.datamodule, verbose=False)[0]["test_accuracy"]


# ---- what a run's values show


def shares(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, list[float]]:
    """Of every algorithm the values divided by the sum of their sizes, so that algorithms compare."""
    found = {}
    for name, values in run["values"].items():
        total = sum(map(abs, values))
        found[name] = [value / total if total else 0.0 for value in values]
    return found


def checks(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, dict[str, bool]]:
    """By algorithm and scenario: whether a run's values show what they have to."""
    scenario = column.rpartition(", ")[2]
    return {
        name: {scenario: check(scenario, each)}
        for name, each in shares(run, beside, row, column).items()
    }


def agreements(
    run: Measured, beside: Mapping[str, Measured], row: str, column: str
) -> dict[str, float]:
    """By algorithm :func:`agreement`."""
    scenario = column.rpartition(", ")[2]
    return {
        name: agreement(scenario, each) for name, each in shares(run, beside, row, column).items()
    }


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
