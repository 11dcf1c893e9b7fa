"""Who is dealt what: each partitioner against its paper, what holds for all of them; and what is held out."""

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
#: Makers of a partitioner for five clients by its seed.
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
    """The indices of each client's samples."""
    partitioner = MAKERS[name](seed)
    return partitioner(LABELS, num_classes=10, groups=GROUPS)


def lists_of_samples(parts):
    return [part.tolist() for part in parts]


@pytest.mark.parametrize("name", MAKERS)
def test_partitions_of_one_seed_are_equal_and_use_no_global_generator(name):
    generator_states = str(global_rngs())

    parts = divide(name, seed=3)
    repeated_parts = divide(name, seed=3)

    assert str(global_rngs()) == generator_states
    assert lists_of_samples(repeated_parts) == lists_of_samples(parts)


@pytest.mark.parametrize("name", sorted(MAKERS.keys() - {"group"}))
def test_partitions_of_other_seeds_differ(name):
    assert lists_of_samples(divide(name, seed=4)) != lists_of_samples(divide(name, seed=3))


@pytest.mark.parametrize("name", MAKERS)
def test_partition_has_each_sample_once_in_ascending_order_unless_their_number_is_chosen(name):
    parts = divide(name)

    assert len(parts) == 5
    for part in parts:
        assert len(part) > 0
        assert (part.diff() > 0).all()
    num_samples = TOTAL_OF_CLIENT_SHARES if name == "client shares" else len(LABELS)
    samples = torch.cat(parts)
    assert len(samples.unique()) == len(samples) == num_samples


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
    partitioner = ReturnsParts(parts)
    labels = torch.zeros(5, dtype=torch.long)

    with refused(message):
        partitioner(labels, num_classes=1)


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
        counts = count_by_client_and_class(partitioner)
        draws.append(counts / EVEN_CLASS_SIZE)

    # Redrawing while a client is empty hardly ever happens here; each share is Beta(alpha, (clients - 1) alpha).
    mean = 1 / clients
    variance = mean * (1 - mean) / (clients * alpha + 1)
    stderr = (variance / (EVEN_CLASSES * seeds)) ** 0.5
    shares = torch.stack(draws)  # [seeds, clients, classes]
    mean_of_each_client = shares.mean((0, 2))
    assert (mean_of_each_client - mean).abs().max() < 4 * stderr
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
    partitioner = ShardPartitioner(num_clients=100, shards_per_client=2)

    counts = count_by_client_and_class(partitioner)

    shard = len(EVEN_LABELS) // (100 * 2)
    assert (counts.sum(1) == 2 * shard).all()
    assert (counts.sum(0) == EVEN_CLASS_SIZE).all()
    # All samples of a shard have one class.
    assert set(counts.flatten().tolist()) == {0, shard, 2 * shard}


@pytest.mark.parametrize(("clients", "classes"), [(5, 2), (7, 4), (20, 1)])
def test_pathological_partitioner_gives_each_client_its_number_of_classes(clients, classes):
    partitioner = PathologicalPartitioner(clients, classes_per_client=classes, seed=1)

    counts = count_by_client_and_class(partitioner)

    has_class = counts > 0
    clients_of_class = has_class.sum(0)
    assert (has_class.sum(1) == classes).all()
    assert (counts.sum(0) == EVEN_CLASS_SIZE).all()
    assert clients_of_class.max() - clients_of_class.min() <= 1
    for counts_of_class in counts.T:
        counts_of_holders = counts_of_class[counts_of_class > 0]
        assert counts_of_holders.max() - counts_of_holders.min() <= 1


def test_pathological_partitioner_with_fewer_samples_of_a_class_than_clients_is_refused():
    labels = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1])
    partitioner = PathologicalPartitioner(num_clients=7, classes_per_client=2)

    with refused("class 0 has fewer samples than its .* clients"):
        partitioner(labels, num_classes=2)


