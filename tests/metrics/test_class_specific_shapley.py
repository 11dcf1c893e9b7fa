"""ClassSpecificShapley by hand: over rounds with absent clients, two classes, and weighted by samples."""

import warnings
from typing import Any

import pytest
import torch

from flsv.functional import class_specific_shapley, participant_weights
from flsv.metrics import ClassSpecificShapley

Rounds = list[tuple[list[int], int]]
ROUNDS: Rounds = [([0, 1, 3], 0), ([1, 3], 1), ([0, 1], 2), ([3], 3)]


def make_heads(seed: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, 2, 4, generator=generator), torch.randn(2, 4, generator=generator)


def expected_values(momentum: float = 0.9) -> torch.Tensor:
    value = torch.full((5, 2), float("nan"))
    for ids, seed in ROUNDS:
        now = class_specific_shapley(*make_heads(seed, len(ids)))
        for row, i in enumerate(ids):
            value[i] = (
                now[row]
                if value[i].isnan().all()
                else momentum * value[i] + (1 - momentum) * now[row]
            )

    return value


def make_updated_metric(**kwargs: Any) -> ClassSpecificShapley:
    metric = ClassSpecificShapley(num_clients=5, num_classes=2, **kwargs)
    for ids, seed in ROUNDS:
        metric.update(
            torch.tensor(ids), *make_heads(seed, len(ids)), torch.tensor(ids) + 10 * (seed + 1)
        )
    return metric


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_cssv_over_rounds_equals_shapfeds_algorithm_1(momentum: float) -> None:
    metric = make_updated_metric(momentum=momentum)
    wanted = expected_values(momentum)
    torch.testing.assert_close(metric.compute(), wanted, equal_nan=True)

    overall = metric.per_client(metric.compute())
    torch.testing.assert_close(
        (1 + overall) / 2, participant_weights(wanted)[0], equal_nan=True
    )  # eq. 6


def test_class_specific_shapley_warns_that_two_classes_have_one_value() -> None:
    with pytest.warns(UserWarning, match="two classes both have the same value"):
        ClassSpecificShapley().bind(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ClassSpecificShapley().bind(3, 3)


def test_cssv_weighted_by_samples_weights_values() -> None:
    metric = make_updated_metric(weighting="samples", momentum=0.5)

    values = metric.compute()

    unweighted = expected_values(momentum=0.5)
    torch.testing.assert_close(values, unweighted, equal_nan=True)

    # Client 1 had 11, 21 and 31 samples.
    samples = 0.25 * 11 + 0.25 * 21 + 0.5 * 31
    mean = unweighted.mean(-1)

    torch.testing.assert_close(metric.per_client(values)[1], mean[1] * samples)
