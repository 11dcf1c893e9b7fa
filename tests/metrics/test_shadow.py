"""ShadowShapley: every coalition's model against a plain loop that trains this coalition alone."""

from functools import partial

import lightning as L
import pytest
import torch
from torch.testing import assert_close

from flsv import FederatedLoop
from flsv.aggregation import ShapleyWeighted
from flsv.attacks import Alignment, FreeRider, InnerProductManipulation, Scaling
from flsv.engines.engine import Engine
from flsv.filters import OutlierFilter
from flsv.functional import exact_shapley, few_coalitions
from flsv.functional.intervals import one_seed_stderr, t_quantile
from flsv.games.members import EMPTY, members_of
from flsv.metrics import LeaveOneOut, ShadowShapley, SurrogateFederatedShapley
from flsv.metrics.coalitions.design import num_valued_rounds
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.sampling import FixedCohort
from flsv.server import ContributionMetrics
from flsv.training.algorithms import SCAFFOLD
from flsv.values.coalition_files import NO_ROUND, ScoredModel, read_untrained
from flsv.values.query import SeedScores, values_by_round
from flsv.vmap import VmapProcess
from helpers import refused, warns
from helpers.coalitions_by_hand import (
    ROUNDS,
    SEED,
    GameByFits,
    make_shadow_loop,
    make_three_clients,
)
from helpers.fits import fit, trainer_for
from helpers.models import Plain, network


def make_engine(*options):
    return Engine(*options)


class EngineOfSites(Engine):
    clients_here = False


class OwnMetric(LeaveOneOut):
    trains_coalitions = True


#: Where each coalition's server does more than to average by samples, or clients more than to train.
FEDERATIONS = {
    "evaluated": lambda: {
        "aggregator": ShapleyWeighted("ssv"),
        "metrics": {"ssv": SurrogateFederatedShapley()},
    },
    "many at once": lambda: {"engine": "vmap"},
    "many at once, by a partial function": lambda: {"engine": partial(VmapProcess, chunk=2)},
    "an engine by a function": lambda: {"engine": make_engine},
    "an algorithm with a state": lambda: {"client_algorithm": SCAFFOLD()},
    "excluded": lambda: {
        "uploads": [Scaling(1e4, clients=[1])],
        "filters": [OutlierFilter(exclude=True)],
    },
    # One of the attacks has a state between rounds, another one in each coalition.
    "attacks": lambda: {
        "uploads": [
            Scaling(2.0, clients=[0]),
            FreeRider("noise", clients=[1]),
            Alignment(0.7, clients=[2]),
        ]
    },
}


@pytest.mark.by_turn
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FEDERATIONS)
def test_shadow_values_equal_those_of_retraining_each_coalition(tmp_path, name):
    make_options = FEDERATIONS[name]
    # SCAFFOLD is SGD without momentum.
    module = Plain(network(batch_norm=False), partial(torch.optim.SGD, lr=0.1))

    def make_trainer(cohort: FixedCohort) -> L.Trainer:
        loop = FederatedLoop(**make_options(), sampler=cohort, seed=SEED)
        return trainer_for(loop, tmp_path, ROUNDS, limit_val_batches=0)

    game = GameByFits(make_trainer, module, make_three_clients())
    expected = exact_shapley(game, 3).values
    expected_by_class = exact_shapley(game.recalls, 3).values

    options = make_options()
    classes = ShadowShapley(coalitions="all", per_class=True)
    options["metrics"] = {**options.get("metrics", {}), "classes": classes}
    loop = make_shadow_loop(ShadowShapley(coalitions="all", performance="negative_loss"), **options)
    fit(loop, tmp_path, module, make_three_clients(), rounds=ROUNDS)

    # A client that a filter excludes from every round has a value, too: coalitions train with its data.
    values = loop.contributions["shadow"].double()
    values_by_class = loop.values["classes"].by_class.double()
    assert_close(values, expected, rtol=1e-4, atol=1e-5)
    assert_close(values_by_class, expected_by_class, rtol=1e-5, atol=1e-6)
    assert classes.result().half_width is None


@pytest.mark.slow
def test_error_of_shadow_values_is_that_of_untrained_models_and_recent_rounds(tmp_path):
    metric = ShadowShapley(coalitions="all", performance="negative_loss")
    loop = make_shadow_loop(metric)
    fit(loop, tmp_path, Plain(network(batch_norm=False)), make_three_clients(), rounds=ROUNDS)

    untrained = read_untrained(tmp_path / "coalitions")
    history = loop.history().query("metric == 'shadow'")
    values_by_round = history.pivot(index="round", columns="client", values="value").to_numpy()
    expected = one_seed_stderr(
        metric.values[:, 0],
        stderr=torch.zeros(3),  # all coalitions are trained, so nothing is fitted
        untrained_utilities=untrained["negative_loss"][:, 0],
        recent_values=torch.tensor(values_by_round),
    )

    assert len(values_by_round) == ROUNDS
    half_width = metric.result().half_width
    assert_close(half_width, t_quantile(0.9) * expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "num_valued_rounds"),
    [
        ({}, 10),
        ({"performance": "val_loss", "mode": "min"}, 5),
        ({"every": 1}, 30),
        (
            {"every": 7},
            30 // 7 + 2,
        ),  # round 27 is both the fourth seventh one, and one of the last three
        ({"every": 1000}, 3),
        ({"every": 1000, "performance": "val_loss", "mode": "min"}, 1),
    ],
)
def test_shadow_values_are_of_the_last_rounds_and_some_before_them(options, num_valued_rounds):
    metric = ShadowShapley(num_clients=2, **options)
    metric.check_rounds(30)

    valued_rounds = metric.rounds_to_value(30)

    assert len(valued_rounds) == num_valued_rounds
    assert valued_rounds[-1] == 30 - 1


