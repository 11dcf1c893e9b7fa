"""CoalitionValue: every value and fold against a plain loop over coalitions and rounds, and from a configuration."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flsv import ConfigurationError
from flsv.metrics import CoalitionValue
from flsv.metrics.coalitions import Decay, LowerBound, MovingAverage, Sum, SurrogateAverage

N, ROUNDS = 5, 4
COHORTS = [[0, 1, 2, 3], [1, 3, 0], [3, 0, 1], [0, 2, 1, 3]]
WEIGHTS: dict[str, Callable[[int, int], float]] = {  # of a coalition of s that the player joins, of n players
    "shapley": lambda n, s: 1 / (n * math.comb(n - 1, s)),
    "banzhaf": lambda n, s: 1 / 2 ** (n - 1),
    # B(s + beta, n - 1 - s + alpha) / B(alpha, beta) with alpha 2 and beta 1
    "beta": lambda n, s: 2 * math.gamma(s + 1) * math.gamma(n + 1 - s) / math.gamma(n + 2),
    "leave_one_out": lambda n, s: float(s == n - 1),
}
Player = Callable[[frozenset[int]], float]


def worth(index: int) -> Player:
    """A round's game by numbers of clients: some join forces, and all add something."""
    draw = torch.Generator().manual_seed(index)
    alone = torch.rand(N, generator=draw).tolist()
    both = torch.rand(N, N, generator=draw).tolist()
    return lambda group: sum(alone[i] for i in group) + math.sqrt(sum(both[i][j] for i in group for j in group))


def utility(game: Player, cohort: list[int]) -> Callable[[Tensor], Tensor]:
    def of(masks: Tensor) -> Tensor:
        groups = [frozenset(i for i, inside in zip(cohort, row) if inside) for row in masks.tolist()]
        return torch.tensor([game(group) for group in groups], dtype=torch.float64)

    return of


def value_by_loop(game: Player, cohort: list[int], weight: Callable[[int, int], float]) -> dict[int, float]:
    values = {}
    for player in cohort:
        others = [i for i in cohort if i != player]
        groups = [frozenset(g) for s in range(len(cohort)) for g in itertools.combinations(others, s)]
        values[player] = sum(weight(len(cohort), len(g)) * (game(g | {player}) - game(g)) for g in groups)
    return values


def played(metric: CoalitionValue, rounds: range = range(ROUNDS)) -> CoalitionValue:
    for index in rounds:
        cohort = COHORTS[index]
        draw = torch.Generator().manual_seed(index)
        metric.update(torch.tensor(cohort), utility(worth(index), cohort), draw, index)
    return metric


def last(rounds: list[float], indices: list[int]) -> float:
    return rounds[-1]


def average(rounds: list[float], indices: list[int]) -> float:
    value = rounds[0]
    for later in rounds[1:]:
        value = 0.9 * value + 0.1 * later
    return value


def decayed(rounds: list[float], indices: list[int]) -> float:
    return sum(0.5 ** (index + 1) * value for index, value in zip(indices, rounds))


FOLDS: dict[str, tuple[Any, Callable[[list[float], list[int]], float]]] = {
    "last": ("last", last),
    "average": ("average", average),
    "sum": (Sum(), lambda rounds, indices: sum(rounds)),
    "decay": (Decay(0.5, normalize=False), decayed),
    "lower_bound": (LowerBound(0.5), lambda rounds, indices: sum(rounds) / len(rounds)),  # the mean itself
}


@pytest.mark.parametrize("estimator", ["auto", "exact"])
@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("value", WEIGHTS)
def test_it_is_a_plain_loop_over_coalitions_and_rounds(value: str, fold: str, estimator: str) -> None:
    given, by_loop = FOLDS[fold]
    arguments = {"alpha": 2.0} if value == "beta" else None
    made: Any = CoalitionValue(N, value=value, estimator=estimator, estimator_args=arguments, fold=given)
    found = played(made).compute()
    rounds = [value_by_loop(worth(index), COHORTS[index], WEIGHTS[value]) for index in range(ROUNDS)]
    for client in range(N):
        indices = [index for index in range(ROUNDS) if client in rounds[index]]
        expected = by_loop([rounds[i][client] for i in indices], indices) if indices else math.nan
        torch.testing.assert_close(found[client], torch.tensor(expected), rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", WEIGHTS)
def test_any_value_from_random_orders(value: Any) -> None:
    arguments = {"num_permutations": 4000, **({"alpha": 2.0} if value == "beta" else {})}
    metric = CoalitionValue(N, value=value, estimator="permutation", estimator_args=arguments, fold="sum")
    found, error = played(metric).compute(), metric.diagnostics()["stderr"]
    rounds = [value_by_loop(worth(index), COHORTS[index], WEIGHTS[value]) for index in range(ROUNDS)]
    for client in range(N - 1):
        expected = sum(values.get(client, 0.0) for values in rounds)
        assert abs(float(found[client]) - expected) <= 4 * float(error[client]) + 1e-5


ALL_FOLDS = [MovingAverage(0.3), SurrogateAverage(), Decay(normalize=False), Sum(), LowerBound()]


@pytest.mark.parametrize("estimator", ["auto", "permutation"])
@pytest.mark.parametrize("fold", ALL_FOLDS)
@pytest.mark.parametrize("value", WEIGHTS)
def test_values_per_class_are_those_of_each_class_by_itself(value: Any, fold: Any, estimator: str) -> None:
    arguments = {"num_permutations": 6} if estimator == "permutation" else None
    made = partial(CoalitionValue, N, value=value, fold=fold, estimator=estimator, estimator_args=arguments)
    by_class, alone = made(num_classes=2), [made(), made()]
    for index, cohort in enumerate(COHORTS):
        games = [utility(worth(index), cohort), utility(worth(index + 10), cohort)]
        for metric, game in zip([by_class, *alone], [lambda m, g=games: torch.stack([g[0](m), g[1](m)], 1), *games]):
            metric.update(torch.tensor(cohort), game, torch.Generator().manual_seed(index), index)
    expected = torch.stack([metric.compute() for metric in alone], dim=1)
    torch.testing.assert_close(by_class.compute(), expected, equal_nan=True)
    assert by_class.compute()[:4].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"value": "owen"}, r"value='owen'.*banzhaf"),
        ({"value": "banzhaf", "estimator": "gtg"}, r"estimator='gtg'.*exact.*which give the value 'banzhaf'"),
        ({"value": "beta", "estimator_args": {"alpha": -1.0}}, "alpha"),
        ({"value": "banzhaf", "estimator_args": {"alpha": 1.0}}, r"does not take \['alpha'\]"),
        ({"fold": "median"}, r"fold='median'.*lower_bound"),
        ({"fold": Decay(2.0)}, "decay=2.0"),
        ({"fold": MovingAverage(1.0)}, "momentum=1.0"),
        ({"fold": Decay(), "per_class": True}, r"normalize=False"),
        ({"weighting": "size"}, r"weighting='size'.*\"?aggregation"),
        ({"fold": 3}, r"fold=3.*lower_bound"),
        ({"performance": "negative_loss", "per_class": True}, r"performance='negative_loss'.*per class"),
        ({"performance": "balanced_accuracy", "num_classes": 2}, r"performance='balanced_accuracy'.*per class"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"CoalitionValue.*{message}"):
        CoalitionValue(**arguments)
