"""Aggregators by their numbers, where tests/replay does not lead: before anything is known, buffers, other options."""

import copy
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
from flsv.sampling import UniformSampler
from flsv.training.algorithms import FedDynServer, FedProx
from helpers import make_generator, refused, warns
from helpers.data import toy_data
from helpers.fits import fit
from helpers.loops_by_hand import assert_same_state
from helpers.models import Plain, network


def make_round(ids, samples, **kwargs):
    space = ParameterSpace(nn.Linear(3, 2))
    generator = make_generator(len(ids))
    updates = torch.randn(len(ids), 8, generator=generator)
    return Round(
        round_index=0,
        client_ids=torch.tensor(ids),
        num_samples=torch.tensor(samples),
        global_vector=torch.zeros(8),
        client_vectors=updates,
        space=space,
        **kwargs,
    )


def test_shapfed_and_fedce_weights_before_any_contribution_are_uniform():
    round = make_round(
        [0, 1, 2, 3],
        [1, 2, 3, 4],
    )

    shapfed_weights = ShapFedWA().weights(round, {})
    fedce_weights = FedCE().weights(round, {})

    assert shapfed_weights.tolist() == [1 / 4] * 4
    assert fedce_weights.tolist() == [1 / 4] * 4


def test_shapfed_weights_are_uniform_where_no_client_has_a_value():
    unknown = torch.full((4, 2), float("nan"))
    round = make_round([0, 1], [1, 2])

    weights = ShapFedWA().weights(round, {"cssv": unknown})

    assert weights.tolist() == [1 / 2] * 2


def test_shapfed_weighs_a_client_without_a_value_by_the_mean_of_the_others():
    cssv = torch.tensor([[1.0], [float("nan")], [0.0]])
    round = make_round(
        [0, 1, 2],
        [1, 1, 1],
    )

    weights = ShapFedWA().weights(round, {"cssv": cssv})

    gammas = torch.tensor([1.0, 0.75, 0.5])  # (1 + value) / 2, and of the unknown one their mean
    assert_close(weights.float(), gammas / gammas.sum())


def test_shapfed_weighted_by_samples_multiplies_samples_and_scores():
    """n_i gamma_i; before anything is measured n_i, which is FedAvg."""
    cssv = torch.tensor(
        [
            [0.9, 0.5],
            [-0.2, 0.1],
            [0.3, 0.3],
        ]
    )
    num_samples = torch.tensor([30, 10])
    round = make_round([0, 2], num_samples.tolist())
    rule = ShapFedWA(weighting="samples")

    weights = rule.weights(round, {"cssv": cssv})
    weights_before_values = rule.weights(round, {})

    cssv_of_cohort = cssv[[0, 2]]
    gammas = ((1 + cssv_of_cohort) / 2).mean(1)
    expected = num_samples * gammas
    assert_close(weights.float(), expected / expected.sum())
    weights_of_fedavg = FedAvg().weights(round, {})
    assert torch.equal(weights_before_values, weights_of_fedavg)


def test_shapley_weights_are_equal_if_no_value_is_positive():
    values = torch.tensor([-1.0, -2.0])
    round = make_round([0, 1], [1, 1])

    weights = ShapleyWeighted("sv").weights(round, {"sv": values})

    assert weights.tolist() == [1 / 2, 1 / 2]


def test_normalized_shapley_weights_are_shares_of_the_cohorts_values():
    values = torch.tensor([0.6, 0.2, 0.9])  # the third client is not drawn
    rule = ShapleyWeighted("sv", normalize=True)
    round = make_round([0, 1], [1, 1])

    weights = rule.weights(round, {"sv": values})

    assert weights.tolist() == pytest.approx([0.6 / 0.8, 0.2 / 0.8])


def test_shapley_weights_before_the_first_value_are_refused():
    with pytest.raises(RuntimeError, match="no value before.*first aggregation"):
        ShapleyWeighted("sv").weights(
            make_round([0, 1], [1, 1]),
            {},
        )


