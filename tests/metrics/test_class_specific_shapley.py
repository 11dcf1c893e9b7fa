"""ClassSpecificShapley by hand: over rounds with absent clients, two classes, and weighted by samples."""

import warnings

import pytest
import torch
from torch.testing import assert_close

from flsv.functional import class_specific_shapley, participant_weights
from flsv.metrics import ClassSpecificShapley
from helpers import make_generator, warns

ROUNDS = [
    ([0, 1, 3], 0),
    ([1, 3], 1),
    ([0, 1], 2),
    ([3], 3),
]


def make_heads(seed: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = make_generator(seed)
    client_heads = torch.randn(
        k,
        2,
        4,
        generator=generator,
    )
    server_head = torch.randn(2, 4, generator=generator)
    return client_heads, server_head


def expected_values(momentum: float = 0.9) -> torch.Tensor:
    averages = torch.full((5, 2), float("nan"))
    for ids, seed in ROUNDS:
        client_heads, server_head = make_heads(seed, len(ids))
        values_of_round = class_specific_shapley(client_heads, server_head)
        for client, value in zip(ids, values_of_round):
            is_new = bool(averages[client].isnan().all())
            if is_new:
                averages[client] = value
            else:
                averages[client] = momentum * averages[client] + (1 - momentum) * value
    return averages


def make_updated_metric(**kwargs) -> ClassSpecificShapley:
    metric = ClassSpecificShapley(num_clients=5, num_classes=2, **kwargs)
    for ids, seed in ROUNDS:
        client_ids = torch.tensor(ids)
        client_heads, server_head = make_heads(seed, len(ids))
        num_samples = client_ids + 10 * (seed + 1)
        metric.update(client_ids, client_heads, server_head, num_samples)
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


def test_class_specific_shapley_warns_that_two_classes_have_one_value():
    with warns("classes both have the same"):
        ClassSpecificShapley().bind(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClassSpecificShapley().bind(3, 3)


def test_cssv_weighted_by_samples_weights_values():
    metric = make_updated_metric(weighting="samples", momentum=0.5)

    values = metric.compute()

    unweighted = expected_values(momentum=0.5)
    assert_close(values, unweighted, equal_nan=True)

    # Client 1 had 11, 21 and 31 samples, averaged with the momentum of 0.5.
    average_num_samples = 0.5 * (0.5 * 11 + 0.5 * 21) + 0.5 * 31
    unweighted_per_client = unweighted.mean(-1)

    assert_close(
        metric.per_client(values)[1],
        unweighted_per_client[1] * average_num_samples,
    )
