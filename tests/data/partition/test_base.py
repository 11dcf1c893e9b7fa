"""What holds for every partitioner: disjoint, not empty, a function of seed and labels, and clear refusals."""

import numpy as np
import pytest
import torch

from flsv.data import (
    DirichletPartitioner,
    GroupPartitioner,
    IIDPartitioner,
    Partitioner,
    PathologicalPartitioner,
    ProportionPartitioner,
    ShardPartitioner,
    SizePartitioner,
    partition_counts,
)
from flsv.data.partition.base import cut
from flsv.errors import ConfigurationError

LABELS = torch.randint(0, 10, (1000,), generator=torch.Generator().manual_seed(7))
GROUPS = torch.randint(0, 12, (1000,), generator=torch.Generator().manual_seed(8))

MAKERS = {
    "iid": lambda seed: IIDPartitioner(5, seed=seed),
    "size": lambda seed: SizePartitioner([2, 3, 4, 5, 6], seed=seed),
    "dirichlet": lambda seed: DirichletPartitioner(5, alpha=0.3, seed=seed),
    "pathological": lambda seed: PathologicalPartitioner(5, classes_per_client=2, seed=seed),
    "shard": lambda seed: ShardPartitioner(5, shards_per_client=2, seed=seed),
    "class shares": lambda seed: ProportionPartitioner([[0.6], [0.1], [0.1], [0.1], [0.1]], seed=seed),
    "client shares": lambda seed: ProportionPartitioner([[1.0]] * 5, of="client", total=500, seed=seed),
    "counts": lambda seed: ProportionPartitioner([[5.0], [6.0], [7.0], [8.0], [9.0]], of="count", seed=seed),
    "group": lambda seed: GroupPartitioner(5, seed=seed),
}
USE_EVERYTHING = ("iid", "size", "dirichlet", "pathological", "shard", "class shares", "group")


@pytest.mark.parametrize("name", MAKERS)
def test_every_sample_is_in_one_place_at_most(name):
    parts = MAKERS[name](0)(LABELS, 10, GROUPS)
    everything = np.concatenate([part.numpy() for part in parts])
    assert len(parts) == 5
    assert all(len(part) > 0 and part.dtype == torch.int64 for part in parts)
    assert all((part.diff() > 0).all() for part in parts)
    assert len(np.unique(everything)) == len(everything)
    assert everything.min() >= 0
    assert everything.max() < 1000
    if name in USE_EVERYTHING:
        assert len(everything) == 1000


@pytest.mark.parametrize("name", MAKERS)
def test_a_partition_is_a_function_of_seed_and_labels(name):
    first = MAKERS[name](3)(LABELS, 10, GROUPS)
    torch.manual_seed(99)
    np.random.seed(99)  # noqa: NPY002 - a partitioner must not read the global generator
    state = torch.get_rng_state()
    again = MAKERS[name](3)(LABELS, 10, GROUPS)
    other = MAKERS[name](4)(LABELS, 10, GROUPS)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    differs = any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert differs is (name != "group")


@pytest.mark.parametrize("name", MAKERS)
def test_repr_tells_the_arguments(name):
    text = repr(MAKERS[name](3))
    assert text.startswith(type(MAKERS[name](3)).__name__ + "(")
    assert "seed=3" in text


def test_counts_match_a_plain_count():
    parts = IIDPartitioner(4)(LABELS, 10)
    expected = [[sum(int(LABELS[i]) == c for i in part.tolist()) for c in range(10)] for part in parts]
    assert partition_counts(parts, LABELS, 10).tolist() == expected


@pytest.mark.parametrize("num_clients", [0, 1, -3])
def test_a_federation_needs_two_clients(num_clients):
    with pytest.raises(ConfigurationError, match=r"IIDPartitioner\(num_clients=.*at least 2 clients"):
        IIDPartitioner(num_clients)


def test_more_clients_than_samples():
    with pytest.raises(ConfigurationError, match=r"3 samples cannot be dealt to 5 clients.*Lower num_clients"):
        IIDPartitioner(5)(torch.tensor([0, 1, 0]), 2)


def test_as_many_clients_as_samples():
    assert [len(part) for part in IIDPartitioner(3)(torch.tensor([0, 1, 0]), 2)] == [1, 1, 1]


def test_a_partitioner_of_ones_own_is_checked():
    class Fixed(Partitioner):
        def __init__(self, parts):
            super().__init__(len(parts))
            self.parts = parts

        def partition(self, labels, num_classes, groups, generator):
            return [torch.tensor(part, dtype=torch.long) for part in self.parts]

    labels = torch.zeros(5, dtype=torch.long)
    assert [part.tolist() for part in Fixed([[3, 0], [1]])(labels, 1)] == [[0, 3], [1]]
    with pytest.raises(ConfigurationError, match="gives the clients 2, 0 of 5 samples"):
        Fixed([[0, 1], []])(labels, 1)
    with pytest.raises(ConfigurationError, match="gives the clients 2, 0, 0 of 5"):
        Fixed([[0, 1], [], []])(labels, 1)
    with pytest.raises(ConfigurationError, match="no sample may be dealt twice"):
        Fixed([[0, 1], [1, 2]])(labels, 1)


@pytest.mark.parametrize(("length", "shares"), [(7, [0.7, 0.1, 0.1, 0.1]), (1000, [0.3] * 3), (3, [0.25] * 4)])
def test_cut_is_within_one_of_the_exact_sizes(length, shares):
    pieces = cut(torch.arange(length), torch.tensor(shares))
    assert torch.cat(pieces).tolist() == list(range(sum(map(len, pieces))))
    for piece, share in zip(pieces, shares, strict=True):
        assert abs(len(piece) - share * length) < 1
    assert abs(sum(map(len, pieces)) - sum(shares) * length) <= 0.5