def test_proportion_partitioner_meets_its_matrix_within_one_sample():
    generator = np.random.default_rng(0)
    labels = torch.from_numpy(generator.integers(0, 6, 997))
    class_sizes = torch.bincount(labels, minlength=6)

    for _ in range(20):
        shares_of_five = generator.dirichlet(np.ones(5), size=6).T  # [clients, classes]
        shares_of_four = shares_of_five[:4].tolist()  # some samples are nobody's
        partitioner = ProportionPartitioner(shares_of_four)
        counts = count_by_client_and_class(partitioner, labels, num_classes=6)
        expected_counts = torch.tensor(shares_of_four) * class_sizes
        assert (counts - expected_counts).abs().max() < 1


def test_proportions_by_client_use_as_many_samples_as_the_scarcest_class_allows():
    labels = torch.tensor([0] * 100 + [1] * 1000)
    partitioner = ProportionPartitioner([[1, 1], [1, 3]], of="client")

    counts = count_by_client_and_class(partitioner, labels, num_classes=2)

    # Both clients have half of all. Class 0 is asked for 1/2 of the first half and 1/4 of the second, together 100.
    half = 100 / (1 / 2 + 1 / 4)
    assert counts[:, 0].tolist() == [round(half / 2), round(half / 4)]
    assert counts.sum(1).tolist() == [int(half), int(half)]


GROUPS_OF_4_SIZES = torch.tensor([40] * 5 + [10] * 2 + [30] * 4 + [20] * 3)


def join_groups(num_clients):
    labels = torch.zeros(len(GROUPS_OF_4_SIZES), dtype=torch.long)
    partitioner = GroupPartitioner(num_clients)
    return partitioner(labels, num_classes=1, groups=GROUPS_OF_4_SIZES)


def test_groups_are_joined_into_fewer_clients_of_balanced_size():
    parts = join_groups(num_clients=3)

    groups_of_parts = [GROUPS_OF_4_SIZES[part].unique().tolist() for part in parts]
    assert groups_of_parts == [[10, 40], [30], [20]]


def test_fewer_groups_than_clients_are_refused():
    with refused("have 4 groups, but at least 5 are needed"):
        join_groups(num_clients=5)


@pytest.mark.fast_rows
@pytest.mark.parametrize(
    ("clients", "classes", "title"), [(2, 2, ""), (1000, 22, "the first 50 of 1,000 clients")]
)
def test_partition_plot_has_bars_of_the_counts_of_up_to_fifty_clients(clients, classes, title):
    counts = torch.randint(1, 9, (clients, classes), generator=make_generator())
    names = [f"hospital {client}" for client in range(clients)]

    picture = plot_partition(counts, client_names=names)
    _, axes = picture

    # Each client has a row with a bar of each class. The bars of the last class end at its number of samples.
    num_rows = min(clients, 50)
    sizes = counts.sum(1)[:num_rows]
    right_edges = [bar.get_x() + bar.get_width() for bar in axes.patches]
    right_edges_of_last_class = right_edges[-num_rows:]
    names_of_rows = [label.get_text() for label in axes.get_yticklabels()]
    assert len(right_edges) == num_rows * classes
    assert right_edges_of_last_class == sizes.tolist()
    assert names_of_rows == names[:num_rows]
    assert axes.get_title() == title
    assert picture._repr_png_().startswith(b"\x89PNG")  # a notebook shows it


LABELS_OF_FIVE_CLASSES = torch.randint(0, 5, (1000,), generator=make_generator())
ALL_SAMPLES = torch.arange(1000)
FOUR_CLIENTS = IIDPartitioner(4)


def split_pool(partitioner=FOUR_CLIENTS, pool=ALL_SAMPLES, **splits):
    return split_federation(
        LABELS_OF_FIVE_CLASSES,
        num_classes=5,
        groups=None,
        pool=pool,
        partitioner=partitioner,
        options=Splits(**splits),
        column=LABELS_OF_FIVE_CLASSES.__getitem__,
    )


def index_sets(splits):
    """The indices that the server has, and those of each client's training, validation and test sets."""
    sets = [splits.server_val]
    for client_splits in splits.clients:
        sets += client_splits.values()
    return sets


