"""Data sets by name: digits, Gaussians, folders of images, and names that are none."""

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from flsv.data.sources.named import CENTRES, SPREAD, digits, folder, gaussians
from flsv.errors import ConfigurationError


def test_train_and_test_are_all_images_once():
    data = digits()
    images = torch.cat([data.train.tensors[0], data.test.tensors[0]])
    labels = torch.cat([data.train.tensors[1], data.test.tensors[1]])
    pixels, classes = load_digits(return_X_y=True)
    ours = sorted(map(tuple, np.column_stack([images.flatten(1).numpy() * 16, labels]).tolist()))
    assert ours == sorted(map(tuple, np.column_stack([pixels, classes]).tolist()))
    assert images.min() == 0
    assert images.max() == 1
    assert images.dtype == torch.float32


def test_points_lie_around_their_centres_and_features_are_theirs():
    data = gaussians()
    features, labels = data.train.tensors
    x, y = features[:, 0], features[:, 1]
    torch.testing.assert_close(features[:, 2:], torch.stack([x * x, y * y, x * y], dim=1))
    assert torch.bincount(labels).tolist() == [1000] * 4
    for label, center in enumerate(CENTRES):
        points = features[labels == label, :2]
        torch.testing.assert_close(points.mean(0), torch.tensor(center), atol=0.1, rtol=0)
        torch.testing.assert_close(points.std(0), torch.full((2,), SPREAD), atol=0.06, rtol=0)


def make(root, splits=("train", "test"), classes=("cat", "dog"), side=10):
    for split in splits:
        for number, name in enumerate(classes):
            (root / split / name).mkdir(parents=True)
            for index in range(3):
                pixels = np.full((side, side + 4, 3), 40 * number, np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{index}.png")
    return root


def test_images_are_resized_and_scaled(tmp_path):
    data = folder(make(tmp_path), image_size=8)
    image, label = data.train[5]
    assert image.shape == (3, 8, 8)
    assert image.flatten().tolist() == pytest.approx([40 / 255] * 192)
    assert label == 1
    assert data.class_names == ("cat", "dog")
    assert (len(data.train), len(data.test), data.val) == (6, 6, None)


def test_classes_must_agree_between_splits(tmp_path):
    make(tmp_path, splits=("train",))
    make(tmp_path, splits=("test",), classes=("dog",))
    with pytest.raises(ConfigurationError, match=r"test has the classes \['dog'\], train has \['cat', 'dog'\]"):
        folder(tmp_path)


def corrupt(file):
    """A PNG with one byte of its pixels changed."""
    content = bytearray(file.read_bytes())
    content[content.index(b"IDAT") + 8] ^= 0xFF
    return bytes(content)


@pytest.mark.parametrize("split", ["train", "test", "val"])
@pytest.mark.parametrize(
    "change", [corrupt, lambda file: b"", lambda file: b"<html>404</html>", lambda file: file.read_bytes()[:45]]
)
def test_a_file_that_is_no_image_is_named(tmp_path, split, change):
    file = make(tmp_path, splits=("train", "test", "val")) / split / "dog" / "1.png"
    file.write_bytes(change(file))
    with pytest.raises(ConfigurationError, match=rf"{split}/dog/1\.png cannot be read as an image"):
        folder(tmp_path)


@pytest.mark.parametrize(("dtype", "name"), [(np.uint16, "x.png"), (np.int32, "x.tif"), (np.float32, "x.tif")])
def test_images_of_more_than_8_bits_are_refused(tmp_path, dtype, name):
    file = make(tmp_path) / "test" / "cat" / name
    Image.fromarray(np.full((10, 10), 300, dtype)).save(file)
    with pytest.raises(ConfigurationError, match=rf"test/cat/{name} has more than 8 bits per pixel"):
        folder(tmp_path)
