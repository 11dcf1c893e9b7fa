"""MedMNIST-style archives, made here and real."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from flsv.data.sources.named import npz
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


def test_columns_become_attributes_of_the_training_set(tmp_path):
    np.savez(
        tmp_path / "set.npz",
        **arrays(),
        train_hospital=np.array(list("abcabcabcabc")),
        train_about=np.zeros(3),
        train_year=2020,
        train_tensors=np.zeros(12),
    )
    train = npz(tmp_path / "set.npz").train
    assert len(train.tensors) == 2
    assert train.hospital.tolist() == list("abcabcabcabc")
    assert not hasattr(train, "about")


def test_labels_from_one_or_with_gaps_are_refused(tmp_path):
    made = {n: np.array([1, 3, 7])[a] if "labels" in n else a for n, a in arrays().items()}
    np.savez(tmp_path / "set.npz", **made)
    with pytest.raises(ConfigurationError, match=r"the labels are 1, 3, 7, not 0 \.\. 2. Number them anew"):
        npz(tmp_path / "set.npz")


def test_missing_arrays_are_named(tmp_path):
    np.savez(tmp_path / "set.npz", train_images=np.zeros((3, 8, 8)), x=np.zeros(2))
    with pytest.raises(ConfigurationError, match="no array train_labels, test_images, test_labels; it has train_imag"):
        npz(tmp_path / "set.npz")
    made = arrays()
    del made["val_labels"]
    np.savez(tmp_path / "set.npz", **made)
    with pytest.raises(ConfigurationError, match="no array val_labels"):
        npz(tmp_path / "set.npz")


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("train_labels", np.zeros((12, 14)), r"train_labels are float64 \[12, 14\].*multi-label"),
        ("train_labels", np.zeros(7), r"float64 \[7\] for 12 images"),
        ("train_images", np.zeros((12, 8, 8, 5)), r"images are float64 \[8, 8, 5\] and uint8"),
        ("test_images", np.zeros((6, 7, 8), np.uint8), r"uint8 \[7, 8\] and uint8 \[8, 8\] each"),
        ("test_images", np.zeros((6, 8, 8)), r"float64 \[8, 8\] and uint8 \[8, 8\] each"),
        ("test_labels", np.zeros(()), r"test_labels are float64 \[\] for 6 images"),
    ],
)
def test_shapes_that_do_not_fit(tmp_path, name, array, message):
    np.savez(tmp_path / "set.npz", **{**arrays(), name: array})
    with pytest.raises(ConfigurationError, match=message):
        npz(tmp_path / "set.npz")


class Payload:
    """Unpickled, it would leave a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return Path.touch, (self.file,)


def test_pickled_objects_are_not_read(tmp_path):
    labels = np.array([Payload(tmp_path / "executed")] * 12, dtype=object)
    np.savez(tmp_path / "set.npz", **{**arrays(), "train_labels": labels})
    with pytest.raises(ConfigurationError, match="Object arrays cannot be loaded"):
        npz(tmp_path / "set.npz")
    assert not (tmp_path / "executed").exists()


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
