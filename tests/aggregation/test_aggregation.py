"""Aggregators by their numbers, where tests/replay does not lead: before anything is known, buffers, other options."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from flsv.aggregation import (
    Bucketing,
    DivergenceWeighted,
    FedAvg,
    FedCE,
    FedNova,
    FedYogi,
    GeometricMedian,
    ServerOptimizer,
    ShapFedWA,
    ShapleySoftmax,
    ShapleyWeighted,
    TrimmedMean,
)
from flsv.aggregation.fedopt import AdaptiveServer
from flsv.core import Round
from flsv.core.parameter_space import ParameterSpace
from flsv.federation import FederatedLoop
from flsv.metrics import DecayedShapley
from flsv.training.algorithms import FedDynServer, FedProx
from helpers import make_generator, refused, warns
from helpers.data import toy_data
from helpers.fits import fit
from helpers.loops_by_hand import assert_same_state
from helpers.models import Plain, network

LINEAR = ParameterSpace(nn.Linear(3, 2))
#: The last four of its ten entries are BatchNorm's statistics.
LINEAR_AND_BATCH_NORM = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(2))
WITH_BUFFERS = ParameterSpace(LINEAR_AND_BATCH_NORM)


def make_round(ids, samples, space=LINEAR, **kwargs):
    num_clients = len(ids)
    generator = make_generator(num_clients)
    updates = torch.randn(num_clients, space.size, generator=generator)
    return Round(
        round_index=0,
        client_ids=torch.tensor(ids),
        num_samples=torch.tensor(samples),
        global_vector=torch.zeros(space.size),
        client_vectors=updates,
        space=space,
        **kwargs,
    )


NAN = float("nan")
BY_SAMPLES = ShapFedWA(weighting="samples")
BY_CLASS = torch.tensor([[0.9, 0.5], [-0.2, 0.1], [0.3, 0.3]])
NO_VALUES = torch.full((3, 2), NAN)
CLIENT_1_WITHOUT_VALUE = torch.tensor([[1.0], [NAN], [0.0]])
CLIENT_2_WITHOUT_VALUE = torch.tensor([[1.0], [0.0], [NAN]])
NEGATIVE_VALUES = torch.tensor([-1.0, -3.0, -2.0])
POSITIVE_VALUES = torch.tensor([0.6, 0.9, 0.2])
NORMALIZED = ShapleyWeighted("sv", normalize=True)


@pytest.mark.parametrize(
    ("rule", "contributions", "expected"),
    [
        # Before anything is measured, or where nobody has a value.
        (ShapFedWA(), {}, [1 / 2, 1 / 2]),
        (FedCE(), {}, [1 / 2, 1 / 2]),
        (BY_SAMPLES, {}, [10 / 40, 30 / 40]),
        (
            ShapFedWA(),
            {"cssv": NO_VALUES},
            [1 / 2, 1 / 2],
        ),
        # Shares of (1 + value) / 2. An unknown value is the mean of the others' in the cohort.
        (
            ShapFedWA(),
            {"cssv": CLIENT_1_WITHOUT_VALUE},
            [1.0 / 1.5, 0.5 / 1.5],
        ),
        (
            ShapFedWA(),
            {"cssv": CLIENT_2_WITHOUT_VALUE},
            [1 / 2, 1 / 2],
        ),
        (
            BY_SAMPLES,
            {"cssv": BY_CLASS},
            [10 * 0.85 / 28, 30 * 0.65 / 28],
        ),
        (
            ShapleyWeighted("sv"),
            {"sv": NEGATIVE_VALUES},
            [1 / 3, 1 / 3],
        ),
        (
            NORMALIZED,
            {"sv": POSITIVE_VALUES},
            [0.6 / 0.8, 0.2 / 0.8],
        ),
    ],
)
def test_weights_of_two_clients_follow_their_values(rule, contributions, expected):
    """Of clients 0 and 2, with 10 and 30 samples. Client 1 is not drawn."""
    round = make_round([0, 2], [10, 30])

    weights = rule.weights(round, contributions)

    expected = torch.tensor(expected)
    assert_close(weights.double(), expected.double(), rtol=1e-6, atol=0)


def test_shapley_weights_before_the_first_value_are_refused():
    round = make_round([0, 1], [1, 1])
    with pytest.raises(RuntimeError, match="no value before.*first aggregation"):
        ShapleyWeighted("sv").weights(round, {})


def test_fedsv_aggregate_is_half_softmax_average_and_half_previous_global_model():
    """As in ShapleyFL's ``fedsv.py``; statistics are not drawn back."""
    round = make_round([0, 2, 3], [10, 20, 70], WITH_BUFFERS)
    round.global_vector[:] = torch.arange(10)
    values = torch.tensor([0.3, NAN, -0.1, 0.9])
    rule = ShapleySoftmax("sv")

    vector, weights = rule.aggregate(round, {"sv": values})

    values_of_cohort = values[[0, 2, 3]]
    average = values_of_cohort.softmax(0) @ round.client_vectors
    halfway = (average + round.global_vector) / 2
    assert_close(vector[:-4], halfway[:-4])
    assert_close(vector[-4:], average[-4:])
    assert weights.sum().item() == pytest.approx(0.5)


