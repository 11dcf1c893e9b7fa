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


def test_corruption_and_attack_of_one_fraction_and_seed_choose_the_same_clients():
    corruption = ClosedSetLabelNoise(fraction=0.3, seed=3)
    attack = GradientPoisoning(fraction=0.3, seed=3)

    assert attack.chosen(20) == corruption.chosen(20)


def test_corruption_of_a_larger_fraction_chooses_the_clients_of_a_smaller_one_and_more():
    corruption_of_some = GaussianNoise(fraction=0.3, seed=3)
    corruption_of_half = GaussianNoise(fraction=0.5, seed=3)

    assert set(corruption_of_some.chosen(20)) < set(corruption_of_half.chosen(20))


class LabelsInAttribute(TensorDataset):
    """The last part of its samples is something else."""

    targets = Y


def make_corrupted_data(source, corruptions, **options):
    partitioner = DirichletPartitioner(4, alpha=1.0, min_samples=20)
    return set_up_data(
        source, partitioner, corruptions=corruptions, client_val=0.1, client_test=0.1, **options
    )


def load_in_order(data, client):
    """A client's training samples in the order of its indices, as its loader gives them."""
    loader = data.client_loader(client, generator=generator_for(3))
    batches = list(loader)
    x = torch.cat([inputs for inputs, _ in batches])
    y = torch.cat([labels for _, labels in batches])

    # The loader permutes the samples by its generator.
    order = torch.randperm(len(y), generator=generator_for(3))
    unshuffled = order.argsort()
    return x[unshuffled], y[unshuffled]


@pytest.fixture(scope="module")
def corrupted_data():
    """Client 0 has other labels, and clients 0 and 2 have noise on 30 % of their training samples."""
    return make_corrupted_data(TensorDataset(X.clone(), Y.clone()), LABELS_AND_INPUTS)


@pytest.mark.parametrize(
    ("client", "label_shift", "noise_rate"),
    [
        (0, 1, 0.3),
        (1, 0, 0.0),
        (2, 0, 0.3),
        (3, 0, 0.0),
    ],
)
def test_training_samples_of_the_chosen_clients_alone_change(
    client, label_shift, noise_rate, corrupted_data
):
    indices = corrupted_data.client_indices(client)
    original_inputs = X[indices]
    original_labels = Y[indices]

    inputs, labels = load_in_order(corrupted_data, client)

    is_noisy = (inputs != original_inputs).flatten(1).any(1)
    is_other_label = labels != original_labels
    assert int(is_noisy.sum()) == round(noise_rate * len(indices))
    assert torch.equal(labels, (original_labels + label_shift) % 5)
    assert torch.equal(corrupted_data.corrupted_samples(client), is_noisy | is_other_label)
    assert torch.equal(corrupted_data.class_counts[client], torch.bincount(labels, minlength=5))


def test_malicious_clients_are_those_whose_samples_a_corruption_changes(corrupted_data):
    assert corrupted_data.malicious == [0, 2]


@pytest.mark.parametrize("split", ["val", "test"])
def test_evaluation_samples_of_corrupted_clients_do_not_change(split, corrupted_data):
    for client in range(4):
        indices = corrupted_data.client_indices(client, split)
        ((inputs, labels),) = corrupted_data.client_loader(client, split)
        assert torch.equal(inputs, X[indices])
        assert torch.equal(labels, Y[indices])


def test_source_and_the_servers_samples_do_not_change(corrupted_data):
    indices = corrupted_data.server_val_indices
    ((inputs, labels),) = corrupted_data.val_dataloader()
    assert torch.equal(inputs, X[indices])
    assert torch.equal(labels, Y[indices])

    source_inputs, source_labels = corrupted_data.source.tensors
    assert torch.equal(source_inputs, X)
    assert torch.equal(source_labels, Y)


def test_corruption_of_data_that_are_not_tensors_needs_preload():
    with refused("Items reads its samples one by one"):
        make_corrupted_data(Items(zip(X, Y.tolist())), LABELS_AND_INPUTS)


def test_corruption_of_samples_that_do_not_end_with_their_label_is_refused():
    last_parts = torch.zeros(len(X))

    with refused("last part of these samples is not their label"):
        make_corrupted_data(LabelsInAttribute(X, last_parts), [GaussianNoise()], preload=True)


DIGITS = torch.arange(10_000) % 10


def corrupt_digits(corruption):
    """What a corruption makes of labels. It leaves the inputs."""
    x = torch.arange(10_000.0)[:, None]
    corrupted_x, labels = corruption(
        x.clone(), DIGITS.clone(), num_classes=10, generator=make_generator()
    )
    assert torch.equal(corrupted_x, x)
    return labels


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (ClientChoice(clients=[0, 7]), r"no client 7. The clients are 0 \.\. 4"),
        (ClientChoice(fraction=0.05), r"none of 5 clients.* is 0\.1"),
    ],
)
def test_choice_of_a_client_that_does_not_exist_or_of_none_is_refused(choice, message):
    with refused(message):
        choice.chosen(5)


PIXEL_RATE = 0.2


