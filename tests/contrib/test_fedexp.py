"""FedExP against the formula in NumPy, and the checks of aggregators."""

import numpy as np
import pytest
import torch
from contrib.rounds import NUM_PARAMETERS, START, make_round
from torch.testing import assert_close

from flsv.contrib.fedexp import FedExP
from flsv.testing import parametrize_with_checks


def step_size_by_hand(models, num_samples, epsilon):
    """The step size of the paper's Algorithm 1, with shares of the samples in place of 1/M."""
    shares = np.array(num_samples) / np.sum(num_samples)
    updates = (np.array(models) - START)[:, :NUM_PARAMETERS]
    mean_squared_length = sum(shares * np.linalg.norm(updates, axis=1) ** 2)
    squared_length_of_mean = np.linalg.norm(shares @ updates) ** 2
    return max(1.0, mean_squared_length / (2 * (squared_length_of_mean + epsilon)))


#: Updates that disagree, agree, and cancel each other. The statistics are much longer than they are.
DISAGREE = [
    [2.0, 1.0, 50.0, 4.0],
    [1.0, 3.0, -30.0, 2.0],
    [0.0, 0.5, 10.0, 8.0],
]
AGREE = [
    [2.0, 1.5, 9.0, 4.0],
    [2.0, 1.5, 1.0, 2.0],
    [2.0, 1.5, 5.0, 3.0],
]
CANCEL = [
    [2.0, 1.0, 0.0, 1.0],
    [0.0, 1.0, 0.0, 1.0],
    [1.0, 1.0, 0.0, 1.0],
]


@pytest.mark.parametrize("models", [DISAGREE, AGREE, CANCEL], ids=["disagree", "agree", "cancel"])
@pytest.mark.parametrize("num_samples", [[10, 10, 10], [30, 10, 20]])
def test_fedexp_steps_are_those_of_the_formula(models, num_samples):
    epsilon = 0.01
    round = make_round(models, num_samples)
    vector, weights = FedExP(epsilon=epsilon).aggregate(round, {})

    step_size = step_size_by_hand(models, num_samples, epsilon)
    shares = np.array(num_samples) / np.sum(num_samples)
    moved = START + step_size * shares @ (np.array(models) - START)

    # Weights from numbers of samples are rounded to float32.
    expected_weights = torch.tensor(step_size * shares)
    assert_close(weights.double(), expected_weights, rtol=1e-6, atol=1e-6)
    # A step from numbers of samples is rounded to float32.
    assert_close(vector[:NUM_PARAMETERS].double(), make_parameters(moved), rtol=1e-6, atol=1e-7)

    # Statistics are averages, whatever the step.
    averages = make_parameters(shares @ np.array(models), statistics=True)
    assert_close(vector[NUM_PARAMETERS:].double(), averages, rtol=1e-6, atol=1e-7)


def make_parameters(vector, statistics=False):
    if statistics:
        return torch.tensor(vector[NUM_PARAMETERS:])
    return torch.tensor(vector[:NUM_PARAMETERS])


@pytest.mark.by_turn
@pytest.mark.fast_rows("*pickles", "*weigh_the_same", "*moves_little", "*resumes")
@parametrize_with_checks([FedExP()])
def test_fedexp_passes_the_checks_of_aggregators(check):
    check()