def test_shapley_softmax_of_a_metric_updated_after_aggregation_is_refused(tmp_path):
    loop = FederatedLoop(ShapleySoftmax("sv"), {"sv": DecayedShapley()})
    with refused("DecayedShapley is updated after aggregation"):
        fit(loop, tmp_path, data=toy_data(server_val=0.2))
    assert loop.round_index == 0


def test_geometric_median_of_identical_models_is_that_model():
    round = make_round([0, 1, 2], [1, 1, 2])
    round.client_vectors[:] = 1.0
    vector, weights = GeometricMedian().aggregate(round, {})
    assert torch.equal(vector, torch.ones(8))
    assert_close(weights, torch.tensor([0.25, 0.25, 0.5]))


# ---- Server optimizers beyond tests/replay: any of torch, failed rounds, pieces, another fit


TAU = 1e-3


SHARES = torch.tensor([1, 2, 3]) / 6


def make_round_from(model, seed):
    """A round whose clients have started from this model."""
    round = make_round([0, 1, 2], [1, 2, 3])
    generator = make_generator(seed)
    updates = torch.randn(3, 8, generator=generator)
    return replace(round, round_index=seed, global_vector=model, client_vectors=model + updates)


def run_rounds(aggregator, rounds=3):
    x = torch.ones(8)
    for index in range(rounds):
        round = make_round_from(x, seed=index)
        x, weights = aggregator.aggregate(round, {})
        assert_close(weights, SHARES)
        aggregator.end_round(round)

    return x


def test_server_optimizer_with_torch_adagrad_equals_fedadagrad_by_hand():
    """Algorithm 2's FedAdagrad with beta1 = 0 is torch.optim.Adagrad."""
    lr = 0.1
    x = torch.ones(8)
    v = torch.full((8,), TAU**2)
    for seed in range(3):
        round = make_round_from(x, seed)
        delta = SHARES @ (round.client_vectors - x)
        v = v + delta**2
        x = x + lr * delta / (v.sqrt() + TAU)

    adagrad = partial(
        torch.optim.Adagrad,
        lr=lr,
        initial_accumulator_value=TAU**2,
        eps=TAU,
    )
    model = run_rounds(ServerOptimizer(adagrad), rounds=3)
    assert_close(model, x)


def test_server_optimizer_state_is_unchanged_by_a_failed_round():
    aggregator = FedYogi()
    run_rounds(aggregator)
    state = copy.deepcopy(aggregator.state_dict())
    failed_round = make_round_from(torch.ones(8), seed=9)
    aggregator.aggregate(failed_round, {})  # and no end_round
    moments = aggregator.state_dict()["moments"][0]

    for name in ("m", "v"):
        assert torch.equal(
            state["moments"][0][name],
            moments[name],
        )


