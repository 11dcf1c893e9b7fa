"""A folder of image files: ``train/<class>/*.png``, ``test/<class>/*.png`` and perhaps ``val/<class>/*.png``; or
``<class>/*.png`` alone."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from torchvision import transforms
from torchvision.datasets import ImageFolder

from flsv.data.sets.base import ImageData
from flsv.data.sets.layout import folder_layout
from flsv.errors import ConfigurationError


def folder(path: Path, image_size: int = 224) -> ImageData:
    """Image files sorted into class folders, read when they are needed.

    Every file's header is read here, and the checksums of those that have some (PNG); what is found broken only when it
    is decoded is an error then, which names the file.

    Args:
        path: the folder with ``train`` and ``test`` and, optionally, ``val``; or with a folder for each class, all of
            whose images are for training then.
        image_size: images are resized to a square of this many pixels; values lie in 0 .. 1.

    Raises:
        ConfigurationError: a missing or empty subfolder, splits whose classes differ, files that are no images, or
            images of more than 8 bits per channel.
    """
    layout = folder_layout(path)
    if layout.kind == "clients":
        raise ConfigurationError(
            f"{path} has data by client ({', '.join(list(layout.clients)[:5])}, ...): it is a source of a "
            "FederatedDataModule."
        )
    if layout.kind == "classes":
        whole = image_folder(path, image_size)
        return ImageData(whole, None, None, len(whole.classes), tuple(whole.classes))
    transform = _as_tensor(image_size)
    sets = {}
    for split in ("train", "test", "val"):
        if split == "val" and not (path / split).is_dir():
            continue
        try:
            sets[split] = ImageFolder(str(path / split), transform=transform, loader=read_image)
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
    for images in sets.values():
        for file, _ in images.samples:
            check_image(file)
    return ImageData(sets["train"], sets["test"], sets.get("val"), len(classes), tuple(classes))


def image_folder(path: Path, image_size: int = 224) -> ImageFolder:
    """The images of ``<class>/*.png`` alone; a class folder without one is a class, of which there is nothing here.

    Raises:
        ConfigurationError: files that are no images, or images of more than 8 bits per channel.
    """
    images = ImageFolder(str(path), transform=_as_tensor(image_size), loader=read_image, allow_empty=True)
    for file, _ in images.samples:
        check_image(file)
    return images


def _as_tensor(image_size: int) -> transforms.Compose:
    return transforms.Compose([transforms.Resize((image_size, image_size)), transforms.ToTensor()])


def read_image(path: str) -> Image.Image:
    """The image in RGB.

    Raises:
        ConfigurationError: it cannot be decoded.
    """
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except Exception as error:  # Pillow raises whatever its decoders do
        raise ConfigurationError(f"{path} cannot be read as an image: {error}. Repair or remove it.") from error


def check_image(path: str) -> None:
    """Raise ConfigurationError for what is no image or no 8-bit one, as far as can be told without decoding it."""
    try:
        with Image.open(path) as image:
            mode = image.mode
            image.verify()
    except Exception as error:
        raise ConfigurationError(f"{path} cannot be read as an image: {error}. Repair or remove it.") from error
    if mode.startswith(("I", "F")):
        # Pillow would cut every pixel at 255.
        raise ConfigurationError(
            f"{path} has more than 8 bits per pixel (Pillow's mode {mode}), whose scale is unknown. Save it with 8."
        )
