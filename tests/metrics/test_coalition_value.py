"""CoalitionValue: every value and fold against a plain loop over coalitions and rounds; estimators; free riders."""

import math
from functools import partial

import pytest
import torch
from functional.shapley.games import make_random_table, make_table_game, shapley_by_all_orders
from torch import Tensor
from torch.testing import assert_close

from flsv.aggregation import ShapleyWeighted
from flsv.federation import FederatedLoop
from flsv.functional import ESTIMATORS, ShapleyEstimate, exact_shapley
from flsv.metrics import (
    CoalitionValue,
    CumulativeShapley,
    PartialFederatedShapley,
    SurrogateFederatedShapley,
)
from flsv.metrics.coalitions import Decay, MovingAverage, Sum, SurrogateAverage
from flsv.sampling import FixedCohort
from helpers import make_generator, refused
from helpers.data import toy_data
from helpers.fits import fit

NUM_CLIENTS = 5

COHORTS = [[0, 1, 2, 3], [1, 3, 0], [3, 0, 1], [0, 2, 1, 3]]


def make_game(index: int) -> Tensor:
    """The utilities of a round's coalitions. Rounds from 10 on are those of another class."""
    return make_random_table(len(COHORTS[index % 10]), index)


def leave_one_out_by_hand(table: Tensor) -> list[float]:
    """What all players gain by each of them. Row b of the table belongs to the coalition with bitmask b."""
    grand = len(table) - 1
    num_players = grand.bit_length()
    return [float(table[grand] - table[grand - 2**player]) for player in range(num_players)]


def values_of_client_by_round(client: int, values_of_table) -> dict[int, float]:
    """The client's values in the rounds in which it takes part, by a function of a round's table."""
    value_by_round = {}
    for index, cohort in enumerate(COHORTS):
        if client in cohort:
            values = values_of_table(make_game(index))
            value_by_round[index] = float(values[cohort.index(client)])
    return value_by_round


def play_rounds(metric: CoalitionValue) -> CoalitionValue:
    for index, cohort in enumerate(COHORTS):
        game = make_table_game(make_game(index))
        generator = make_generator(index)
        metric.update(torch.tensor(cohort), game, generator=generator, round_index=index)
    return metric


# A client's values by round, folded by hand.


def last(value_by_round: dict[int, float]) -> float:
    return value_by_round[max(value_by_round)]


def average(value_by_round: dict[int, float]) -> float:
    first_value, *later_values = value_by_round.values()
    mean = first_value
    for value in later_values:
        mean = 0.9 * mean + 0.1 * value
    return mean


def total(value_by_round: dict[int, float]) -> float:
    return sum(value_by_round.values())


def decayed_total(value_by_round: dict[int, float]) -> float:
    return sum(0.5 ** (index + 1) * value for index, value in value_by_round.items())


@pytest.mark.parametrize(
    ("fold", "fold_by_hand"),
    [
        ("last", last),
        ("average", average),
        (Sum(), total),
        (Decay(0.5, normalize=False), decayed_total),
    ],
    ids=["last", "average", "sum", "decay"],
)
@pytest.mark.parametrize(
    ("estimator", "values_of_table"),
    [
        ("auto", shapley_by_all_orders),
        ("exact", shapley_by_all_orders),
        ("leave_one_out", leave_one_out_by_hand),
    ],
    ids=["auto", "exact", "leave one out"],
)
def test_coalition_value_equals_a_plain_loop_over_coalitions_and_rounds(
    estimator, values_of_table, fold, fold_by_hand
):
    absent_client = 4
    expected = torch.full((NUM_CLIENTS,), torch.nan)
    for client in range(absent_client):
        value_by_round = values_of_client_by_round(client, values_of_table)
        expected[client] = fold_by_hand(value_by_round)

    metric = play_rounds(CoalitionValue(NUM_CLIENTS, estimator=estimator, fold=fold))

    assert_close(metric.compute(), expected, rtol=1e-4, atol=1e-5, equal_nan=True)


ALL_FOLDS = [MovingAverage(0.3), SurrogateAverage(), Decay(normalize=False), Sum()]