def is_changed_by_noise(zeros):
    """A mask of what noise on a share of all pixels changes."""
    labels = torch.zeros(len(zeros), dtype=torch.long)
    noise = GaussianNoise(pixel_rate=PIXEL_RATE)
    generator = make_generator()
    noisy, _ = noise(zeros.clone(), labels, num_classes=2, generator=generator)
    return noisy != 0


def test_noise_of_a_pixel_rate_is_on_that_share_of_pixels_in_all_channels():
    is_changed = is_changed_by_noise(torch.zeros(500, 3, 12, 12))

    assert torch.equal(is_changed[:, 0], is_changed[:, 1])
    share_changed = is_changed.float().mean().item()
    # 500 * 12 * 12 pixels: a standard error of 0.0015.
    assert share_changed == pytest.approx(PIXEL_RATE, abs=0.008)


def test_noise_of_a_pixel_rate_is_on_that_share_of_the_cells_of_a_table():
    is_changed = is_changed_by_noise(torch.zeros(500, 40))

    share_changed = is_changed.float().mean().item()
    # 500 * 40 cells: a standard error of 0.003.
    assert share_changed == pytest.approx(PIXEL_RATE, abs=0.015)


@pytest.mark.parametrize("to", ["next", "random"])
def test_label_noise_flips_exactly_its_rate_of_the_labels(to):
    labels = corrupt_digits(ClosedSetLabelNoise(rate=0.137, to=to))

    assert int((labels != DIGITS).sum()) == 0.137 * len(DIGITS)


def test_label_noise_at_random_goes_to_every_other_class_equally_often():
    labels = corrupt_digits(ClosedSetLabelNoise(to="random"))

    # The count of each shift is Binomial(10000, 1/9).
    mean = len(DIGITS) / 9
    deviation = (mean * 8 / 9) ** 0.5
    shifts = (labels - DIGITS) % 10
    counts = torch.bincount(shifts, minlength=10)
    assert counts[0] == 0
    assert (counts[1:] - mean).abs().max() < 5 * deviation


@pytest.mark.parametrize(
    ("unknown_classes", "expected"),
    [
        # As the authors' code does it: every even class becomes the odd one after it.
        (EVEN_CLASSES, [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]),
        ([0, 1, 9], [2, 2, 2, 3, 4, 5, 6, 7, 8, 2]),
    ],
)
def test_unknown_classes_get_the_next_known_label(unknown_classes, expected):
    labels = corrupt_digits(OpenSetLabelNoise(unknown_classes))

    assert labels[:10].tolist() == expected


def test_open_set_noise_without_a_known_class_is_refused():
    with refused("at least one is not unknown"):
        corrupt_digits(OpenSetLabelNoise(list(range(10))))


def test_open_set_noise_leaves_only_known_classes_in_evaluation_sets():
    digits = DIGITS[:2000]
    digits_as_inputs = digits[:, None].float()
    train = TensorDataset(digits_as_inputs, digits)
    test = TensorDataset(digits_as_inputs[:100], digits[:100])
    noise = OpenSetLabelNoise(EVEN_CLASSES, fraction=0.4)

    data = set_up_data(
        (train, test), IIDPartitioner(3), corruptions=[noise], client_val=0.1, client_test=0.1
    )

    batches = [*data.val_dataloader(), *data.test_dataloader()]
    for client in range(3):
        batches += data.client_loader(client, "val")
        batches += data.client_loader(client, "test")
    for inputs, labels in batches:
        is_odd = labels % 2 == 1
        assert is_odd.all()
        assert torch.equal(inputs[:, 0].long(), labels)
    assert data.num_classes == 10


def class_sizes(ratio, labels, num_classes):
    parts = LongTail(IIDPartitioner(3), ratio)(labels, num_classes)
    return partition_counts(parts, labels, num_classes).sum(0).numpy()


@pytest.mark.parametrize("ratio", [1, 50])
def test_long_tail_class_sizes_fall_exponentially(ratio):
    labels = torch.arange(10).repeat_interleave(500)

    sizes = class_sizes(ratio, labels, num_classes=10)

    # Cao et al.'s own formula: img_max * imb_factor ** (j / (C - 1)) with imb_factor = 1 / ratio.
    expected = 500 * (1 / ratio) ** (np.arange(10) / 9)
    assert np.abs(sizes - expected).max() <= 0.5


def test_long_tail_of_unequal_classes_is_limited_by_the_scarcest():
    scarcest = 100
    labels = torch.arange(4).repeat_interleave(torch.tensor([1000, scarcest, 900, 800]))

    sizes = class_sizes(ratio=8, labels=labels, num_classes=4)

    # The first of four classes has 8 times as many as the last, so each has half as many as the one before.
    assert sizes.tolist() == [2 * scarcest, scarcest, scarcest / 2, scarcest / 4]


def test_long_tail_partitions_the_remaining_samples_by_its_inner_partitioner():
    labels = torch.arange(10).repeat(500)
    inner_partitioner = DirichletPartitioner(4, alpha=0.3, seed=2)

    parts = LongTail(inner_partitioner, imbalance_ratio=10)(labels, num_classes=10)

    remaining_samples = torch.cat(parts).sort().values
    positions_of_parts = inner_partitioner(labels[remaining_samples], num_classes=10)
    for part, positions in zip(parts, positions_of_parts, strict=True):
        assert torch.equal(part, remaining_samples[positions])
