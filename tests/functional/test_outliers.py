"""Updates that are too large for their cohort."""

import numpy as np
import pytest
import torch

from flsv.functional.outliers import drowning_updates, large_updates


def test_large_updates_are_outliers_by_the_z_score_of_iglewicz_and_hoaglin():
    rng = np.random.default_rng(0)
    typical = rng.normal(0, 1, 200)
    large = np.linspace(2, 8, 25)
    logs = np.append(typical, large)

    is_outlier = large_updates(torch.from_numpy(np.exp(logs)), factor=1.0)

    deviations = logs - np.median(logs)
    z_scores = 0.6745 * deviations / np.median(np.abs(deviations))
    expected = z_scores > 3.5
    assert 5 < expected.sum() < len(large)
    assert is_outlier.tolist() == expected.tolist()


@pytest.mark.parametrize("clients", [1, 2, 4, 101])
@pytest.mark.parametrize("size", [1e20, 3e38, float("inf")])
def test_infinite_norm_is_found_in_a_cohort_of_any_size(clients, size):
    norms = torch.rand(clients, dtype=torch.float64) + 1
    norms[clients // 2] = size
    assert large_updates(norms).nonzero().flatten().tolist() == [clients // 2]


@pytest.mark.parametrize(
    "norms",
    [
        [],
        [1.0, 1000.0],  # who is wrong?
        [0.0, 0.0, 0.0, 1.0, 1.1],  # free riders make nobody an outlier
        [1.0, 1.0, 1.0, 4.0],  # MAD 0
        [1.0, 1.0001, 1.0002, 1.05],
        [2.0**i for i in range(12)],  # a cohort whose sizes differ
    ],
)
def test_ordinary_norms_are_not_outliers(norms):
    assert not large_updates(torch.tensor(norms)).any()


@pytest.mark.parametrize("model_norm", [0.0, 1.0, 1e4])
def test_update_that_absorbs_the_others_in_a_float32_sum_is_drowning(model_norm):
    other_norms = torch.tensor([1.0, 2.0, 0.5, 0.0])
    scale = max(1.0, model_norm)
    for size, drowns in (
        (4e6 * scale, False),
        (2e7 * scale, True),
    ):
        norms = torch.cat([other_norms, torch.tensor([size])])
        assert drowning_updates(norms, model_norm).tolist() == [False] * 4 + [drowns]
