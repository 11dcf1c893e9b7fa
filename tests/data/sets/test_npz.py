"""MedMNIST-style archives, made here and real."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from flsv.data.sets.npz import npz
from flsv.errors import ConfigurationError

ROOT = os.environ.get("FLSV_DATA_ROOT")


def arrays(shape=(8, 8), dtype=np.uint8, splits=("train", "val", "test"), labels=3):
    rng = np.random.default_rng(0)
    made = {}
    for split, length in zip(splits, (12, 5, 6), strict=False):
        made[f"{split}_images"] = rng.integers(0, 256, (length, *shape)).astype(dtype)
        made[f"{split}_labels"] = (np.arange(length) % labels)[:, None].astype(np.uint8)
    return made


@pytest.mark.parametrize(("shape", "expected"), [((8, 9), (1, 8, 9)), ((8, 9, 3), (3, 8, 9)), ((8, 9, 1), (1, 8, 9))])
def test_images_and_labels(tmp_path, shape, expected):
    made = arrays(shape)
    np.savez(tmp_path / "set.npz", **made)
    data = npz(tmp_path / "set.npz")
    assert [len(part) for part in (data.train, data.val, data.test)] == [12, 5, 6]
    image, label = data.train[4]
    assert image.shape == expected
    pixels = made["train_images"][4].reshape(8, 9, -1).transpose(2, 0, 1)
    np.testing.assert_allclose(image.numpy(), pixels / 255 * 2 - 1, atol=1e-6)
    assert label.dtype == torch.int64
    assert int(label) == 1
    assert data.num_classes == 3
    assert data.class_names == ("0", "1", "2")


def test_floating_point_images_are_taken_as_they_are(tmp_path):
    made = arrays(dtype=np.float64)
    np.savez(tmp_path / "set.npz", **made)
    np.testing.assert_allclose(npz(tmp_path / "set.npz").train[2][0][0].numpy(), made["train_images"][2])


def test_no_validation_images(tmp_path):
    np.savez(tmp_path / "set.npz", **arrays(splits=("train", "test")))
    assert npz(tmp_path / "set.npz").val is None


def test_columns_become_attributes_of_the_training_set(tmp_path):
    np.savez(tmp_path / "set.npz", **arrays(), train_hospital=np.array(list("abcabcabcabc")), train_about=np.zeros(3))
    train = npz(tmp_path / "set.npz").train
    assert train.hospital.tolist() == list("abcabcabcabc")
    assert not hasattr(train, "about")


def test_missing_arrays_are_named(tmp_path):
    np.savez(tmp_path / "set.npz", train_images=np.zeros((3, 8, 8)), x=np.zeros(2))
    with pytest.raises(ConfigurationError, match="no array train_labels, test_images, test_labels; it has train_imag"):
        npz(tmp_path / "set.npz")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train_labels", np.zeros((12, 14)), r"train_labels has shape \[12, 14\].*multi-label"),
        ("train_labels", np.zeros(7), r"shape \[7\] for 12 images"),
        ("test_images", np.zeros((6, 8, 8, 5)), r"test_images has shape \[6, 8, 8, 5\]"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path, name, array, message):
    np.savez(tmp_path / "set.npz", **{**arrays(), name: array})
    with pytest.raises(ConfigurationError, match=message):
        npz(tmp_path / "set.npz")


def test_a_file_that_is_no_archive(tmp_path):
    (tmp_path / "set.npz").write_bytes(b"<html>404</html>")
    with pytest.raises(ConfigurationError, match=r"cannot be read as an \.npz archive"):
        npz(tmp_path / "set.npz")


@pytest.mark.skipif(ROOT is None, reason="FLSV_DATA_ROOT is not set: no real image data")
@pytest.mark.parametrize(
    ("name", "sizes", "shape", "classes"),
    [
        ("pneumoniamnist.npz", (4708, 524, 624), (1, 28, 28), 2),
        ("ham10000_28.npz", (7020, 996, 1999), (3, 28, 28), 7),
    ],
)
def test_real_archives(name, sizes, shape, classes):
    path = Path(ROOT, name)
    if not path.is_file():
        pytest.skip(f"FLSV_DATA_ROOT has no {name}")
    data = npz(path)
    assert tuple(len(part) for part in (data.train, data.val, data.test)) == sizes
    assert data.train[0][0].shape == shape
    assert data.num_classes == classes
