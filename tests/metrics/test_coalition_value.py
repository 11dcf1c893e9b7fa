"""CoalitionValue: every value and fold against a plain loop over coalitions and rounds; estimators; free riders."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functional.shapley.games import random_table, reference_shapley, table_game
from functional.shapley.test_exact import VALUES, reference
from torch import Tensor

from flsv import ConfigurationError
from flsv.aggregation import ShapleyWeighted
from flsv.federation import FederatedLoop
from flsv.functional import ESTIMATORS, ShapleyEstimate, exact_shapley
from flsv.metrics import (
    CoalitionValue,
    CumulativeShapley,
    LeaveOneOut,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.metrics.coalitions import Decay, MovingAverage, Sum, SurrogateAverage
from flsv.sampling import FixedCohort, SoftmaxSampler, UniformSampler
from helpers.data import toy_data
from helpers.fits import fit
from helpers.loops_by_hand import KeepsRounds

N = 5

COHORTS = [[0, 1, 2, 3], [1, 3, 0], [3, 0, 1], [0, 2, 1, 3]]


def game(index: int) -> Tensor:
    return random_table(len(COHORTS[index % 10]), index)


def by_loop(value: str) -> list[dict[int, float]]:
    weight = VALUES[value][1]
    return [
        dict(zip(ids, reference(game(index), weight).tolist())) for index, ids in enumerate(COHORTS)
    ]


def played(metric: CoalitionValue) -> CoalitionValue:
    for index, cohort in enumerate(COHORTS):
        draw = torch.Generator().manual_seed(index)
        metric.update(torch.tensor(cohort), table_game(game(index)), draw, index)
    return metric


def average(rounds: list[float], indices: list[int]) -> float:
    value = rounds[0]
    for later in rounds[1:]:
        value = 0.9 * value + 0.1 * later
    return value


FOLDS: dict[str, tuple[Any, Callable[[list[float], list[int]], float]]] = {
    "last": ("last", lambda rounds, indices: rounds[-1]),
    "average": ("average", average),
    "sum": (Sum(), lambda rounds, indices: sum(rounds)),
    "decay": (
        Decay(0.5, normalize=False),
        lambda rounds, indices: sum(
            0.5 ** (index + 1) * value for index, value in zip(indices, rounds)
        ),
    ),
}


@pytest.mark.parametrize("fold", FOLDS)
@pytest.mark.parametrize("value", VALUES)
def test_coalition_value_equals_a_plain_loop_over_coalitions_and_rounds(
    value: str, fold: str
) -> None:
    given, folded = FOLDS[fold]
    rounds = by_loop(value)
    for estimator in {"auto", "exact"} if value == "shapley" else {value}:
        found = played(CoalitionValue(N, estimator=estimator, fold=given)).compute()
        for client in range(N):
            indices = [index for index in range(len(rounds)) if client in rounds[index]]
            expected = (
                folded([rounds[i][client] for i in indices], indices) if indices else math.nan
            )
            torch.testing.assert_close(
                found[client], torch.tensor(expected), rtol=1e-4, atol=1e-5, equal_nan=True
            )


ALL_FOLDS = [MovingAverage(0.3), SurrogateAverage(), Decay(normalize=False), Sum()]


@pytest.mark.parametrize("estimator", ["auto", "permutation", "leave_one_out"])
@pytest.mark.parametrize("fold", ALL_FOLDS)
def test_values_per_class_are_those_of_each_class_by_itself(fold: Any, estimator: str) -> None:
    arguments = {"num_permutations": 6} if estimator == "permutation" else None
    made = partial(CoalitionValue, N, fold=fold, estimator=estimator, estimator_args=arguments)
    by_class, alone = made(num_classes=2), [made(), made()]
    for index, cohort in enumerate(COHORTS):
        tables = [game(index), game(index + 10)]
        for metric, table in zip([by_class, *alone], [torch.stack(tables, 1), *tables]):
            metric.update(
                torch.tensor(cohort), table_game(table), torch.Generator().manual_seed(index), index
            )
    expected = torch.stack([metric.compute() for metric in alone], dim=1)
    torch.testing.assert_close(by_class.compute(), expected, equal_nan=True)
    assert by_class.compute()[:4].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": "banzhaf"}, r"estimator='banzhaf'.*expected a function or one of.*'exact'"),
        ({"estimator_args": {"alpha": 1.0}}, r"unexpected keyword argument 'alpha'"),
        ({"fold": Decay(), "per_class": True}, r"normalize=False"),
        (
            {"performance": "negative_loss", "per_class": True},
            r"performance='negative_loss'.*per class",
        ),
        (
            {"performance": "balanced_accuracy", "num_classes": 2},
            r"performance='balanced_accuracy'.*per class",
        ),
    ],
)
def test_coalition_value_with_conflicting_arguments_is_refused(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"CoalitionValue.*{message}"):
        CoalitionValue(**arguments)


@pytest.mark.parametrize("estimator", ["auto", *ESTIMATORS])
def test_estimator_args_unknown_to_the_estimator_are_refused(estimator: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"CumulativeShapley\(estimator_args=.*argument 'bugdet'"
    ):
        CumulativeShapley(estimator=estimator, estimator_args={"bugdet": 100})
    with pytest.raises(ConfigurationError, match=r"multiple values for .* 'generator'"):
        CumulativeShapley(estimator=estimator, estimator_args={"generator": None})
    CumulativeShapley(estimator=estimator, estimator_args={"budget": 100})


def test_estimator_of_a_metric_may_be_a_users_function() -> None:
    def mine(utility: Any, num_players: int, *, depth: int, generator: Any) -> ShapleyEstimate:
        return exact_shapley(utility, num_players)

    def open_to_all(utility: Any, num_players: int, **options: Any) -> ShapleyEstimate:
        assert options["depth"] == 3
        return exact_shapley(utility, num_players)

    with pytest.raises(ConfigurationError, match=r"estimator_args={'width': 3}.*'depth'"):
        PartialFederatedShapley(estimator=mine, estimator_args={"width": 3})
    for estimator in (mine, open_to_all):
        metric = PartialFederatedShapley(
            num_clients=3, estimator=estimator, estimator_args={"depth": 3}
        )
        metric.update(torch.arange(3), lambda masks: masks.float().sum(1))
        assert metric.compute().tolist() == pytest.approx([1, 1, 1])


def test_cumulative_shapley_sums_values_and_variances_of_the_rounds() -> None:
    metric = CumulativeShapley(
        num_clients=4, estimator="permutation", estimator_args={"budget": 12}
    )
    single = PartialFederatedShapley(
        num_clients=4, estimator="permutation", estimator_args={"budget": 12}
    )
    total, variance = torch.zeros(3), torch.zeros(3)
    for seed in range(3):
        utility = table_game(random_table(3, seed))
        for each in (metric, single):
            each.update(torch.tensor([0, 1, 3]), utility, torch.Generator().manual_seed(seed))
        total += single.compute()[[0, 1, 3]]
        variance += single.diagnostics()["stderr"][[0, 1, 3]] ** 2
    torch.testing.assert_close(metric.compute()[[0, 1, 3]], total)
    torch.testing.assert_close(metric.diagnostics()["stderr"][[0, 1, 3]], variance.sqrt())
    assert metric.compute()[2].isnan()


def test_surrogate_federated_shapley_equals_shapleyfls_equation_3() -> None:
    metric = SurrogateFederatedShapley(num_clients=4, beta=0.6, estimator="exact")
    value = torch.full((4,), 0.5, dtype=torch.float64)
    for ids, seed in (([0, 1, 2], 1), ([1, 3], 2), ([0, 1, 2], 3)):
        table = random_table(len(ids), seed)
        metric.update(torch.tensor(ids), table_game(table))
        sv = torch.from_numpy(reference_shapley(table))
        nsv = (sv - sv.min()) / (sv.max() - sv.min())
        value[ids] = 0.6 * value[ids] + 0.4 * nsv
        seen = value.where(metric.history[:, -1] > 0, torch.nan)
        torch.testing.assert_close(
            metric.compute().double(), seen, rtol=1e-5, atol=1e-6, equal_nan=True
        )
    assert not seen.isnan().any()


@pytest.mark.parametrize("normalize", ["min-max", "positive"])
def test_stderr_of_surrogate_shapley_is_divided_by_the_range_of_the_values(normalize: Any) -> None:
    options = {"estimator": "permutation", "estimator_args": {"budget": 12}}
    plain = PartialFederatedShapley(4, **options)
    surrogate = CoalitionValue(4, fold=SurrogateAverage(normalize=normalize), **options)
    for each in (plain, surrogate):
        each.update(torch.arange(4), table_game(random_table(4)), torch.Generator().manual_seed(0))
    values, stderr = plain.compute(), plain.diagnostics()["stderr"]
    least = values.min() if normalize == "min-max" else 0
    torch.testing.assert_close(surrogate.diagnostics()["stderr"], stderr / (values.max() - least))


def test_estimator_auto_keeps_to_the_budget_for_few_players() -> None:
    metric = CoalitionValue(8, estimator_args={"budget": 60})
    metric.update(
        torch.arange(8), lambda masks: masks.sum(1).double(), torch.Generator().manual_seed(0)
    )
    assert 30 < metric.diagnostics()["evaluations"] <= 60
    exact = CoalitionValue(8, estimator_args={"budget": 2**8})
    exact.update(torch.arange(8), lambda masks: masks.sum(1).double() ** 2)
    assert exact.diagnostics()["stderr"].tolist() == [0.0] * 8


def test_coalition_value_in_a_loop_equals_shapley_of_the_rounds_models_by_hand(
    tmp_path: Path,
) -> None:
    kept, data = KeepsRounds(), toy_data((3, 2, 2, 1), batch_size=7, server_val=0.3)
    loop = FederatedLoop(
        kept,
        {"sv": PartialFederatedShapley(estimator="exact"), "loo": LeaveOneOut()},
        sampler=UniformSampler(3),
        seed=4,
    )
    module = fit(loop, tmp_path, data=data, rounds=2)
    round, table = kept.rounds[-1], torch.empty(8, dtype=torch.float64)
    x, y = (torch.cat(parts) for parts in zip(*data.val_dataloader()))
    for number in range(8):
        members = [i for i in range(3) if number >> i & 1]
        model = round.client_vectors[members].mean(0) if members else round.global_vector
        loop.space.write(module, model)
        table[number] = (module.eval()(x).argmax(-1) == y).double().mean()
    ids, expected = round.client_ids, torch.from_numpy(reference_shapley(table))
    torch.testing.assert_close(
        loop.contributions["sv"][ids].double(), expected, rtol=1e-5, atol=1e-6
    )
    without = torch.stack([table[7] - table[7 - 2**i] for i in range(3)])
    torch.testing.assert_close(
        loop.contributions["loo"][ids].double(), without, rtol=1e-5, atol=1e-6
    )
    assert loop.metrics["loo"].diagnostics()["evaluations"] == 2 * 4


def test_game_metric_without_server_validation_data_is_refused(tmp_path: Path) -> None:
    loop = FederatedLoop(metrics={"sv": PartialFederatedShapley()})
    with pytest.raises(
        ConfigurationError, match=r"metrics \['sv'\] evaluate models on the server's validation set"
    ):
        fit(loop, tmp_path, data=toy_data(server_val=0))


def test_momentum_and_uniform_start_give_s_fedavgs_relevance() -> None:
    """ShapleyFL's ``s-fedavg.py``: relevance from 1/n, and the chances it gives."""
    n, rounds = 5, [([0, 2, 3], [0.3, -0.1, 0.05]), ([2, 3], [0.2, 0.4]), ([0, 3], [0.6, -0.2])]
    metric, relevance = (
        PartialFederatedShapley(n, estimator="exact", momentum=0.75, init="uniform"),
        [1 / n] * n,
    )
    for ids, values in rounds:
        worth = torch.tensor(values)
        metric.update(torch.tensor(ids), lambda masks, worth=worth: masks.float() @ worth)
        for i, value in zip(ids, values):
            relevance[i] = relevance[i] * 0.75 + value * 0.25
    value, total = metric.compute(), sum(math.exp(phi) for phi in relevance)
    assert value[[1, 4]].isnan().all()  # never seen
    torch.testing.assert_close(value[[0, 2, 3]], torch.tensor(relevance)[[0, 2, 3]])
    assert metric.prior == 1 / n
    drawn = SoftmaxSampler(2, "sv").chances(n, {"sv": value.nan_to_num(metric.prior)})
    torch.testing.assert_close(
        drawn.float(), torch.tensor([math.exp(phi) / total for phi in relevance])
    )
    # Ours, the option: the average starts at the first value, and clients never seen are the mean of the others.
    ours = PartialFederatedShapley(n, estimator="exact", momentum=0.75)
    ours.update(torch.tensor([0, 2]), lambda masks: masks.float() @ torch.tensor([0.3, -0.1]))
    torch.testing.assert_close(ours.compute()[[0, 2]], torch.tensor([0.3, -0.1]))
    assert ours.prior is None


class Sees(ShapleyWeighted):
    def weights(self, round: Any, contributions: Any) -> Any:
        self.seen = contributions["ssv"]
        return super().weights(round, contributions)


def test_never_drawn_client_has_no_value_and_strategies_see_the_prior(tmp_path: Path) -> None:
    aggregator = Sees("ssv")
    loop = FederatedLoop(
        aggregator, {"ssv": SurrogateFederatedShapley()}, sampler=FixedCohort([0, 2]), seed=1
    )
    fit(loop, tmp_path, data=toy_data(), rounds=2)
    assert loop.contributions["ssv"][1].isnan()
    assert aggregator.seen[1] == 0.5
