"""Folders of image files."""

import numpy as np
import pytest
from PIL import Image

from flsv.data.sets.folder import folder
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
