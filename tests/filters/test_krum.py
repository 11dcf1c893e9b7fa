"""MultiKrum: its scores against a reference, the clients that it keeps, the cohorts that it refuses."""

import pytest
import torch

from flsv.attacks import Scaling
from flsv.federation import FederatedLoop
from flsv.filters import MultiKrum
from flsv.filters.krum import krum_scores
from helpers import make_generator
from helpers.data import toy_data
from helpers.fits import fit


def test_krum_scores_sum_the_closest_distances():
    points = torch.randn(
        8,
        30,
        generator=make_generator(),
        dtype=torch.float64,
    )
    squared = torch.cdist(points, points).square()
    for byzantine in (0, 1, 2):
        scores = krum_scores(squared, byzantine)
        for client in range(8):
            differences = points[client] - points
            distances = differences.square().sum(1)
            closest = distances.sort().values[1 : 8 - byzantine - 1]  # the first is its own, 0
            expected = closest.sum().item()
            assert scores[client].item() == pytest.approx(expected)


def test_multi_krum_leaves_out_a_distant_update(tmp_path):
    loop = FederatedLoop(
        filters=[MultiKrum(1)],
        uploads=[Scaling(-8.0, clients=[2])],
        seed=1,
    )

    data = toy_data((4, 4, 4, 4, 4))
    fit(loop, tmp_path, data=data, rounds=1)

    assert loop.participations.tolist() == [1, 1, 0, 1, 1]
