"""torchvision's sets, read from real files where they are at hand."""

import os

import pytest
import torch

from flsv.data.sets.vision import KINDS, vision
from flsv.errors import ConfigurationError

ROOT = os.environ.get("FLSV_DATA_ROOT")
needs_data = pytest.mark.skipif(ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data")


@needs_data
@pytest.mark.parametrize(
    ("name", "train", "test", "shape"),
    [
        ("mnist", 60000, 10000, (1, 28, 28)),
        ("fashion_mnist", 60000, 10000, (1, 28, 28)),
        ("cifar10", 50000, 10000, (3, 32, 32)),
    ],
)
def test_real_images_are_complete_and_normalised(name, train, test, shape):
    if not os.path.isdir(os.path.join(ROOT, KINDS[name].folder)):
        pytest.skip(f"FLSV_DATA_ROOT has no {KINDS[name].folder}")
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


@pytest.mark.parametrize("name", KINDS)
def test_missing_files_say_how_to_get_them(name, tmp_path):
    with pytest.raises(ConfigurationError, match="download: true") as caught:
        vision(name, str(tmp_path))
    assert str(tmp_path / KINDS[name].folder) in str(caught.value)


def test_failed_download_says_so(tmp_path, monkeypatch):
    def offline(self):
        raise OSError("no route to host")

    monkeypatch.setattr(KINDS["mnist"].cls, "download", offline)
    with pytest.raises(ConfigurationError, match=r"download failed \(no route to host\)"):
        vision("mnist", str(tmp_path), download=True)
