"""A folder of image files: ``train/<class>/*.png``, ``test/<class>/*.png`` and perhaps ``val/<class>/*.png``."""

from __future__ import annotations

from pathlib import Path

from torchvision import transforms
from torchvision.datasets import ImageFolder

from flsv.data.sets.base import ImageData
from flsv.errors import ConfigurationError


def folder(path: Path, image_size: int = 224) -> ImageData:
    """Image files sorted into class folders, read when they are needed.

    Args:
        path: the folder with ``train`` and ``test`` and, optionally, ``val``.
        image_size: images are resized to a square of this many pixels; values lie in 0 .. 1.

    Raises:
        ConfigurationError: a missing or empty subfolder, or splits whose classes differ.
    """
    transform = transforms.Compose([transforms.Resize((image_size, image_size)), transforms.ToTensor()])
    sets = {}
    for split in ("train", "test", "val"):
        if split == "val" and not (path / split).is_dir():
            continue
        try:
            sets[split] = ImageFolder(str(path / split), transform=transform)
        except FileNotFoundError as error:
            raise ConfigurationError(
                f"{path} is not a folder of images as expected: train/<class>/*.png (or .jpg ...) and "
                f"test/<class>/*.png, optionally val/<class>/*.png. {error}"
            ) from error
    classes = sets["train"].classes
    for split, images in sets.items():
        # ImageFolder numbers a split's classes by itself: with a class missing, every later one would be another.
        if images.classes != classes:
            raise ConfigurationError(
                f"{path}: {split} has the classes {images.classes}, train has {classes}. They must be the same."
            )
    return ImageData(sets["train"], sets["test"], sets.get("val"), len(classes), tuple(classes))