def test_fedsv_aggregate_is_half_softmax_average_and_half_previous_global_model():
    """As in ShapleyFL's ``fedsv.py``; statistics are not drawn back."""
    space = ParameterSpace(
        nn.Sequential(
            nn.Linear(3, 2),
            nn.BatchNorm1d(2),
        )
    )
    cut = space.num_parameters
    model = torch.randn(space.size)
    vectors = torch.randn(3, space.size)
    ids = torch.tensor([0, 2, 3])
    round = Round(
        0,
        ids,
        torch.tensor([10, 20, 70]),
        model,
        vectors,
        space,
    )
    values = torch.tensor([0.3, float("nan"), -0.1, 0.9])

    vector, weights = ShapleySoftmax("sv").aggregate(round, {"sv": values})

    average = values[ids].softmax(0) @ vectors
    halfway = (average + model) / 2
    assert_close(vector[:cut], halfway[:cut])
    assert_close(vector[cut:], average[cut:])
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


NUM_SAMPLES = torch.tensor([1, 2, 3])
SHARES = NUM_SAMPLES / NUM_SAMPLES.sum()


def make_random_round(seed, x, index=0):
    space = ParameterSpace(nn.Linear(3, 2))
    draw = make_generator(seed)
    updates = torch.randn(3, space.size, generator=draw)
    return Round(
        round_index=index,
        client_ids=torch.arange(3),
        num_samples=NUM_SAMPLES,
        global_vector=x,
        client_vectors=x + updates,
        space=space,
    )


def run_rounds(aggregator, rounds=3):
    x = torch.ones(8)
    for index in range(rounds):
        round = make_random_round(seed=index, x=x, index=index)
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
        round = make_random_round(seed, x)
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
    aggregator.aggregate(make_random_round(9, torch.ones(8)), {})  # and no end_round
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


@pytest.mark.parametrize("wrong", [{"lr": -1.0}, {"learning_rate": 1.0}])
def test_server_optimizer_with_wrong_arguments_raises(wrong):
    with refused("could not construct its optimizer"):
        ServerOptimizer(partial(torch.optim.SGD, **wrong))


# ---- Rules that a minority of bad clients cannot move far, against loops written from the papers


class Seen(TrimmedMean):
    def aggregate(self, round, contributions):
        self.results = [
            *getattr(self, "results", []),
            (round, *super().aggregate(round, contributions)),
        ]
        return self.results[-1][1:]


def fit_and_record_rounds(folder, **options):
    aggregator = Seen(trim=0.2)
    fit(
        FederatedLoop(aggregator, seed=1, **options),
        folder,
        data=toy_data((4, 3, 4, 3, 2)),
        rounds=1,
    )

    return aggregator.results


def test_trimmed_mean_equals_the_mean_by_hand_entry_by_entry(tmp_path):
    for round, result, weights in fit_and_record_rounds(tmp_path):
        cut = round.space.num_parameters
        parameters = round.client_vectors[:, :cut]
        # Of five clients the lowest and the highest of each entry are left out.
        order = parameters.argsort(dim=0, stable=True)
        middle = order[1:4]
        expected = parameters.gather(0, middle).mean(0)
        counts = middle.flatten().bincount(minlength=5)
        expected_weights = counts.double() / (3 * cut)
        buffers = weights.float() @ round.client_vectors[:, cut:]

        assert_close(result[:cut], expected, atol=1e-6, rtol=0)
        assert_close(weights, expected_weights)
        assert_close(result[cut:], buffers)


def test_trimmed_mean_of_a_cohort_too_small_to_trim_warns(tmp_path):
    with warns("no values with 3 clients.*least 5"):
        ((round, result, _),) = fit_and_record_rounds(
            tmp_path,
            sampler=UniformSampler(3),
        )
    assert_close(result, round.client_vectors.mean(0))


@pytest.mark.parametrize("inner", [ShapFedWA("cssv"), FedDynServer(), DivergenceWeighted()])
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
    space = ParameterSpace(nn.Linear(3, 1))
    model = torch.zeros(4)
    with_steps = torch.ones(4)
    round = Round(
        round_index=0,
        client_ids=torch.arange(2),
        num_samples=torch.tensor([10, 30]),
        global_vector=model,
        client_vectors=torch.stack([with_steps, model]),
        space=space,
        num_steps=torch.tensor([5, 0]),
    )

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
