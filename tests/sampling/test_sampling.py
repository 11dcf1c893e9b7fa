"""Samplers: sizes, chances, errors."""

import pytest
import torch

from flsv.errors import ConfigurationError
from flsv.sampling import FullParticipation, UniformSampler


def test_full_participation() -> None:
    assert FullParticipation().sample(4, {}, torch.Generator()).tolist() == [0, 1, 2, 3]


def test_uniform_draws_everyone_equally_often() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(6)
    for _ in range(3000):
        cohort = UniformSampler(2).sample(6, {}, generator)
        assert len(cohort.unique()) == 2
        assert (cohort.diff() > 0).all()
        counts[cohort] += 1
    # 1000 expected each, standard deviation 26.
    assert ((counts - 1000).abs() < 5 * 26).all()


def test_errors() -> None:
    with pytest.raises(ConfigurationError, match="at least 1 client"):
        UniformSampler(0)
    UniformSampler(5).check(5)
    with pytest.raises(ConfigurationError, match=r"cohort_size=6\) cannot be met: the federation has 5 clients. Lower"):
        UniformSampler(6).check(5)
