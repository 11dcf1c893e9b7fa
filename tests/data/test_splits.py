"""Who holds what: sizes, disjointness, seeds, refusals; and training on what is not flagged."""

import itertools

import pytest
import torch
from data_options import ready
from torch.utils.data import TensorDataset

from flsv.data import DirichletPartitioner, GaussianNoise, IIDPartitioner, SizePartitioner
from flsv.data.splits import Splits, split_federation
from flsv.errors import ConfigurationError

LABELS = torch.randint(0, 5, (1000,), generator=torch.Generator().manual_seed(0))


def split(partitioner=None, pool=None, groups=None, **options):
    pool = torch.arange(1000) if pool is None else pool
    return split_federation(LABELS, 5, groups, pool, partitioner or IIDPartitioner(4), Splits(**options))


def sets_of(splits):
    return [splits.server_val, *(held for client in splits.clients for held in client.values())]


@pytest.mark.parametrize("partitioner", [IIDPartitioner(6), DirichletPartitioner(6, 0.3, min_samples=5)])
def test_no_sample_is_in_two_places_and_none_is_lost(partitioner):
    splits = split(partitioner, client_val=0.2, client_test=0.3)
    sets = [set(held.tolist()) for held in sets_of(splits)]
    assert len(sets) == 1 + 6 * 3
    assert all(not a & b for a, b in itertools.combinations(sets, 2))
    assert set().union(*sets) == set(range(1000))


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
    whole = {"server_val": 0.0, "client_val": 0.3}
    one, two = (split(IIDPartitioner(4, seed=0), seed=seed, **whole).clients[0] for seed in (1, 2))
    assert not torch.equal(one["val"], two["val"])


def test_a_fraction_of_the_pool_that_is_no_sample():
    with pytest.raises(ConfigurationError, match=r"server_val=0\.01. of 20 samples is none"):
        split(pool=torch.arange(20), server_val=0.01)


def test_a_client_without_a_full_batch_is_named_where_the_rest_is_dropped():
    data, sizes = TensorDataset(torch.zeros(100, 2), torch.arange(100) % 4), SizePartitioner([4, 1])
    ready(data, sizes, batch_size=18, drop_last=True)
    with pytest.raises(ConfigurationError, match="Client 1 has 18 samples, not one full batch of 32"):
        ready(data, sizes, batch_size=32, drop_last=True)


def test_only_flagged_training_samples_are_dropped_and_counts_follow():
    noise = [GaussianNoise(std=1.0, sample_rate=0.2, clients=[1])]
    options = {"corruptions": noise, "client_val": 0.1, "max_samples": 600}
    whole, kept = (ready("digits", IIDPartitioner(3), drop_flagged=drop, **options) for drop in (False, True))
    noisy = set(whole.client_indices(1)[whole.corrupted_samples(1)].tolist())
    for client in range(3):
        before, after = set(whole.client_indices(client).tolist()), set(kept.client_indices(client).tolist())
        assert after <= before
        dropped = before - after
        assert len(dropped) < 0.3 * len(before)
        if client == 1:
            assert len(dropped & noisy) >= 0.95 * len(noisy)
        assert torch.equal(whole.client_indices(client, "val"), kept.client_indices(client, "val"))
        labels = torch.cat([y for _, y in kept.client_loader(client)])
        assert torch.equal(torch.bincount(labels, minlength=10), kept.class_counts[client])
    assert torch.equal(whole.server_val_indices, kept.server_val_indices)
    assert kept.describe()["dropped_samples"] == int(whole.num_samples.sum() - kept.num_samples.sum())
    broken = TensorDataset(torch.full((40, 2), torch.nan), torch.arange(40) % 2)
    with pytest.raises(ConfigurationError, match="no client has a sample that is finite"):
        ready(broken, IIDPartitioner(2), server_val=0.0, drop_flagged=True)