@pytest.mark.parametrize("fold", ALL_FOLDS)
def test_values_per_class_are_those_of_each_class_by_itself(fold):
    make_metric = partial(CoalitionValue, NUM_CLIENTS, fold=fold)
    by_class = make_metric(num_classes=2)
    of_class_0 = make_metric()
    of_class_1 = make_metric()

    for index, cohort in enumerate(COHORTS):
        table_0 = make_game(index)
        table_1 = make_game(index + 10)
        table_by_class = torch.stack([table_0, table_1], dim=1)
        update = {"client_ids": torch.tensor(cohort), "round_index": index}
        of_class_0.update(utility=make_table_game(table_0), **update)
        of_class_1.update(utility=make_table_game(table_1), **update)
        by_class.update(utility=make_table_game(table_by_class), **update)

    expected = torch.stack([of_class_0.compute(), of_class_1.compute()], dim=1)
    values = by_class.compute()
    assert_close(values, expected, equal_nan=True)
    never_drawn = values.isnan().all(dim=1)
    assert never_drawn.tolist() == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"estimator": "banzhaf"}, r"estimator='banzhaf'.*expected a function or one of.*'exact'"),
        ({"estimator_args": {"alpha": 1.0}}, r"unexpected keyword argument 'alpha'"),
        ({"fold": Decay(), "per_class": True}, r"normalize=False"),
        (
            {"performance": "negative_loss", "per_class": True},
            r"per_class=True.* but got performance='negative_loss'",
        ),
        (
            {"performance": "balanced_accuracy", "num_classes": 2},
            r"per_class=True.* but got performance='balanced_accuracy'",
        ),
    ],
)
def test_coalition_value_with_conflicting_arguments_is_refused(arguments, message):
    with refused(f"CoalitionValue.*{message}"):
        CoalitionValue(**arguments)


@pytest.mark.parametrize("estimator", ["auto", *ESTIMATORS])
def test_estimator_args_unknown_to_the_estimator_are_refused(estimator):
    with refused(r"CumulativeShapley\(estimator_args=.*argument 'bugdet'"):
        CumulativeShapley(estimator=estimator, estimator_args={"bugdet": 100})

    with refused(r"multiple values for .* 'generator'"):
        CumulativeShapley(estimator=estimator, estimator_args={"generator": None})

    CumulativeShapley(estimator=estimator, estimator_args={"budget": 100})


def estimate_with_depth(utility, num_players: int, *, depth: int, generator) -> ShapleyEstimate:
    return exact_shapley(utility, num_players)


def estimate_with_any_options(utility, num_players: int, **options) -> ShapleyEstimate:
    assert options["depth"] == 3
    return exact_shapley(utility, num_players)


@pytest.mark.parametrize("estimator", [estimate_with_depth, estimate_with_any_options])
def test_estimator_of_a_metric_may_be_a_users_function(estimator):
    metric = PartialFederatedShapley(
        num_clients=3, estimator=estimator, estimator_args={"depth": 3}
    )

    metric.update(torch.arange(3), lambda masks: masks.float().sum(1))

    # Each member adds 1 to any coalition that it joins.
    assert metric.compute().tolist() == pytest.approx([1, 1, 1])


def test_estimator_args_unknown_to_a_users_function_are_refused():
    with refused(r"estimator_args={'width': 3}.*'depth'"):
        PartialFederatedShapley(estimator=estimate_with_depth, estimator_args={"width": 3})


def test_cumulative_shapley_sums_values_and_variances_of_the_rounds():
    options = {"estimator": "permutation", "estimator_args": {"budget": 12}}
    cumulative = CumulativeShapley(num_clients=4, **options)
    single = PartialFederatedShapley(num_clients=4, **options)
    ids = torch.tensor([0, 1, 3])
    total = torch.zeros(3)
    variance = torch.zeros(3)
    for seed in range(3):
        utility = make_table_game(make_random_table(3, seed))
        for metric in (cumulative, single):
            metric.update(ids, utility, make_generator(seed))
        total += single.compute()[ids]
        variance += single.diagnostics()["stderr"][ids] ** 2

    stderr = cumulative.diagnostics()["stderr"]
    assert_close(cumulative.compute()[ids], total)
    assert_close(stderr[ids], variance.sqrt())
    assert cumulative.compute()[2].isnan()


