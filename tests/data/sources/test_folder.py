"""Folders of image files."""

import numpy as np
import pytest
from PIL import Image

from flsv.data.sources.named import folder
from flsv.errors import ConfigurationError


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


def test_validation_folder_is_used_where_there_is_one(tmp_path):
    assert len(folder(make(tmp_path, splits=("train", "test", "val"))).val) == 6


def test_no_test_folder(tmp_path):
    with pytest.raises(ConfigurationError, match="not a folder of images as expected"):
        folder(make(tmp_path, splits=("train",)))


def test_a_class_folder_without_images(tmp_path):
    (make(tmp_path) / "train" / "eel").mkdir()
    with pytest.raises(ConfigurationError, match="eel"):
        folder(tmp_path)


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


def test_what_is_found_broken_only_when_it_is_decoded_is_named_too(tmp_path):
    make(tmp_path)
    jpeg = tmp_path / "train" / "cat" / "1.jpg"
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)).save(jpeg)
    jpeg.write_bytes(jpeg.read_bytes()[:900])
    data = folder(tmp_path, image_size=8)
    with pytest.raises(ConfigurationError, match=r"train/cat/1\.jpg cannot be read as an image: .*truncated"):
        [data.train[i] for i in range(len(data.train))]


@pytest.mark.parametrize(("dtype", "name"), [(np.uint16, "x.png"), (np.int32, "x.tif"), (np.float32, "x.tif")])
def test_images_of_more_than_8_bits_are_refused(tmp_path, dtype, name):
    file = make(tmp_path) / "test" / "cat" / name
    Image.fromarray(np.full((10, 10), 300, dtype)).save(file)
    with pytest.raises(ConfigurationError, match=rf"test/cat/{name} has more than 8 bits per pixel"):
        folder(tmp_path)
