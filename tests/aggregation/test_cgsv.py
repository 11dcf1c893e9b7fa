"""CGSV's aggregate against the equations, buffers and partial participation included."""

from __future__ import annotations

import pytest
import torch
from toys import Plain

from flsv.aggregation import CGSV
from flsv.errors import ConfigurationError
from flsv.parameters import ParameterSpace
from flsv.round import Round


@pytest.fixture
def round() -> Round:
    space = ParameterSpace(Plain())  # with BatchNorm
    generator = torch.Generator().manual_seed(0)
    start, vectors = torch.randn(space.size, generator=generator), torch.randn(3, space.size, generator=generator)
    return Round(0, torch.tensor([0, 2, 3]), torch.tensor([10, 20, 10]), start, vectors, space)


def test_first_round_by_data_shares(round: Round) -> None:
    vector, weights = CGSV(scale=0.3).aggregate(round, {})
    assert weights.tolist() == [0.25, 0.5, 0.25]
    cut = round.space.num_parameters
    updates = (round.client_vectors - round.global_vector)[:, :cut].double()
    step = sum(w * 0.3 * d / d.norm() for w, d in zip((0.25, 0.5, 0.25), updates))
    torch.testing.assert_close(vector[:cut].double(), round.global_vector[:cut] + step, rtol=1e-5, atol=1e-6)
    buffers = torch.tensor([0.25, 0.5, 0.25]) @ round.client_vectors[:, cut:]
    torch.testing.assert_close(vector[cut:], buffers)


def test_later_by_reputation_of_the_cohort(round: Round) -> None:
    held = torch.tensor([0.1, 0.5, 0.3, float("nan")])  # client 3 is new: the mean, 0.3
    weights = CGSV().weights(round, {"cgsv": held})
    torch.testing.assert_close(weights, torch.tensor([1, 3, 3]) / torch.tensor(7.0).double(), check_dtype=False)


def test_scale_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match=r"CGSV\(scale=0\)"):
        CGSV(scale=0)
