"""Who holds what: sizes, disjointness, seeds, and refusals."""

import itertools

import pytest
import torch

from flsv.data import DirichletPartitioner, IIDPartitioner
from flsv.data.splits import Splits, split_federation
from flsv.errors import ConfigurationError

LABELS = torch.randint(0, 5, (1000,), generator=torch.Generator().manual_seed(0))


def split(partitioner=None, pool=None, groups=None, **options):
    pool = torch.arange(1000) if pool is None else pool
    return split_federation(LABELS, 5, groups, pool, partitioner or IIDPartitioner(4), Splits(**options))


def sets_of(splits):
    return [splits.server_val, *(held for client in splits.clients for held in client.values())]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("partitioner", [IIDPartitioner(6), DirichletPartitioner(6, 0.3, min_samples=5)])
def test_no_sample_is_in_two_places_and_none_is_lost(partitioner, seed):
    splits = split(partitioner, client_val=0.2, client_test=0.3, seed=seed)
    sets = [set(held.tolist()) for held in sets_of(splits)]
    assert len(sets) == 1 + 6 * 3
    assert all(not a & b for a, b in itertools.combinations(sets, 2))
    assert set().union(*sets) == set(range(1000))


def test_sizes_follow_the_fractions():
    splits = split(server_val=0.2, client_val=0.1, client_test=0.3)
    assert len(splits.server_val) == 200
    for client in splits.clients:
        assert {name: len(held) for name, held in client.items()} == {"train": 120, "val": 20, "test": 60}


def test_only_the_pool_is_dealt_and_max_samples_counts_all():
    pool = torch.arange(0, 1000, 3)
    splits = split(pool=pool, max_samples=100)
    used = torch.cat(sets_of(splits))
    assert len(used) == 100
    assert set(used.tolist()) <= set(pool.tolist())
    assert len(torch.cat(sets_of(split(max_samples=5000)))) == 1000


def test_everything_follows_from_the_seeds():
    options = {"client_val": 0.1, "max_samples": 500}
    first, again, other = (sets_of(split(seed=seed, **options)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_a_fraction_of_the_pool_that_is_no_sample():
    with pytest.raises(ConfigurationError, match=r"server_val=0\.01. of 20 samples is none"):
        split(pool=torch.arange(20), server_val=0.01)