def test_fewer_valued_rounds_are_the_last_three_and_earlier_ones_at_equal_distances():
    metric = ShadowShapley(num_clients=2)
    metric.check_rounds(30)
    metric.plan_rounds(averages=False, max_valued_rounds=5)

    assert metric.rounds_to_value(30) == [9, 18, 27, 28, 29]


def test_metric_that_trains_coalitions_without_saying_which_is_refused():
    with refused("metric 'own': OwnMetric.trains_coalitions is True.*flsv.metrics.ShadowShapley"):
        FederatedLoop(metrics={"own": OwnMetric()})


@pytest.mark.parametrize(
    ("num_scored", "num_rounds"),
    [
        (100, 10),  # scoring after 20 rounds would take a quarter of 8,000 samples
        (400, 5),  # 5 * 400 is a quarter
        (401, 4),
        (8_000, 3),
    ],
)
def test_models_are_scored_on_at_most_a_quarter_of_the_samples_of_training(num_scored, num_rounds):
    assert num_valued_rounds(num_trained=8_000, num_scored=num_scored) == num_rounds


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"personalizer": Standalone()}, "gives each client a start point"),
        ({"uploads": [GaussianPrivacy(1.0, 0.1)]}, "noise would be spent"),
        (
            {"uploads": [InnerProductManipulation(clients=[0, 1])]},
            "compare the updates of one cohort",
        ),
        (
            {"share": ["!net.4.*"]},
            "a part of each model stays at the clients: .* initial values of .net.4.weight.",
        ),
        ({"metrics": {"other": ShadowShapley(coalitions="singles")}}, "different coalitions"),
        ({"metric": ShadowShapley(coalitions=[[7]])}, "names clients"),
        (
            {"engine": lambda *options: EngineOfSites(*options)},
            r"Pass FederatedLoop\(engine=partial\(EngineOfSites",
        ),
    ],
)
def test_shadow_shapley_with_an_unsupported_option_is_refused(options, message, tmp_path):
    module = Plain(network(batch_norm=False))

    with refused(message):
        fit(make_shadow_loop(**options), tmp_path, module, make_three_clients(), rounds=1)


def test_non_finite_performance_of_a_coalition_warns_and_gives_nan_shadow_values():
    metric = ShadowShapley(num_clients=3)
    masks = few_coalitions(3, "all")
    performances = torch.ones(len(masks))
    performances[2] = torch.nan

    with warns("come to no finite performance"):
        metric.update(torch.arange(3), masks, lambda masks: performances)

    assert metric.compute().isnan().all()
    values = metric.result()
    assert values.missing == "The coalitions [[0]] come to no finite performance."


def test_shadow_values_have_no_reason_to_be_missing_after_a_reset():
    metric = ShadowShapley(num_clients=2)
    masks = few_coalitions(2, "all")
    with warns("come to no finite performance"):
        metric.update(torch.arange(2), masks, lambda masks: torch.full((len(masks),), torch.nan))

    metric.reset()

    assert metric.result().missing is None


def test_values_in_a_checkpoint_have_their_intervals():
    def make_metrics():
        metric = ShadowShapley(num_clients=2, coalitions="all")
        return ContributionMetrics({"shadow": metric}, num_clients=2)

    metrics = make_metrics()
    metric = metrics.metrics["shadow"]
    masks = few_coalitions(2, "all")
    metric.update(torch.arange(2), masks, lambda masks: masks.sum(1).double())
    metrics.values["shadow"] = metric.result()

    loaded_metrics = make_metrics()
    loaded_metrics.load_state_dict(metrics.state_dict())

    loaded_metric = loaded_metrics.metrics["shadow"]
    for loaded_values in (loaded_metrics.values["shadow"], loaded_metric.result()):
        assert torch.equal(loaded_values.low, metric.result().low)
        assert (loaded_values.low < loaded_values.high).all()


def test_values_of_each_valued_round_have_their_own_interval():
    masks = few_coalitions(3, "all")
    gains = torch.tensor([1.0, 2.0, 4.0]).double()
    models = {}
    for members, mask in zip(members_of(masks), masks):
        utility = float(gains[mask].sum())
        models[members] = {
            0: ScoredModel({"accuracy": [utility / 2]}),
            1: ScoredModel({"accuracy": [utility]}),
        }
    models[EMPTY] = {NO_ROUND: ScoredModel({"accuracy": [0.0]})}
    scores = SeedScores(models)
    metric = ShadowShapley(num_clients=3, coalitions="all")
    metric.participations += 1
    game = metric.game(masks, rounds=[0, 1])

    values = metric.complete(scores, game)

    assert_close(values[0].value, gains / 2)
    assert_close(values[1].value, gains)
    expected_values = values_by_round(scores, game)
    for round_index in game.rounds:
        expected = expected_values[round_index]
        assert_close(values[round_index].half_width, expected.half_width)
        assert (values[round_index].half_width > 0).all()
    assert not torch.equal(values[0].half_width, values[1].half_width)
