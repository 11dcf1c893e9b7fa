"""Folders of images: what lies in a folder, and its image files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from flsv.data.sources.base import ImageData
from flsv.data.sources.table import is_table_file
from flsv.errors import ConfigurationError, listed

if TYPE_CHECKING:
    from torchvision.datasets import ImageFolder


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
    clients = folder_by_client(path)
    if clients:
        raise ConfigurationError(
            f"{path} has data by client ({listed(clients)}): it is a source of a FederatedDataModule."
        )
    if not (path / "train").is_dir():
        whole = image_folder(path, image_size)
        return ImageData(whole, None, None, len(whole.classes), tuple(whole.classes))
    splits = [split for split in ("train", "test", "val") if split != "val" or (path / split).is_dir()]
    try:
        sets = {split: image_folder(path / split, image_size, allow_empty=False) for split in splits}
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"{path} is not a folder of images as expected: train/<class>/*.png (or .jpg ...) and test/<class>/*.png, "
            f"optionally val/<class>/*.png. {error}"
        ) from error
    classes = sets["train"].classes
    for split, images in sets.items():
        # ImageFolder numbers a split's classes by itself: with a class missing, every later one would be another.
        if images.classes != classes:
            raise ConfigurationError(
                f"{path}: {split} has the classes {images.classes}, train has {classes}. They must be the same."
            )
    return ImageData(sets["train"], sets["test"], sets.get("val"), len(classes), tuple(classes))


def image_folder(path: Path, image_size: int = 224, allow_empty: bool = True) -> ImageFolder:
    """The images of ``<class>/*.png`` alone; a class folder without one is a class, of which there is nothing here.

    Raises:
        ConfigurationError: files that are no images, or images of more than 8 bits per channel.
    """
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    transform = transforms.Compose([transforms.Resize((image_size, image_size)), transforms.ToTensor()])
    images = ImageFolder(str(path), transform=transform, loader=read_image, allow_empty=allow_empty)
    for file, _ in images.samples:
        with opened(file) as image:
            image.verify()
    return images


@contextmanager
def opened(path: str) -> Iterator[Image.Image]:
    """An image file.

    Raises:
        ConfigurationError: it cannot be decoded, or has more than 8 bits per channel.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):  # Pillow would cut every pixel at 255
                raise ConfigurationError(
                    f"{path} has more than 8 bits per pixel (Pillow's mode {image.mode}), whose scale is unknown. Save "
                    "it with 8."
                )
            yield image
    except ConfigurationError:
        raise
    except Exception as error:  # Pillow raises whatever its decoders do
        raise ConfigurationError(f"{path} cannot be read as an image: {error}. Repair or remove it.") from error


def read_image(path: str) -> Image.Image:
    """The image in RGB; see :func:`opened`."""
    with opened(path) as image:
        return image.convert("RGB")


def has_class_folders(path: Path) -> bool:
    """Whether a folder has images in folders by class, some of which may be empty, and no other folders."""
    folders = [entry for entry in _entries(path) if entry.is_dir()]
    with_images = [each for each in folders if any(map(_is_image, _entries(each)))]
    return bool(with_images) and all(each in with_images or not _entries(each) for each in folders)


def folder_by_client(path: Path, is_table: Callable[[Path], bool] = is_table_file) -> dict[str, Path]:
    """What lies in a folder by client: a folder of class folders, a folder with a table, or a table; ``val`` and
    ``test`` among them. Hidden files and folders do not count, nor do files of other kinds.

    Args:
        path: of the folder.
        is_table: whether a file, or a folder as a whole, holds one participant's samples.

    Returns:
        Nothing of images by class, or by split and class.

    Raises:
        ConfigurationError: nothing of what can be read, or several kinds of it.
    """
    folders = {entry.name: entry for entry in _entries(path) if entry.is_dir()}
    tables = {entry.stem: entry for entry in _entries(path) if entry.is_file() and is_table(entry)}
    if "train" in folders or (not tables and has_class_folders(path)):
        return {}
    with_images = [name for name, entry in folders.items() if any(map(_is_image, _entries(entry)))]
    if bool(tables) == bool(folders) or with_images:
        kinds = {"files": tables, "folders of images": with_images, "folders": folders}
        held = " and ".join(f"{kind} ({listed(names)})" for kind, names in kinds.items() if names)
        raise ConfigurationError(
            f"{path} has {held or 'no folders and no tables'}, of which no federation can be made. What can be read: "
            "images as train/<class>/*.png and test/<class>/*.png, optionally val/<class>/*.png; as <class>/*.png "
            "alone; or by client, <client>/<class>/*.png; tables by client, <client>.csv or one file in each "
            "<client>/. Beside the clients, val and test are the server's."
        )
    return tables or folders


def _is_image(path: Path) -> bool:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    return path.suffix.lower() in IMG_EXTENSIONS and path.is_file()


def _entries(folder: Path) -> list[Path]:
    shown = (entry for entry in folder.iterdir() if not entry.name.startswith((".", "__MACOSX")))
    return sorted(shown, key=lambda entry: natural_key(entry.name))


def natural_key(name: str) -> tuple[list[str | int], str]:
    """To sort names by: clinic 2 comes before clinic 10.

    Example:
        >>> sorted(["clinic 10", "Annex", "clinic 2"], key=natural_key)
        ['Annex', 'clinic 2', 'clinic 10']
    """
    parts = re.split(r"(\d+)", name)
    return [int(part) if place % 2 else part.casefold() for place, part in enumerate(parts)], name
