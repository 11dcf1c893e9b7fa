"""McMahan's label-sorted shards."""

import pytest
import torch

from flsv.data import ShardPartitioner, partition_counts
from flsv.errors import ConfigurationError


def test_the_papers_split():
    labels = torch.arange(10).repeat(600)
    counts = partition_counts(ShardPartitioner(100, 2)(labels, 10), labels, 10)
    assert (counts.sum(1) == 60).all()
    assert (counts.sum(0) == 600).all()
    # 200 shards of 30 samples, all of one class each: a client has 60 of one class or 30 of two.
    assert set(counts.flatten().tolist()) == {0, 30, 60}


def test_uneven_sizes_differ_by_one_sample_per_shard():
    labels = torch.randint(0, 10, (1003,), generator=torch.Generator().manual_seed(0))
    sizes = [len(part) for part in ShardPartitioner(7, 3)(labels, 10)]
    assert sum(sizes) == 1003
    assert max(sizes) - min(sizes) <= 3


def test_each_shard_is_a_stretch_of_the_sorted_labels():
    labels = torch.arange(4).repeat(25)
    (first, second) = ShardPartitioner(2, 1, seed=5)(labels, 4)
    assert sorted([labels[first].unique().tolist(), labels[second].unique().tolist()]) == [[0, 1], [2, 3]]


def test_more_shards_than_samples():
    with pytest.raises(ConfigurationError, match=r"12 shards cannot be cut from 10 samples. Lower num_clients"):
        ShardPartitioner(4, 3)(torch.zeros(10, dtype=torch.long), 1)


def test_shards_per_client_must_be_positive():
    with pytest.raises(ConfigurationError, match="shards_per_client=0.: expected a whole number of at least 1"):
        ShardPartitioner(4, 0)
