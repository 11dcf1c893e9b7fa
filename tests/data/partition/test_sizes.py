"""Equal and unequal random shares."""

import pytest
import torch

from flsv.data import IIDPartitioner, SizePartitioner, partition_counts
from flsv.errors import ConfigurationError

LABELS = torch.arange(10).repeat(600)


def test_iid_sizes_differ_by_one_at_most():
    sizes = [len(part) for part in IIDPartitioner(7)(LABELS, 10)]
    assert sum(sizes) == 6000
    assert max(sizes) - min(sizes) <= 1


def test_iid_classes_are_spread_as_chance_has_it():
    counts = partition_counts(IIDPartitioner(10)(LABELS, 10), LABELS, 10).double()
    # Pearson's statistic of a 10 x 10 table has 81 degrees of freedom: mean 81, deviation 12.7.
    statistic = float(((counts - 60) ** 2 / 60).sum())
    assert 81 - 4 * 12.7 < statistic < 81 + 4 * 12.7


@pytest.mark.parametrize("scale", [1, 1 / 20, 1000])
def test_sizes_follow_the_proportions_on_any_scale(scale):
    parts = SizePartitioner([scale * share for share in (2, 3, 4, 5, 6)])(LABELS, 10)
    assert [len(part) for part in parts] == [600, 900, 1200, 1500, 1800]


def test_a_share_too_small_for_a_sample_names_the_client():
    with pytest.raises(ConfigurationError, match="gives the clients 6000, 0 of 6000 samples"):
        SizePartitioner([1.0, 1e-6])(LABELS, 10)


@pytest.mark.parametrize("proportions", [[1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")]])
def test_proportions_must_be_positive(proportions):
    with pytest.raises(ConfigurationError, match="each: a finite number above 0"):
        SizePartitioner(proportions)


def test_one_proportion_is_no_federation():
    with pytest.raises(ConfigurationError, match="at least 2 clients"):
        SizePartitioner([1.0])
