"""CenteredClipping against the formula in NumPy, and the checks of aggregators."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from contrib.rounds import NUM_PARAMETERS, SPACE, START, make_round

from flsv.contrib.centered_clipping import CenteredClipping
from flsv.core import FederationInfo
from flsv.testing import parametrize_with_checks

#: The last client's update is far longer than the others. The statistics are longer than the parameters.
MODELS = [
    [2.0, 1.0, 50.0, 4.0],
    [1.0, 1.5, -30.0, 2.0],
    [90.0, -40.0, 10.0, 8.0],
]


def started_aggregator(aggregator):
    federation = FederationInfo(
        global_vector=torch.tensor(START),
        space=SPACE,
        num_clients=3,
        num_classes=2,
        split_sizes={},
        seed=0,
    )
    aggregator.begin(federation)
    return aggregator


def step_by_hand(updates, shares, center, radius, iterations):
    """The paper's Algorithm 2, with shares of the samples in place of 1/n."""
    for _ in range(iterations):
        steps = []
        for share, update in zip(shares, updates):
            difference = update - center
            length = np.linalg.norm(difference)
            scale = min(1, radius / length) if length > 0 else 1
            steps.append(share * scale * difference)
        center = center + np.sum(steps, axis=0)
    return center


def aggregate_and_end_round(aggregator, models, num_samples, start):
    round = make_round(models.tolist(), num_samples, start.tolist())
    vector, _ = aggregator.aggregate(round, {})
    aggregator.end_round(replace(round, server_vector=vector))
    return vector


@pytest.mark.parametrize("num_samples", [[10, 10, 10], [30, 10, 20]])
@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("radius", [0.5, 2.0, 1000.0])
def test_two_rounds_are_those_of_the_formula(num_samples, iterations, radius):
    aggregator = started_aggregator(CenteredClipping(radius, iterations))
    shares = np.array(num_samples) / np.sum(num_samples)
    updates = (np.array(MODELS) - START)[:, :NUM_PARAMETERS]

    start = np.array(START)
    center = np.zeros(NUM_PARAMETERS)
    for _ in range(2):
        # Each client makes the same update in both rounds.
        models = np.array(MODELS)
        models[:, :NUM_PARAMETERS] = start[:NUM_PARAMETERS] + updates
        vector = aggregate_and_end_round(aggregator, models, num_samples, start)

        center = step_by_hand(updates, shares, center, radius, iterations)
        expected_parameters = start[:NUM_PARAMETERS] + center
        parameters = vector[:NUM_PARAMETERS].numpy()
        np.testing.assert_allclose(parameters, expected_parameters, rtol=1.3e-6, atol=1e-5)

        # The parameters of the next round are those by hand, for errors must not add up.
        statistics = vector[NUM_PARAMETERS:].numpy()
        start = np.concatenate([expected_parameters, statistics])


def test_statistics_are_averages_with_the_clients_weights():
    round = make_round(MODELS, num_samples=[1, 1, 1])
    aggregator = started_aggregator(CenteredClipping(radius=2.0))

    vector, weights = aggregator.aggregate(round, {})

    normalized = weights.numpy() / weights.sum().item()
    expected = normalized @ np.array(MODELS)[:, NUM_PARAMETERS:]
    assert vector[NUM_PARAMETERS:].tolist() == pytest.approx(expected.tolist())


def test_discarded_aggregate_leaves_no_step_to_continue_from():
    round = make_round(MODELS, num_samples=[1, 1, 1])
    aggregator = started_aggregator(CenteredClipping(radius=3.0))
    aggregator.aggregate(round, {})

    # The server keeps the global model if an aggregate is not finite.
    aggregator.end_round(replace(round, server_vector=round.global_vector))

    assert not aggregator._center.any()


@pytest.mark.by_turn
@pytest.mark.fast_rows("*pickles", "*weigh_the_same", "*moves_little", "*resumes")
@parametrize_with_checks([CenteredClipping()])
def test_centered_clipping_passes_the_checks_of_aggregators(check):
    check()


@pytest.mark.by_turn
@pytest.mark.fast_rows("*pickles", "*weigh_the_same", "*moves_little")
@parametrize_with_checks([CenteredClipping(radius=0.01, iterations=3)])
def test_centered_clipping_with_a_small_radius_passes_the_checks(check):
    check()
