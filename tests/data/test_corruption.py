"""Noise on inputs and labels: whom it concerns, what it changes, and nothing else."""

import numpy as np
import pytest
import torch
from data_options import grouped
from torch.utils.data import Dataset, Subset, TensorDataset

from flsv.attacks import GradientPoisoning, SignFlip
from flsv.data import (
    ClientChoice,
    ClosedSetLabelNoise,
    Corruption,
    DirichletPartitioner,
    FederatedDataModule,
    GaussianNoise,
    GroupPartitioner,
    IIDPartitioner,
    LongTail,
    OpenSetLabelNoise,
    ShardPartitioner,
    load_image_data,
)
from flsv.data.partition import partition_counts
from flsv.errors import ConfigurationError
from flsv.seeding import generator_for


def test_a_corruption_and_an_attack_of_one_fraction_and_seed_concern_the_same_clients():
    seed = 3
    corruption = ClosedSetLabelNoise(fraction=0.3, seed=seed)
    attack = GradientPoisoning(fraction=0.3, seed=seed)
    other = SignFlip(fraction=0.3, seed=seed)
    assert corruption.chosen(20) == attack.chosen(20) == other.chosen(20) == corruption.chosen(20)
    assert set(corruption.chosen(20)) < set(GaussianNoise(fraction=0.5, seed=seed).chosen(20))


def test_clients_that_do_not_exist_and_a_share_of_nobody():
    with pytest.raises(ConfigurationError, match=r"no client 7; clients are 0 \.\. 4"):
        ClientChoice(clients=[0, 7]).chosen(5)
    with pytest.raises(ConfigurationError, match=r"none of 5 clients.* is 0\.1"):
        ClientChoice(fraction=0.05).chosen(5)


CORRUPTED_DATA_X = torch.randn(300, 2, 3, generator=torch.Generator().manual_seed(0))

CORRUPTED_DATA_Y = torch.arange(300) % 5

BOTH = [ClosedSetLabelNoise(clients=[0]), GaussianNoise(sample_rate=0.3, clients=[0, 2])]


class Samples(Dataset):
    """Not tensors."""

    def __len__(self):
        return len(CORRUPTED_DATA_X)

    def __getitem__(self, index):
        return CORRUPTED_DATA_X[index], int(CORRUPTED_DATA_Y[index])


class Shift(Corruption):
    """Changes in place what it is given."""

    def corrupt(self, x, y, num_classes, generator):
        x += 100
        return x, y


def ready(source=None, corruptions=None, **kwargs):
    kwargs.setdefault("client_val", 0.1)
    kwargs.setdefault("client_test", 0.1)
    source = TensorDataset(CORRUPTED_DATA_X, CORRUPTED_DATA_Y) if source is None else source
    data = FederatedDataModule(source, DirichletPartitioner(4, 1.0, 20), corruptions=corruptions, **grouped(kwargs))
    data.setup("fit")
    return data


def dealt(*args, **kwargs):
    data = FederatedDataModule(*args, **grouped(kwargs))
    data.setup("fit")
    return data


def in_order(data, client):
    """A client's training samples in the order of its indices, as its loader gives them."""
    indices = data.client_indices(client)
    x, y = (torch.cat(column) for column in zip(*data.client_loader(client, generator=generator_for(3))))
    order = torch.randperm(len(indices), generator=generator_for(3))
    return x[order.argsort()], y[order.argsort()]


def test_only_the_chosen_clients_training_samples_change():
    own = CORRUPTED_DATA_X.clone(), CORRUPTED_DATA_Y.clone()
    data = ready(TensorDataset(*own), BOTH)
    assert torch.equal(own[0], CORRUPTED_DATA_X)
    assert torch.equal(own[1], CORRUPTED_DATA_Y)
    for client in range(4):
        indices = data.client_indices(client)
        x, y = in_order(data, client)
        noisy = (x != CORRUPTED_DATA_X[indices]).flatten(1).any(1)
        assert torch.equal(y, (CORRUPTED_DATA_Y[indices] + 1) % 5 if client == 0 else CORRUPTED_DATA_Y[indices])
        assert int(noisy.sum()) == (int(0.3 * len(indices) + 0.5) if client in (0, 2) else 0)
        assert torch.equal(data.corrupted_samples(client), noisy | (y != CORRUPTED_DATA_Y[indices]))
        assert torch.equal(data.class_counts[client], torch.bincount(y, minlength=5))
        for split in ("val", "test"):
            held = data.client_indices(client, split)
            for got, true in zip(
                next(iter(data.client_loader(client, split))), (CORRUPTED_DATA_X[held], CORRUPTED_DATA_Y[held])
            ):
                assert torch.equal(got, true)
    assert data.malicious == [0, 2]
    for got, true in zip(next(iter(data.val_dataloader())), (CORRUPTED_DATA_X, CORRUPTED_DATA_Y)):
        assert torch.equal(got, true[data.server_val_indices])
    assert data.class_counts.sum() == sum(len(data.client_indices(client)) for client in range(4))


