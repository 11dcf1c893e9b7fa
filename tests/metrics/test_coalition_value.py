"""CoalitionValue: every value and fold against a plain loop over coalitions and rounds; estimators; free riders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from toys import Plain, fit, network, toy_data

from flsv import ConfigurationError, Reporting
from flsv.aggregation import ShapleyWeighted
from flsv.attacks import FreeRider
from flsv.functional import ESTIMATORS, ShapleyEstimate, exact_shapley
from flsv.loop import FederatedLoop
from flsv.metrics import (
    CoalitionValue,
    CumulativeShapley,
    LowerBoundShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
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
        ({"value": "banzhaf", "estimator": "gtg"}, r"estimator='gtg'.*exact.*which give the value 'banzhaf'"),
        ({"value": "beta", "estimator_args": {"alpha": -1.0}}, "alpha"),
        ({"value": "banzhaf", "estimator_args": {"alpha": 1.0}}, r"does not take \['alpha'\]"),
        ({"fold": Decay(), "per_class": True}, r"normalize=False"),
        ({"performance": "negative_loss", "per_class": True}, r"performance='negative_loss'.*per class"),
        ({"performance": "balanced_accuracy", "num_classes": 2}, r"performance='balanced_accuracy'.*per class"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"CoalitionValue.*{message}"):
        CoalitionValue(**arguments)


@pytest.mark.parametrize("estimator", ["auto", *ESTIMATORS])
def test_arguments_that_no_estimator_has(estimator: str) -> None:
    match = r"CumulativeShapley\(estimator_args=.*does not take \['bugdet'\]. It takes \[.*'budget'"
    with pytest.raises(ConfigurationError, match=match):
        CumulativeShapley(estimator=estimator, estimator_args={"bugdet": 100})
    with pytest.raises(ConfigurationError, match=r"does not take \['generator', 'utility'\]"):
        CumulativeShapley(estimator=estimator, estimator_args={"utility": None, "generator": None})
    CumulativeShapley(estimator=estimator, estimator_args={"budget": 100})


def test_functions_of_ones_own() -> None:
    def mine(utility: Any, num_players: int, *, depth: int, generator: Any) -> ShapleyEstimate:
        return exact_shapley(utility, num_players)

    def open_to_all(utility: Any, num_players: int, **options: Any) -> ShapleyEstimate:
        assert options["depth"] == 3
        return exact_shapley(utility, num_players)

    with pytest.raises(ConfigurationError, match=r"mine does not take \['width'\]. It takes \['depth'\]"):
        PartialFederatedShapley(estimator=mine, estimator_args={"width": 3})
    for estimator in (mine, open_to_all):
        metric = PartialFederatedShapley(num_clients=3, estimator=estimator, estimator_args={"depth": 3})
        metric.update(torch.arange(3), lambda masks: masks.float().sum(1))
        assert metric.compute().tolist() == pytest.approx([1, 1, 1])


def test_under_afedsv_a_free_rider_has_exactly_nothing_and_the_others_have_all(tmp_path: Path) -> None:
    metrics = {
        "strict": SurrogateFederatedShapley(normalize="positive", weighting="fixed", init=None),
        "paper": SurrogateFederatedShapley(),
    }
    riders: list[Any] = [FreeRider(clients=[3])]
    loop = FederatedLoop(ShapleyWeighted("strict"), metrics, uploads=riders, seed=1, reporting=Reporting(table=False))
    fit(loop, tmp_path, Plain(network(batch_norm=False)), toy_data((1, 1, 1, 1), server_val=0.3), rounds=6)
    assert loop.contributions["strict"][3] == 0
    assert (loop.contributions["strict"][:3] > 0.01).all()
    assert loop.weights is not None
    assert loop.weights[3] == 0
    assert loop.contributions["paper"][3] > 0.1  # which is why there is another


def test_lower_bounds_of_the_rounds_by_hand() -> None:
    draw, metric = torch.Generator().manual_seed(0), LowerBoundShapley(5, confidence=0.8)
    seen: dict[int, list[float]] = {}
    for ids in ([0, 1, 2], [1, 2], [0, 2], [2, 3], [0, 3], [0, 2, 3]):
        worth = torch.randn(len(ids), generator=draw)
        metric.update(torch.tensor(ids), lambda masks, worth=worth: masks.float() @ worth)
        for i, value in zip(ids, worth.tolist()):
            seen.setdefault(i, []).append(value)
    value = metric.compute()
    assert value[4].isnan()
    for i, values in seen.items():
        mean = sum(values) / len(values)
        bound = mean - stats.t.ppf(0.8, len(values) - 1) * stats.sem(values)
        assert value[i].item() == pytest.approx(bound, abs=1e-5)
        assert metric.diagnostics()["mean"][i].item() == pytest.approx(mean, abs=1e-6)


def test_a_first_round_takes_the_estimators_error() -> None:
    def noisy(masks: torch.Tensor) -> torch.Tensor:
        return masks.double().sum(1) + (masks.double() @ torch.arange(1.0, 13.0).double()).sin()

    metric = LowerBoundShapley(12, estimator="permutation", estimator_args={"budget": 200}, confidence=0.9)
    metric.update(torch.arange(12), noisy, torch.Generator().manual_seed(0))
    below = metric.diagnostics()["mean"] - metric.compute()
    assert (below > 0).all()
    torch.testing.assert_close(below, metric.variance.sqrt().squeeze(-1) * float(stats.norm.ppf(0.9)))
