"""Who is dealt what: each partitioner against its paper, what holds for all of them; and what is held out."""

from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.data import (
    DirichletPartitioner,
    GaussianNoise,
    GroupPartitioner,
    IIDPartitioner,
    Partitioner,
    PathologicalPartitioner,
    ProportionPartitioner,
    ShardPartitioner,
    SizePartitioner,
    partition_counts,
    plot_partition,
)
from flsv.data.splits import Splits, split_federation
from flsv.utilities.seeding import global_rngs
from flsv.valuation import FedBary
from helpers import make_generator, refused
from helpers.data import set_up_data

LABELS = torch.randint(0, 10, (1000,), generator=make_generator(7))
GROUPS = torch.randint(0, 12, (1000,), generator=make_generator(8))
#: 600 samples of each of ten classes.
EVEN_CLASSES = 10
EVEN_CLASS_SIZE = 600
EVEN_LABELS = torch.arange(EVEN_CLASSES).repeat_interleave(EVEN_CLASS_SIZE)
EQUAL_SHARES = [[1.0]] * 5
TOTAL_OF_CLIENT_SHARES = 500
MAKERS = {
    "iid": lambda seed: IIDPartitioner(5, seed=seed),
    "size": lambda seed: SizePartitioner([2, 3, 4, 5, 6], seed=seed),
    "dirichlet": lambda seed: DirichletPartitioner(5, alpha=0.3, seed=seed),
    "pathological": lambda seed: PathologicalPartitioner(5, classes_per_client=2, seed=seed),
    "shard": lambda seed: ShardPartitioner(5, shards_per_client=2, seed=seed),
    "class shares": lambda seed: ProportionPartitioner(
        [[0.6], [0.1], [0.1], [0.1], [0.1]], seed=seed
    ),
    "client shares": lambda seed: ProportionPartitioner(
        EQUAL_SHARES, of="client", total=TOTAL_OF_CLIENT_SHARES, seed=seed
    ),
    "group": lambda seed: GroupPartitioner(5, seed=seed),
}


def divide(name, seed=3):
    partitioner = MAKERS[name](seed)
    return partitioner(LABELS, num_classes=10, groups=GROUPS)


@pytest.mark.parametrize("name", MAKERS)
def test_partitions_of_one_seed_are_equal_and_use_no_global_generator(name):
    generator_states = str(global_rngs())

    parts = divide(name, seed=3)
    repeated_parts = divide(name, seed=3)

    assert str(global_rngs()) == generator_states
    assert all(map(torch.equal, parts, repeated_parts))


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "group"])
def test_partitions_of_other_seeds_differ(name):
    assert not all(map(torch.equal, divide(name, seed=3), divide(name, seed=4)))


@pytest.mark.parametrize("name", MAKERS)
def test_partition_has_each_sample_at_most_once_in_ascending_order(name):
    parts = divide(name)

    assert len(parts) == 5
    for part in parts:
        assert len(part) > 0
        assert (part.diff() > 0).all()
    samples = torch.cat(parts)
    assert len(samples.unique()) == len(samples)


@pytest.mark.parametrize("name", [name for name in MAKERS if name != "client shares"])
def test_partition_has_all_samples_unless_their_number_is_chosen(name):
    assert sum(len(part) for part in divide(name)) == len(LABELS)


def test_partition_by_shares_of_clients_has_the_chosen_number_of_samples():
    assert sum(len(part) for part in divide("client shares")) == TOTAL_OF_CLIENT_SHARES


class ReturnsParts(Partitioner):
    def __init__(self, parts):
        super().__init__(len(parts))
        self.parts = parts

    def partition(self, labels, num_classes, groups, generator):
        return [torch.tensor(part, dtype=torch.long) for part in self.parts]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([[0, 1], []], "gives the clients 2, 0 of 5 samples"),
        ([[0, 1], [1, 2]], "no sample may be assigned twice"),
    ],
)
def test_custom_partitioner_with_empty_or_overlapping_parts_is_refused(parts, message):
    labels = torch.zeros(5, dtype=torch.long)

    with refused(message):
        ReturnsParts(parts)(labels, 1)


def count_by_client_and_class(partitioner, labels=EVEN_LABELS, num_classes=10):
    return partition_counts(partitioner(labels, num_classes), labels, num_classes)


@pytest.mark.fast_rows
@pytest.mark.parametrize("alpha", [0.3, 10.0])
def test_class_shares_have_the_moments_of_the_dirichlet(alpha):
    clients = 5
    seeds = 100
    draws = []
    for seed in range(seeds):
        partitioner = DirichletPartitioner(clients, alpha, seed=seed)
        draws.append(count_by_client_and_class(partitioner))

    # Redrawing while a client is empty hardly ever happens here; each share is Beta(alpha, (clients - 1) alpha).
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    stderr = (variance / (EVEN_CLASSES * seeds)) ** 0.5
    shares = torch.stack(draws).double() / EVEN_CLASS_SIZE  # [seeds, clients, classes]
    mean_shares = shares.mean((0, 2))
    assert (mean_shares - mean).abs().max() < 4 * stderr
    assert float(shares.var()) == pytest.approx(variance, rel=0.15)


