"""ClassSpecificShapley by hand: over rounds with absent clients, two classes, and weighted by samples."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from flsv.functional import class_specific_shapley, participant_weights
from flsv.metrics import ClassSpecificShapley
from helpers import make_generator, warns

COHORTS = [
    [0, 1, 3],
    [1, 3],
    [0, 1],
    [3],
]


def make_heads(round_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The heads of the cohort and of the server, of two classes and four features."""
    generator = make_generator(round_index)
    cohort_size = len(COHORTS[round_index])
    client_heads = torch.randn(cohort_size, 2, 4, generator=generator)
    server_head = torch.randn(2, 4, generator=generator)
    return client_heads, server_head


def expected_values(momentum: float = 0.9) -> torch.Tensor:
    averages = torch.full((5, 2), float("nan"))
    for round_index, cohort in enumerate(COHORTS):
        values_of_round = class_specific_shapley(*make_heads(round_index))
        for client, value in zip(cohort, values_of_round):
            average = momentum * averages[client] + (1 - momentum) * value
            averages[client] = torch.where(average.isnan(), value, average)
    return averages


def make_updated_metric(**kwargs) -> ClassSpecificShapley:
    metric = ClassSpecificShapley(num_clients=5, num_classes=2, **kwargs)
    for round_index, cohort in enumerate(COHORTS):
        client_ids = torch.tensor(cohort)
        num_samples = client_ids + 10 * (round_index + 1)
        metric.update(client_ids, *make_heads(round_index), num_samples=num_samples)
    return metric


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_cssv_over_rounds_equals_shapfeds_algorithm_1(momentum):
    metric = make_updated_metric(momentum=momentum)

    values = metric.compute()

    expected = expected_values(momentum)
    expected_weights, _ = participant_weights(expected)
    weights = (1 + metric.per_client(values)) / 2  # equation 6
    assert_close(values, expected, equal_nan=True)
    assert_close(weights, expected_weights, equal_nan=True)


def test_class_specific_shapley_of_two_classes_warns_that_they_have_one_value():
    with warns("classes both have the same"):
        ClassSpecificShapley().bind(num_clients=3, num_classes=2)


def test_class_specific_shapley_of_three_classes_has_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClassSpecificShapley().bind(num_clients=3, num_classes=3)


def test_cssv_weighted_by_samples_weights_values():
    metric = make_updated_metric(weighting="samples", momentum=0.5)

    values = metric.compute()

    unweighted = expected_values(momentum=0.5)
    assert_close(values, unweighted, equal_nan=True)

    # Client 1 had 11, 21 and 31 samples, averaged with the momentum of 0.5.
    average_num_samples = 0.5 * (0.5 * 11 + 0.5 * 21) + 0.5 * 31
    expected_of_client_1 = unweighted[1].mean() * average_num_samples
    assert_close(metric.per_client(values)[1], expected_of_client_1)
