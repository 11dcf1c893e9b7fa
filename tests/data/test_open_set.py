"""Open-set label noise: half of the images come from classes that the task does not know, where they should."""

import pytest
import torch
from data_options import grouped
from torch.utils.data import TensorDataset

from flsv.data import FederatedDataModule, IIDPartitioner, OpenSetLabelNoise, ShardPartitioner, load_image_data

EVEN = [0, 2, 4, 6, 8]
Y = torch.arange(2000) % 10
X = Y[:, None].float() + torch.zeros(1, 3)


def relabeled(corruption, num_classes=10):
    x, y = corruption(X.clone(), Y.clone(), num_classes, torch.Generator().manual_seed(0))
    assert torch.equal(x, X)
    return y


def ready(*args, **kwargs):
    data = FederatedDataModule(*args, **grouped(kwargs))
    data.setup("fit")
    return data


def test_unknown_classes_get_the_next_known_label():
    # As the authors' code does it: every even class becomes the odd one after it.
    assert torch.equal(relabeled(OpenSetLabelNoise(EVEN)), Y + (Y % 2 == 0))
    assert relabeled(OpenSetLabelNoise([0, 1, 9]))[:10].tolist() == [2, 2, 2, 3, 4, 5, 6, 7, 8, 2]


def test_random_labels_are_known_ones_equally_often():
    y = relabeled(OpenSetLabelNoise(EVEN, to="random"))
    assert torch.equal(y[Y % 2 == 1], Y[Y % 2 == 1])
    counts = torch.bincount(y[Y % 2 == 0], minlength=10)
    assert counts[EVEN].sum() == 0
    # Binomial(1000, 0.2): a standard deviation is 12.6.
    assert (counts[1::2] - 200).abs().max() < 5 * 12.6


def test_half_of_the_images_come_from_unknown_classes():
    data = ready("digits", ShardPartitioner(10), corruptions=[OpenSetLabelNoise(EVEN)], client_test=0.2)
    mislabeled = torch.cat([data.corrupted_samples(client) for client in range(10)])
    assert mislabeled.float().mean().item() == pytest.approx(0.5, abs=0.02)
    assert data.class_counts[:, EVEN].sum() == 0
    labels = load_image_data("digits").train.tensors[1]
    for client in range(10):
        true = labels[data.client_indices(client)]
        assert torch.equal(data.corrupted_samples(client), true % 2 == 0)
    # With two shards of sorted labels a client is irrelevant, half irrelevant or not at all.
    shares = {round(float(data.corrupted_samples(client).float().mean()), 1) for client in range(10)}
    assert {0.0, 1.0} <= shares


def test_what_is_evaluated_on_is_known_classes_only():
    sets = (TensorDataset(X, Y), TensorDataset(X[:100], Y[:100]))
    data = ready(
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