def test_dirichlet_partitioner_uses_all_samples_and_meets_min_samples():
    partitioner = DirichletPartitioner(20, alpha=0.5, min_samples=100)

    sizes = count_by_client_and_class(partitioner).sum(1)

    assert sizes.sum() == len(EVEN_LABELS)
    assert sizes.min() >= 100


def test_dirichlet_partitioner_with_more_min_samples_than_there_are_is_refused():
    too_many = len(EVEN_LABELS) // 2 + 1
    partitioner = DirichletPartitioner(2, alpha=9.0, min_samples=too_many)

    with refused(f"fewer than {too_many} samples, at best .*Lower min_samples to"):
        count_by_client_and_class(partitioner)


def test_shard_partitioner_gives_the_papers_shards():
    counts = count_by_client_and_class(ShardPartitioner(100, 2))
    assert (counts.sum(1) == 60).all()
    assert (counts.sum(0) == 600).all()
    # 200 shards of 30 samples, all of one class each: a client has 60 of one class or 30 of two.
    assert set(counts.flatten().tolist()) == {0, 30, 60}


@pytest.mark.parametrize(("clients", "classes"), [(5, 2), (7, 4), (20, 1)])
def test_pathological_partitioner_gives_each_client_its_number_of_classes(clients, classes):
    counts = count_by_client_and_class(PathologicalPartitioner(clients, classes, seed=1))
    holders = (counts > 0).sum(0)

    assert ((counts > 0).sum(1) == classes).all()
    assert (counts.sum(0) == 600).all()
    assert holders.max() - holders.min() <= 1

    for counts_of_class in counts.T:
        positive_counts = counts_of_class[counts_of_class > 0]
        assert positive_counts.max() - positive_counts.min() <= 1


def test_pathological_partitioner_with_fewer_samples_of_a_class_than_clients_is_refused():
    labels = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])

    with refused("class 0 has fewer samples than its .* clients"):
        count_by_client_and_class(PathologicalPartitioner(7, 2), labels, num_classes=2)


def test_proportion_partitioner_meets_its_matrix_within_one_sample():
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 6, 997))
    class_sizes = np.bincount(labels, minlength=6)

    for _ in range(20):
        # [classes, clients]; the fifth client's samples are nobody's.
        shares_of_classes = rng.dirichlet(np.ones(5), size=6)
        shares = shares_of_classes.T[:4]
        partitioner = ProportionPartitioner(shares.tolist())
        counts = count_by_client_and_class(partitioner, labels, 6).numpy()
        assert np.abs(counts - shares * class_sizes).max() < 1


def test_proportions_by_client_use_as_many_samples_as_the_scarcest_class_allows():
    labels = torch.tensor([0] * 100 + [1] * 1000)
    partitioner = ProportionPartitioner([[1, 1], [1, 3]], of="client")

    counts = count_by_client_and_class(partitioner, labels, num_classes=2)

    # Both clients have T/2; class 0 is asked for T/4 + T/8 = 100, so T = 266.7.
    assert counts[:, 0].tolist() == [67, 33]
    assert counts.sum(1).tolist() == [133, 133]


def test_groups_are_joined_into_fewer_clients_of_balanced_size():
    groups = torch.tensor([40] * 5 + [10] * 2 + [30] * 4 + [20] * 3)
    labels = torch.zeros(len(groups), dtype=torch.long)

    parts = GroupPartitioner(num_clients=3)(labels, 1, groups)

    groups_of_parts = [groups[part].unique().tolist() for part in parts]
    assert groups_of_parts == [[10, 40], [30], [20]]
    with refused("have 4 groups, but at least 5 are needed"):
        GroupPartitioner(num_clients=5)(labels, 1, groups)


@pytest.mark.parametrize(
    ("clients", "classes", "title"), [(2, 2, ""), (1000, 22, "the first 50 of 1,000 clients")]
)
def test_partition_plot_has_bars_of_the_counts_of_up_to_fifty_clients(clients, classes, title):
    counts = (torch.arange(clients * classes) % 9 + 1).view(clients, classes)
    names = [f"hospital {client}" for client in range(clients)]

    _, axes = plot_partition(counts, client_names=names)

    # A row of a client has a bar of each class. The bars of the last class end at the client's number of samples.
    num_rows = min(clients, 50)
    right_edges = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert len(right_edges) == num_rows * classes
    sizes = counts.sum(1).tolist()
    assert right_edges[-num_rows:] == sizes[:num_rows]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == names[:num_rows]
    assert axes.get_title() == title


