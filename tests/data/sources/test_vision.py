"""torchvision's sets, read from real files where they are at hand."""

import os
import struct

import pytest
import torch

from flsv.data.sources.named import KINDS, vision
from flsv.errors import ConfigurationError

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


@pytest.mark.parametrize("name", KINDS)
def test_missing_files_say_how_to_get_them(name, tmp_path):
    with pytest.raises(ConfigurationError, match="download: true") as caught:
        vision(name, str(tmp_path))
    assert str(tmp_path / KINDS[name][1]) in str(caught.value)


def test_failed_download_says_so(tmp_path, monkeypatch):
    def offline(self):
        raise OSError("no route to host")

    monkeypatch.setattr(f"torchvision.datasets.{KINDS['mnist'][0]}.download", offline)
    with pytest.raises(ConfigurationError, match=r"no route to host"):
        vision("mnist", str(tmp_path), download=True)


def write_mnist(root, images=12, labels=12, largest=9):
    """Raw MNIST-style files."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for split in ("train", "t10k"):
        pixels = struct.pack(">iiii", 0x803, images, 28, 28) + bytes(images * 28 * 28)
        (raw / f"{split}-images-idx3-ubyte").write_bytes(pixels)
        classes = bytes(i % largest for i in range(labels - 1)) + bytes([largest])
        (raw / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">ii", 0x801, labels) + classes)
    return raw


def test_files_made_here_are_read(tmp_path):
    write_mnist(tmp_path)
    assert vision("mnist", str(tmp_path)).train.tensors[1].tolist() == [*range(9), 0, 1, 9]


@pytest.mark.parametrize("file", ["train-images-idx3-ubyte", "t10k-images-idx3-ubyte", "train-labels-idx1-ubyte"])
@pytest.mark.parametrize(
    "change",
    [
        lambda content: b"",
        lambda content: b"<html>404 not found</html>",
        lambda content: content[: len(content) // 2],
        lambda content: bytes(1000),
        lambda content: b"\xff" * 1000,
    ],
)
def test_junk_is_not_missing(tmp_path, file, change):
    path = write_mnist(tmp_path) / file
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigurationError, match=r"mnist was not found, or cannot be read: looked in .*MNIST/raw"):
        vision("mnist", str(tmp_path))


def test_a_damaged_cifar(tmp_path):
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "cifar-10-batches-py" / "data_batch_1").write_bytes(b"junk")
    with pytest.raises(ConfigurationError, match="cifar10 was not found, or cannot be read"):
        vision("cifar10", str(tmp_path))
