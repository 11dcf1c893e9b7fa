"""torchvision's sets, read from real files where they are at hand."""

import os

import pytest
import torch

from flsv.data.sources.named import KINDS, vision

ROOT = os.environ.get("FLSV_DATA_ROOT")
needs_data = pytest.mark.skipif(ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data")


@needs_data
@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [
        pytest.param("mnist", 60000, 10000, (1, 28, 28), marks=pytest.mark.slow),
        ("fashion_mnist", 60000, 10000, (1, 28, 28)),
        pytest.param("cifar10", 50000, 10000, (3, 32, 32), marks=pytest.mark.slow),
    ],
)
def test_real_images_are_complete_and_normalized(name, train, test, shape):
    if not os.path.isdir(os.path.join(ROOT, KINDS[name][1])):
        pytest.skip(f"FLSV_DATA_ROOT has no {KINDS[name][1]}")
    data = vision(name, ROOT)
    images, labels = data.train.tensors
    assert images.shape == (train, *shape)
    assert data.test.tensors[0].shape == (test, *shape)
    assert images.dtype == torch.float32
    assert torch.bincount(labels).min() >= 5000
    assert data.num_classes == len(data.class_names) == 10
    # The constants are those of the training pixels if these now have mean 0 and deviation 1.
    assert images.mean((0, 2, 3)).abs().max() < 1e-3
    assert (images.std((0, 2, 3)) - 1).abs().max() < 2e-3
