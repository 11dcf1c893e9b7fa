"""Noise on inputs and labels: whom it concerns, what it changes, and nothing else; and the long tail."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from flsv.attacks import GradientPoisoning
from flsv.data import (
    ClientChoice,
    ClosedSetLabelNoise,
    DirichletPartitioner,
    GaussianNoise,
    IIDPartitioner,
    LongTail,
    OpenSetLabelNoise,
)
from flsv.data.partition import partition_counts
from flsv.utilities.seeding import generator_for
from helpers import make_generator, refused
from helpers.data import Items, set_up_data

X = torch.randn(300, 2, 3, generator=make_generator())
Y = torch.arange(300) % 5
LABELS_AND_INPUTS = [
    ClosedSetLabelNoise(clients=[0]),
    GaussianNoise(sample_rate=0.3, clients=[0, 2]),
]
EVEN_CLASSES = [0, 2, 4, 6, 8]


def test_a_corruption_and_an_attack_of_one_fraction_and_seed_concern_the_same_clients():
    corruption = ClosedSetLabelNoise(fraction=0.3, seed=3)
    attack = GradientPoisoning(fraction=0.3, seed=3)

    clients = corruption.chosen(20)
    more_clients = GaussianNoise(fraction=0.5, seed=3).chosen(20)

    assert attack.chosen(20) == clients
    assert set(clients) < set(more_clients)


class Labeled(TensorDataset):
    """Labels in an attribute, something else in the samples."""

    targets = Y


def make_corrupted_data(source, corruptions, **options):
    options = {"client_val": 0.1, "client_test": 0.1, **options}
    return set_up_data(source, DirichletPartitioner(4, 1.0, 20), corruptions=corruptions, **options)


def load_in_order(data, client):
    """A client's training samples in the order of its indices, as its loader gives them."""
    x, y = (
        torch.cat(column) for column in zip(*data.client_loader(client, generator=generator_for(3)))
    )
    order = torch.randperm(len(data.client_indices(client)), generator=generator_for(3))
    return x[order.argsort()], y[order.argsort()]


def test_only_the_chosen_clients_training_samples_change():
    inputs = X.clone()
    labels = Y.clone()

    data = make_corrupted_data(TensorDataset(inputs, labels), LABELS_AND_INPUTS)

    assert torch.equal(inputs, X)
    assert torch.equal(labels, Y)
    assert data.malicious == [0, 2]

    for client in range(4):
        indices = data.client_indices(client)
        x, y = load_in_order(data, client)
        is_other_pixel = x != X[indices]
        is_noisy = is_other_pixel.flatten(1).any(1)
        expected_noisy = 0
        if client in (0, 2):
            expected_noisy = int(0.3 * len(indices) + 0.5)
        expected_labels = Y[indices]
        if client == 0:
            expected_labels = (expected_labels + 1) % 5
        assert int(is_noisy.sum()) == expected_noisy
        assert torch.equal(y, expected_labels)
        assert torch.equal(
            data.corrupted_samples(client),
            is_noisy | (y != Y[indices]),
        )
        assert torch.equal(
            data.class_counts[client],
            torch.bincount(y, minlength=5),
        )
        for split in ("val", "test"):
            split_indices = data.client_indices(client, split)
            x, y = next(iter(data.client_loader(client, split)))
            assert torch.equal(x, X[split_indices])
            assert torch.equal(y, Y[split_indices])

    rows = data.server_val_indices
    x, y = next(iter(data.val_dataloader()))

    assert torch.equal(x, X[rows])
    assert torch.equal(y, Y[rows])


def test_corruption_of_data_that_are_not_tensors_needs_preload():
    with refused("Items reads its samples one by one"):
        make_corrupted_data(Items(zip(X, Y.tolist())), LABELS_AND_INPUTS)


def test_corruption_of_samples_that_do_not_end_with_their_label_is_refused():
    samples = Labeled(X, torch.zeros(300))
    with refused("last part of these samples is not their label"):
        make_corrupted_data(samples, [GaussianNoise()], preload=True)


def added_noise(corruption, x):
    y = torch.zeros(len(x), dtype=torch.long)
    noisy, _ = corruption(x.clone(), y, 2, make_generator())
    assert noisy.dtype == x.dtype
    return noisy - x


DIGITS = torch.arange(10_000) % 10


def corrupt_labels(corruption):
    x = torch.arange(10_000.0)[:, None]
    generator = make_generator()
    labels = DIGITS.clone()
    same, y = corruption(x.clone(), labels, 10, generator)
    assert torch.equal(x, same)
    return y


def test_choice_of_a_client_that_does_not_exist_or_of_none_is_refused():
    with refused(r"no client 7. The clients are 0 \.\. 4"):
        ClientChoice(clients=[0, 7]).chosen(5)
    with refused(r"none of 5 clients.* is 0\.1"):
        ClientChoice(fraction=0.05).chosen(5)


