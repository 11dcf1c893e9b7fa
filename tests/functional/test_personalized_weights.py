"""Equations 6-7 of pFedSV, against a few lines of NumPy."""

import numpy as np
import pytest
import torch

from flsv.functional import personalized_weights

POLICIES = ("mean", "exclude", "min", 0.7)


def reference(values, distances, own, self_weight):
    values, distances = values.numpy(), distances.numpy().copy()
    others = [d for j, d in enumerate(distances) if j != own]
    positive = np.maximum(values, 0)
    if self_weight == "exclude":
        positive[own] = 0
        distances[own] = 1
    else:
        distances[own] = {"mean": np.mean(others), "min": np.min(others)}.get(self_weight, self_weight)
    w = positive / distances
    return w / w.sum()


@pytest.mark.parametrize("self_weight", POLICIES)
@pytest.mark.parametrize("own", [0, 2, 5])
def test_against_numpy(self_weight, own):
    generator = torch.Generator().manual_seed(own)
    for _ in range(20):
        values = torch.randn(6, generator=generator, dtype=torch.float64)
        distances = torch.rand(6, generator=generator, dtype=torch.float64) + 0.1
        others = [v for j, v in enumerate(values.tolist()) if j != own]
        if max(others) <= 0:
            continue
        weights = personalized_weights(values, distances, own, self_weight)
        np.testing.assert_allclose(weights, reference(values, distances, own, self_weight), rtol=1e-12)
        assert weights.sum().item() == pytest.approx(1)
        assert (weights[values <= 0] == 0).all()


def test_the_default_is_the_mean_distance_and_the_own_entry_is_not_read():
    values = torch.tensor([0.4, 0.2, 0.2])
    for own_distance in (0.0, 7.0, float("nan")):
        weights = personalized_weights(values, torch.tensor([own_distance, 1.0, 3.0]), own=0)
        # 0.4/2, 0.2/1, 0.2/3
        np.testing.assert_allclose(weights, np.array([0.2, 0.2, 0.2 / 3]) / (0.4 + 0.2 / 3), rtol=1e-6)


@pytest.mark.parametrize("self_weight", POLICIES)
@pytest.mark.parametrize("values", [[-0.1, -0.2, -0.3], [0.0, 0.0, 0.0], [0.0, 0.5, -0.1]])
def test_nobody_else_is_worth_anything_the_own_model_stays(values, self_weight):
    weights = personalized_weights(torch.tensor(values), torch.tensor([1.0, 0.0, 2.0]), own=1, self_weight=self_weight)
    assert weights.tolist() == [0, 1, 0]


@pytest.mark.parametrize("self_weight", POLICIES)
def test_excluded_or_not_a_worthless_own_model_has_no_weight(self_weight):
    weights = personalized_weights(torch.tensor([-0.2, 0.3, 0.1]), torch.tensor([0.0, 1.0, 1.0]), 0, self_weight)
    torch.testing.assert_close(weights, torch.tensor([0.0, 0.75, 0.25]))


def test_identical_models_take_all_in_proportion_to_their_values():
    values, distances = torch.tensor([0.2, 0.1, 0.3, 0.9, -0.5]), torch.tensor([0.0, 0.0, 0.0, 2.0, 0.0])
    torch.testing.assert_close(personalized_weights(values, distances, 0), torch.tensor([0, 0.25, 0.75, 0, 0]))
    # The least distance is 0: the own model is one of them.
    weights = personalized_weights(values, distances, 0, self_weight="min")
    torch.testing.assert_close(weights, torch.tensor([2, 1, 3, 0, 0]) / 6)


@pytest.mark.parametrize(
    ("values", "distances", "own"),
    [
        ([0.1, 0.2], [0.0], 0),
        ([0.1, 0.2], [0.0, 1.0], 2),
        ([0.1, 0.2], [0.0, 1.0], -1),
        ([0.1, 0.2], [0.0, -1.0], 0),
        ([0.1, float("nan")], [0.0, 1.0], 0),
        ([0.1, 0.2], [0.0, float("nan")], 0),
        ([0.1, 0.2], [0.0, float("inf")], 0),
    ],
)
def test_wrong_input(values, distances, own):
    with pytest.raises(ValueError, match="expected"):
        personalized_weights(torch.tensor(values), torch.tensor(distances), own)