def test_preloaded_data_and_data_that_are_not_tensors():
    data = ready(Samples(), BOTH, preload=True)
    plain = ready(corruptions=BOTH)
    for client in range(4):
        for got, expected in zip(in_order(data, client), in_order(plain, client)):
            assert torch.equal(got, expected)
    with pytest.raises(ConfigurationError, match="Samples has none: say preload: true"):
        ready(Samples(), BOTH)


def test_a_subset_in_any_order_and_more_fields():
    order = torch.randperm(300, generator=torch.Generator().manual_seed(1))[:200]
    number = torch.arange(300)
    data = ready(
        Subset(TensorDataset(CORRUPTED_DATA_X, number, CORRUPTED_DATA_Y), order.tolist()), [Shift(clients=[0]), *BOTH]
    )
    for client in range(4):
        indices = order[data.client_indices(client)]
        loader = data.client_loader(client, generator=generator_for(3))
        x, numbers, y = (torch.cat(column) for column in zip(*loader))
        assert sorted(numbers.tolist()) == sorted(indices.tolist())
        assert torch.equal(y, (CORRUPTED_DATA_Y[numbers] + 1) % 5 if client == 0 else CORRUPTED_DATA_Y[numbers])
        changed = (x != CORRUPTED_DATA_X[numbers]).flatten(1).any(1)
        assert (changed.all() if client == 0 else changed.any() == (client == 2)).item()


def test_wrong_corruptions():
    with pytest.raises(ConfigurationError, match="expected a list of flsv.data.Corruption"):
        FederatedDataModule("digits", corruptions=["noise"])
    with pytest.raises(ConfigurationError, match="no client 4"):
        ready(corruptions=[GaussianNoise(clients=[4])])
    with pytest.raises(ConfigurationError, match="last element is not their label"):
        ready(Labeled(CORRUPTED_DATA_X, torch.zeros(300)), [GaussianNoise()], preload=True)


class Labeled(TensorDataset):
    """Labels in an attribute, something else in the samples."""

    targets = CORRUPTED_DATA_Y


NOISE_X = torch.randn(500, 3, 12, 12, generator=torch.Generator().manual_seed(1))

NOISE_Y = torch.zeros(500, dtype=torch.long)


def added(corruption, x=NOISE_X, seed=0):
    noisy, y = corruption(x.clone(), NOISE_Y[: len(x)].clone(), 2, torch.Generator().manual_seed(seed))
    assert torch.equal(y, NOISE_Y[: len(x)])
    assert noisy.dtype == x.dtype
    return noisy - x


def test_shapleyfls_noise_is_standard_normal():
    noise = added(GaussianNoise()).double()
    # 216,000 draws: the mean has a standard error of 0.0022, the variance one of 0.003, the kurtosis one of 0.01.
    assert abs(noise.mean()) < 0.01
    assert abs(noise.var() - 1) < 0.015
    assert abs((noise**4).mean() - 3) < 0.06
    assert abs(torch.corrcoef(noise.flatten(1)[:, :2].T)[0, 1]) < 0.2


def test_a_share_of_the_samples():
    touched = (added(GaussianNoise(sample_rate=0.15)) != 0).flatten(1).any(1)
    assert int(touched.sum()) == 75
    assert torch.equal(touched, (added(GaussianNoise(sample_rate=0.15)) != 0).flatten(1).all(1))


def test_a_share_of_the_pixels_in_all_channels():
    touched = added(GaussianNoise(pixel_rate=0.2)) != 0
    assert torch.equal(touched[:, 0], touched[:, 1])
    # 72,000 pixels: a standard error of 0.0015.
    assert touched.float().mean().item() == pytest.approx(0.2, abs=0.008)
    table = added(GaussianNoise(pixel_rate=0.2), torch.zeros(500, 40)) != 0
    assert table.float().mean().item() == pytest.approx(0.2, abs=0.02)


LABEL_NOISE_Y = torch.arange(10_000) % 10

LABEL_NOISE_X = torch.arange(10_000.0)[:, None]


def noisy(corruption, y=LABEL_NOISE_Y, num_classes=10, seed=0):
    x, new = corruption(LABEL_NOISE_X[: len(y)].clone(), y.clone(), num_classes, torch.Generator().manual_seed(seed))
    assert torch.equal(x, LABEL_NOISE_X[: len(y)])
    return new


def test_a_rate_flips_exactly_so_many_and_no_other():
    for to in ("next", "random"):
        new = noisy(ClosedSetLabelNoise(rate=0.137, to=to))
        assert int((new != LABEL_NOISE_Y).sum()) == 1370
    assert torch.equal(noisy(ClosedSetLabelNoise(rate=0.0)), LABEL_NOISE_Y)
    assert set((new - LABEL_NOISE_Y)[new != LABEL_NOISE_Y].remainder(10).tolist()) == set(range(1, 10))