def test_surrogate_federated_shapley_equals_shapleyfls_equation_3():
    beta = 0.6
    metric = SurrogateFederatedShapley(num_clients=4, beta=beta, estimator="exact")
    initial_value = 0.5
    expected = torch.full((4,), initial_value).double()
    has_value = torch.zeros(4, dtype=torch.bool)

    for seed, ids in enumerate([[0, 1, 2], [1, 3], [0, 1, 2]]):
        table = make_random_table(len(ids), seed)
        metric.update(torch.tensor(ids), make_table_game(table))

        shapley = torch.from_numpy(shapley_by_all_orders(table))
        value_range = shapley.max() - shapley.min()
        normalized = (shapley - shapley.min()) / value_range
        expected[ids] = beta * expected[ids] + (1 - beta) * normalized
        has_value[ids] = True
        assert_close(
            metric.compute().double(),
            expected.where(has_value, torch.nan),
            rtol=1e-5,
            atol=1e-6,
            equal_nan=True,
        )

    assert has_value.all()


@pytest.mark.parametrize(
    ("normalize", "range_of"),
    [("min-max", lambda values: values.max() - values.min()), ("positive", torch.max)],
)
def test_stderr_of_surrogate_shapley_is_divided_by_the_range_of_the_values(normalize, range_of):
    options = {"estimator": "permutation", "estimator_args": {"budget": 12}}
    plain = PartialFederatedShapley(4, **options)
    surrogate = CoalitionValue(4, fold=SurrogateAverage(normalize=normalize), **options)
    game = make_table_game(make_random_table(4))

    for metric in (plain, surrogate):
        metric.update(torch.arange(4), game, make_generator())

    expected = plain.diagnostics()["stderr"] / range_of(plain.compute())
    assert_close(surrogate.diagnostics()["stderr"], expected)


@pytest.mark.parametrize(("budget", "is_exact"), [(60, False), (2**8, True)])
def test_estimator_auto_is_exact_where_the_budget_has_all_coalitions(budget, is_exact):
    def square_of_members(masks: Tensor) -> Tensor:
        return masks.sum(1).double() ** 2

    metric = CoalitionValue(8, estimator_args={"budget": budget})
    metric.update(torch.arange(8), square_of_members, make_generator())

    diagnostics = metric.diagnostics()
    assert budget / 2 < diagnostics["evaluations"] <= budget
    assert (diagnostics["stderr"] == 0).all() == is_exact


def test_momentum_and_uniform_start_give_s_fedavgs_relevance():
    """ShapleyFL's ``s-fedavg.py``: relevance from 1/n."""
    num_clients = 5
    momentum = 0.75
    values_by_round = [
        {0: 0.3, 2: -0.1, 3: 0.05},
        {2: 0.2, 3: 0.4},
        {0: 0.6, 3: -0.2},
    ]
    metric = PartialFederatedShapley(
        num_clients, estimator="exact", momentum=momentum, init="uniform"
    )
    relevance = torch.full((num_clients,), 1 / num_clients)

    for values_of_clients in values_by_round:
        ids = list(values_of_clients)
        values = torch.tensor([*values_of_clients.values()])
        metric.update(torch.tensor(ids), make_additive_game(values))
        relevance[ids] = momentum * relevance[ids] + (1 - momentum) * values

    computed = metric.compute()
    absent_clients = [1, 4]
    assert computed[absent_clients].isnan().all()
    relevance[absent_clients] = math.nan
    assert_close(computed, relevance, equal_nan=True)
    # Samplers use it for clients that were never drawn.
    assert metric.prior == 1 / num_clients


def make_additive_game(values: Tensor):
    """A coalition's utility is the sum of its members' values."""
    return lambda masks: masks.float() @ values


class RecordsValues(ShapleyWeighted):
    def weights(self, round, contributions):
        self.values_read = contributions["ssv"]
        return super().weights(round, contributions)


@pytest.mark.slow
def test_never_drawn_client_has_no_value_and_strategies_see_the_prior(tmp_path):
    aggregator = RecordsValues("ssv")
    loop = FederatedLoop(
        aggregator, {"ssv": SurrogateFederatedShapley()}, sampler=FixedCohort([0, 2]), seed=1
    )
    fit(loop, tmp_path, data=toy_data(), rounds=2)

    assert loop.contributions["ssv"][1].isnan()
    assert aggregator.values_read[1] == 0.5