@pytest.mark.parametrize("rule", ["adam", "yogi"])
def test_adaptive_server_step_in_blocks_equals_the_step_on_whole_tensors(monkeypatch, rule):
    def stepped():
        torch.manual_seed(0)
        points = [
            nn.Parameter(torch.randn(7)),
            nn.Parameter(torch.randn(5, 2).T),
            nn.Parameter(torch.randn(())),
        ]
        optimizer = AdaptiveServer(points, rule=rule)

        for _ in range(2):
            for point in points:
                point.grad = torch.randn_like(point)
            optimizer.step()

        return [point.detach() for point in points]

    whole = stepped()
    monkeypatch.setattr("flsv.aggregation.fedopt.CHUNK_SIZE", 3)

    assert all(map(torch.equal, stepped(), whole))


@pytest.mark.parametrize("arguments", [{"lr": -1.0}, {"learning_rate": 1.0}])
def test_server_optimizer_with_wrong_arguments_raises(arguments):
    make_optimizer = partial(torch.optim.SGD, **arguments)
    with refused("could not construct its optimizer"):
        ServerOptimizer(make_optimizer)


# ---- Rules that a minority of bad clients cannot move far, against loops written from the papers


def test_trimmed_mean_equals_the_mean_by_hand_entry_by_entry():
    num_samples = [4, 3, 4, 3, 2]
    round = make_round(range(5), num_samples, WITH_BUFFERS)

    result, weights = TrimmedMean(trim=0.2).aggregate(round, {})

    # Of five clients the lowest and the highest of each entry are left out.
    parameters = round.client_vectors[:, :-4]
    order = parameters.argsort(dim=0, stable=True)
    middle = order[1:4]
    counts = middle.flatten().bincount(minlength=5)
    kept_entries = parameters.gather(0, middle)
    buffers = round.client_vectors[:, -4:]
    assert_close(result[:-4], kept_entries.mean(0))
    assert_close(weights, counts.double() / counts.sum())
    assert_close(result[-4:], weights.float() @ buffers)


def test_trimmed_mean_of_a_cohort_too_small_to_trim_warns():
    round = make_round([0, 1, 2], [1, 1, 1])
    with warns("no values with 3 clients.*least 5"):
        result, _ = TrimmedMean(trim=0.2).aggregate(round, {})
    assert_close(result, round.client_vectors.mean(0))


@pytest.mark.parametrize(
    "inner",
    [
        ShapFedWA("cssv"),
        FedDynServer(),
        DivergenceWeighted(),
    ],
)
def test_bucketing_around_aggregators_that_need_single_clients_is_refused(inner):
    with refused("which a bucket does not have"):
        Bucketing(inner)


# ---- what FedNova cannot do


def make_sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **options)


def test_fednova_with_accumulated_gradients_counts_optimizer_steps(tmp_path):
    """With whole epochs in a window every client takes one step a round, and FedNova is FedAvg."""

    def fit_with_one_step_a_round(aggregator):
        module = Plain(network())
        loop = FederatedLoop(aggregator, seed=1)
        fit(loop, tmp_path, module, accumulate_grad_batches=100)  # no client has so many
        return module

    by_fednova = fit_with_one_step_a_round(FedNova())
    by_fedavg = fit_with_one_step_a_round(FedAvg())

    assert_same_state(by_fednova.net, by_fedavg.net)


def test_fednova_skips_a_client_without_steps():
    num_steps = torch.tensor([5, 0])
    round = make_round([0, 1], [10, 30], num_steps=num_steps)
    with_steps = round.client_vectors[0]
    round.client_vectors[1] = 0  # as the global model

    vector, _ = FedNova().aggregate(round, {})

    # (sum of share * steps) * (sum of share * update / steps), over the first client only
    share = 10 / 40
    steps = 5
    expected = (share * steps) * (share * with_steps / steps)
    assert_close(vector, expected)


@pytest.mark.parametrize(
    "optimizer",
    [
        partial(make_sgd, nesterov=True),
        partial(make_sgd, dampening=0.5),
        torch.optim.Adam,
    ],
)
def test_fednova_with_steps_other_than_sgds_is_refused(tmp_path, optimizer):
    with refused(r"FedNova\(\) needs one torch.optim.SGD"):
        fit(FederatedLoop(FedNova()), tmp_path, Plain(optimizer=optimizer))
    with refused(r"FedProx\(\) changes the steps"):
        fit(FederatedLoop(FedNova(), client_algorithm=FedProx()), tmp_path)