def test_random_flips_reach_every_other_class_equally():
    shift = (noisy(ClosedSetLabelNoise(to="random")) - LABEL_NOISE_Y) % 10
    counts = np.bincount(shift, minlength=10)
    assert counts[0] == 0
    # Binomial(10000, 1/9): mean 1111, standard deviation 31.4.
    assert np.abs(counts[1:] - 10_000 / 9).max() < 5 * 31.4


LABELS = torch.arange(10).repeat_interleave(500)[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]


def class_sizes(ratio, labels=LABELS, num_classes=10, **arguments):
    parts = LongTail(IIDPartitioner(3), ratio, **arguments)(labels, num_classes)
    return partition_counts(parts, labels, num_classes).sum(0).numpy()


@pytest.mark.parametrize("ratio", [1, 10, 50, 100])
def test_sizes_fall_off_exponentially(ratio):
    # Cao et al.'s own formula: img_max * imb_factor ** (j / (C - 1)) with imb_factor = 1 / ratio.
    expected = 500 * (1 / ratio) ** (np.arange(10) / 9)
    assert np.abs(class_sizes(ratio) - expected).max() <= 0.5
    assert class_sizes(ratio)[0] / class_sizes(ratio)[-1] == pytest.approx(ratio, rel=0.1)


def test_unequal_classes_still_get_the_exact_ratio():
    labels = torch.arange(4).repeat_interleave(torch.tensor([1000, 100, 900, 800]))
    sizes = class_sizes(8, labels, 4)
    assert sizes.tolist() == [200, 100, 50, 25]
    assert class_sizes(1, labels, 4).tolist() == [100] * 4


def test_the_inner_partitioner_deals_what_is_left():
    inner = DirichletPartitioner(4, alpha=0.3, seed=2)
    parts = LongTail(inner, 10)(LABELS, 10)
    kept = torch.cat(parts).sort().values
    expected = [kept[part] for part in inner(LABELS[kept], 10)]
    assert all(torch.equal(part, other) for part, other in zip(parts, expected))
    groups = torch.arange(5000) % 3
    by_group = LongTail(GroupPartitioner(), 10)(LABELS, 10, groups)
    assert [groups[part].unique().tolist() for part in by_group] == [[0], [1], [2]]


# Open-set label noise: half of the images come from classes that the task does not know, where they should

EVEN = [0, 2, 4, 6, 8]
OPEN_Y = torch.arange(2000) % 10
OPEN_X = OPEN_Y[:, None].float() + torch.zeros(1, 3)


def relabeled(corruption, num_classes=10):
    x, y = corruption(OPEN_X.clone(), OPEN_Y.clone(), num_classes, torch.Generator().manual_seed(0))
    assert torch.equal(x, OPEN_X)
    return y


def test_unknown_classes_get_the_next_known_label():
    # As the authors' code does it: every even class becomes the odd one after it.
    assert torch.equal(relabeled(OpenSetLabelNoise(EVEN)), OPEN_Y + (OPEN_Y % 2 == 0))
    assert relabeled(OpenSetLabelNoise([0, 1, 9]))[:10].tolist() == [2, 2, 2, 3, 4, 5, 6, 7, 8, 2]


def test_random_labels_are_known_ones_equally_often():
    y = relabeled(OpenSetLabelNoise(EVEN, to="random"))
    assert torch.equal(y[OPEN_Y % 2 == 1], OPEN_Y[OPEN_Y % 2 == 1])
    counts = torch.bincount(y[OPEN_Y % 2 == 0], minlength=10)
    assert counts[EVEN].sum() == 0
    # Binomial(1000, 0.2): a standard deviation is 12.6.
    assert (counts[1::2] - 200).abs().max() < 5 * 12.6


def test_half_of_the_images_come_from_unknown_classes():
    data = dealt("digits", ShardPartitioner(10), corruptions=[OpenSetLabelNoise(EVEN)], client_test=0.2)
    mislabeled = torch.cat([data.corrupted_samples(client) for client in range(10)])
    assert mislabeled.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert data.class_counts[:, EVEN].sum() == 0
    labels = load_image_data("digits").train.tensors[1]
    for client in range(10):
        true = labels[data.client_indices(client)]
        assert torch.equal(data.corrupted_samples(client), true % 2 == 0)


def test_what_is_evaluated_on_is_known_classes_only():
    sets = (TensorDataset(OPEN_X, OPEN_Y), TensorDataset(OPEN_X[:100], OPEN_Y[:100]))
    data = dealt(
        sets,
        IIDPartitioner(3),
        corruptions=[OpenSetLabelNoise(EVEN, fraction=0.4)],
        client_val=0.1,
        client_test=0.1,
    )
    loaders = [data.val_dataloader(), data.test_dataloader()]
    loaders += [data.client_loader(client, split) for client in range(3) for split in ("val", "test")]
    for loader in loaders:
        for x, y in loader:
            assert (y % 2 == 1).all()
            assert torch.equal(x[:, 0].long(), y)
    assert data.num_classes == 10