def test_splits_have_each_sample_once():
    splits = split_pool(IIDPartitioner(num_clients=6), client_val=0.2, client_test=0.3)
    sets = index_sets(splits)

    sets_of_server = 1
    sets_of_a_client = 3
    assert len(sets) == sets_of_server + 6 * sets_of_a_client
    assert torch.equal(torch.cat(sets).sort().values, ALL_SAMPLES)


def test_max_samples_limits_the_samples_of_the_pool():
    every_third_sample = torch.arange(0, 1000, 3)

    splits = split_pool(pool=every_third_sample, max_samples=100)

    samples = torch.cat(index_sets(splits))
    assert len(samples) == 100
    assert set(samples.tolist()) <= set(every_third_sample.tolist())


def test_max_samples_above_the_number_of_samples_limits_nothing():
    splits = split_pool(max_samples=5000)

    assert len(torch.cat(index_sets(splits))) == len(ALL_SAMPLES)


def sets_of_seed(seed):
    return index_sets(split_pool(seed=seed, client_val=0.1, max_samples=500))


def test_splits_follow_from_their_seeds():
    sets = sets_of_seed(1)

    torch.testing.assert_close(sets_of_seed(1), sets, rtol=0, atol=0)
    assert not torch.equal(sets_of_seed(2)[0], sets[0])


def validation_set_of_client_0(seed):
    partitioner = IIDPartitioner(4, seed=0)
    splits = split_pool(partitioner, seed=seed, server_val=0.0, client_val=0.3)
    return splits.clients[0]["val"]


def test_seed_of_splits_holds_out_other_samples_of_one_partition():
    assert not torch.equal(validation_set_of_client_0(seed=1), validation_set_of_client_0(seed=2))


def test_client_without_a_full_batch_is_refused_if_incomplete_batches_are_dropped():
    samples = TensorDataset(torch.zeros(100, 2), torch.arange(100) % 4)
    partitioner = SizePartitioner([4, 1])
    # The server has 10 of 100 samples. Client 1 has a fifth of the other 90.
    samples_of_client_1 = 18
    set_up_data(samples, partitioner, batch_size=samples_of_client_1, drop_last=True)

    with refused("Client 1 has 18 samples, fewer than one batch of 32"):
        set_up_data(samples, partitioner, batch_size=32, drop_last=True)


def indices_as_set(data, client, split="train"):
    return set(data.client_indices(client, split).tolist())


NOISY_CLIENT = 1


def test_drop_flagged_drops_noisy_and_few_other_training_samples_and_no_validation_samples():
    noise = GaussianNoise(std=1.0, sample_rate=0.2, clients=[NOISY_CLIENT])
    options = {"corruptions": [noise], "client_val": 0.1, "max_samples": 600}
    whole = set_up_data("digits", IIDPartitioner(3), **options)
    cleaned = set_up_data("digits", IIDPartitioner(3), drop_flagged=FedBary(), **options)

    for client in range(3):
        samples = indices_as_set(whole, client)
        remaining_samples = indices_as_set(cleaned, client)
        assert remaining_samples <= samples
        assert len(remaining_samples) > 0.7 * len(samples)
        assert indices_as_set(cleaned, client, "val") == indices_as_set(whole, client, "val")
    num_dropped = whole.num_samples.sum() - cleaned.num_samples.sum()
    assert cleaned.describe()["dropped_samples"] == int(num_dropped)

    is_noisy = whole.corrupted_samples(NOISY_CLIENT)
    noisy_samples = set(whole.client_indices(NOISY_CLIENT)[is_noisy].tolist())
    remaining_noisy_samples = noisy_samples & indices_as_set(cleaned, NOISY_CLIENT)
    assert len(remaining_noisy_samples) <= 0.05 * len(noisy_samples)


@pytest.mark.parametrize("name", ["num_samples", "class_counts"])
def test_counts_of_the_data_stay_if_a_caller_overwrites_the_returned_tensor(name):
    samples = TensorDataset(LABELS[:, None].float(), LABELS)
    data = set_up_data(samples, IIDPartitioner(4))
    counts = getattr(data, name)
    copied_counts = counts.clone()

    counts.zero_()

    assert torch.equal(getattr(data, name), copied_counts)