LABELS_OF_FIVE_CLASSES = torch.randint(0, 5, (1000,), generator=make_generator())
ALL_SAMPLES = torch.arange(1000)
FOUR_CLIENTS = IIDPartitioner(4)


def split_pool(partitioner=FOUR_CLIENTS, pool=ALL_SAMPLES, **options):
    return split_federation(
        LABELS_OF_FIVE_CLASSES,
        num_classes=5,
        groups=None,
        pool=pool,
        partitioner=partitioner,
        options=Splits(**options),
        column=LABELS_OF_FIVE_CLASSES.__getitem__,
    )


def index_sets(splits):
    sets = [splits.server_val]
    for client_splits in splits.clients:
        sets += client_splits.values()
    return sets


def test_splits_have_each_sample_once():
    splits = split_pool(IIDPartitioner(num_clients=6), client_val=0.2, client_test=0.3)
    sets = index_sets(splits)

    # The server's, and of each client training, validation and test.
    assert len(sets) == 1 + 6 * 3
    assert torch.equal(torch.cat(sets).sort().values, ALL_SAMPLES)


def test_max_samples_limits_the_samples_of_the_pool():
    pool = torch.arange(0, 1000, 3)
    splits = split_pool(pool=pool, max_samples=100)
    used = torch.cat(index_sets(splits))

    assert len(used) == 100
    assert set(used.tolist()) <= set(pool.tolist())


def test_max_samples_above_the_number_of_samples_limits_nothing():
    splits = split_pool(max_samples=5000)

    assert len(torch.cat(index_sets(splits))) == len(ALL_SAMPLES)


def test_splits_follow_from_their_seeds():
    options = {"client_val": 0.1, "max_samples": 500}
    sets = index_sets(split_pool(seed=1, **options))
    same_sets = index_sets(split_pool(seed=1, **options))
    other_sets = index_sets(split_pool(seed=2, **options))

    torch.testing.assert_close(sets, same_sets, rtol=0, atol=0)
    assert not torch.equal(sets[0], other_sets[0])


def validation_set_of_client_0(seed):
    partitioner = IIDPartitioner(4, seed=0)
    splits = split_pool(partitioner, seed=seed, server_val=0.0, client_val=0.3)
    return splits.clients[0]["val"]


def test_seed_of_splits_holds_out_other_samples_of_one_partition():
    assert not torch.equal(validation_set_of_client_0(seed=1), validation_set_of_client_0(seed=2))


def test_client_without_a_full_batch_is_refused_if_incomplete_batches_are_dropped():
    data = TensorDataset(torch.zeros(100, 2), torch.arange(100) % 4)
    partitioner = SizePartitioner([4, 1])
    # Of 100 samples 10 are held out for the server. Client 1 has a fifth of the other 90.
    samples_of_client_1 = 18
    set_up_data(data, partitioner, batch_size=samples_of_client_1, drop_last=True)

    with refused("Client 1 has 18 samples, fewer than one batch of 32"):
        set_up_data(data, partitioner, batch_size=32, drop_last=True)


def test_drop_flagged_drops_noisy_training_samples_and_few_others():
    noise = GaussianNoise(std=1.0, sample_rate=0.2, clients=[1])
    set_up_digits = partial(
        set_up_data,
        "digits",
        IIDPartitioner(3),
        corruptions=[noise],
        client_val=0.1,
        max_samples=600,
    )
    whole = set_up_digits()
    cleaned = set_up_digits(drop_flagged=FedBary())

    dropped = []
    for client in range(3):
        samples = set(whole.client_indices(client).tolist())
        remaining = set(cleaned.client_indices(client).tolist())
        assert remaining <= samples
        dropped.append(samples - remaining)
        assert len(dropped[client]) < 0.3 * len(samples)
        val_indices = cleaned.client_indices(client, "val")
        assert torch.equal(whole.client_indices(client, "val"), val_indices)

    is_noisy = whole.corrupted_samples(1)
    noisy = set(whole.client_indices(1)[is_noisy].tolist())
    assert len(dropped[1] & noisy) >= 0.95 * len(noisy)
    num_dropped = whole.num_samples.sum() - cleaned.num_samples.sum()
    assert cleaned.describe()["dropped_samples"] == int(num_dropped)


@pytest.mark.parametrize("name", ["num_samples", "class_counts"])
def test_numbers_of_samples_are_those_of_the_data_after_a_caller_has_changed_them(name):
    data = set_up_data((TensorDataset(LABELS[:, None].float(), LABELS),), IIDPartitioner(4))
    numbers = getattr(data, name)
    expected = numbers.clone()

    numbers.zero_()

    assert torch.equal(getattr(data, name), expected)