def test_noise_of_a_pixel_rate_is_on_that_share_of_pixels_in_all_channels_and_of_cells():
    noise = GaussianNoise(pixel_rate=0.2)
    images = torch.zeros(500, 3, 12, 12)
    table = torch.zeros(500, 40)

    is_changed_pixel = added_noise(noise, images) != 0
    is_changed_cell = added_noise(noise, table) != 0

    in_first_channel = is_changed_pixel[:, 0]
    in_second_channel = is_changed_pixel[:, 1]
    assert torch.equal(in_first_channel, in_second_channel)

    # 72,000 pixels: a standard error of 0.0015.
    share_of_pixels = is_changed_pixel.float().mean()
    share_of_cells = is_changed_cell.float().mean()
    assert share_of_pixels.item() == pytest.approx(0.2, abs=0.008)
    assert share_of_cells.item() == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("to", ["next", "random"])
def test_label_noise_flips_exactly_its_rate_of_the_labels(to):
    labels = corrupt_labels(ClosedSetLabelNoise(rate=0.137, to=to))

    num_flipped = int((labels != DIGITS).sum())
    assert num_flipped == 0.137 * len(DIGITS)


def test_label_noise_at_random_goes_to_every_other_class_equally_often():
    labels = corrupt_labels(ClosedSetLabelNoise(to="random"))

    # Binomial(10000, 1/9): mean 1111, standard deviation 31.4.
    counts = torch.bincount((labels - DIGITS) % 10, minlength=10)
    assert counts[0] == 0
    deviations = counts[1:] - 10_000 / 9
    assert deviations.abs().max() < 5 * 31.4


def test_unknown_classes_get_the_next_known_label():
    # As the authors' code does it: every even class becomes the odd one after it.
    labels = corrupt_labels(OpenSetLabelNoise(EVEN_CLASSES))
    labels_without_three = corrupt_labels(OpenSetLabelNoise([0, 1, 9]))

    is_even = DIGITS % 2 == 0
    assert torch.equal(labels, DIGITS + is_even)
    expected_without_three = [2, 2, 2, 3, 4, 5, 6, 7, 8, 2]
    assert labels_without_three[:10].tolist() == expected_without_three


def test_open_set_noise_without_a_known_class_is_refused():
    with refused("at least one is not unknown"):
        corrupt_labels(OpenSetLabelNoise(list(range(10))))


def test_open_set_noise_leaves_only_known_classes_in_evaluation_sets():
    labels = DIGITS[:2000]
    inputs = labels[:, None].float()  # each sample says what it is
    train = TensorDataset(inputs, labels)
    test = TensorDataset(inputs[:100], labels[:100])
    noise = OpenSetLabelNoise(EVEN_CLASSES, fraction=0.4)

    data = set_up_data(
        (train, test),
        IIDPartitioner(3),
        corruptions=[noise],
        client_val=0.1,
        client_test=0.1,
    )

    batches = [*data.val_dataloader(), *data.test_dataloader()]
    for client in range(3):
        batches += data.client_loader(client, "val")
        batches += data.client_loader(client, "test")
    for batch_inputs, batch_labels in batches:
        is_odd = batch_labels % 2 == 1
        assert is_odd.all()
        assert torch.equal(batch_inputs[:, 0].long(), batch_labels)
    assert data.num_classes == 10


def class_sizes(ratio, labels, num_classes):
    parts = LongTail(IIDPartitioner(3), ratio)(labels, num_classes)
    return partition_counts(parts, labels, num_classes).sum(0).numpy()


@pytest.mark.parametrize("ratio", [1, 50])
def test_long_tail_class_sizes_fall_exponentially(ratio):
    labels = torch.arange(10).repeat_interleave(500)

    sizes = class_sizes(ratio, labels, 10)

    # Cao et al.'s own formula: img_max * imb_factor ** (j / (C - 1)) with imb_factor = 1 / ratio.
    imb_factor = 1 / ratio
    exponents = np.arange(10) / 9
    expected = 500 * imb_factor**exponents
    assert np.abs(sizes - expected).max() <= 0.5


def test_long_tail_of_unequal_classes_is_limited_by_the_scarcest():
    numbers_of_samples = torch.tensor([1000, 100, 900, 800])
    labels = torch.arange(4).repeat_interleave(numbers_of_samples)

    sizes = class_sizes(8, labels, 4)

    # The first of four classes has 8 times as many as the last: each has half of the one before.
    # By halves from 200, so that the second class has the 100 that there are.
    assert sizes.tolist() == [200, 100, 50, 25]


def test_long_tail_partitions_the_remaining_samples_by_its_inner_partitioner():
    labels = torch.arange(10).repeat(500)
    inner = DirichletPartitioner(4, alpha=0.3, seed=2)

    parts = LongTail(inner, 10)(labels, 10)

    remaining = torch.cat(parts).sort().values
    expected_parts = [
        remaining[part]
        for part in inner(
            labels[remaining],
            10,
        )
    ]
    for part, expected in zip(parts, expected_parts, strict=True):
        assert torch.equal(part, expected)
