"""Folders of images: what lies in a folder, and its image files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    layout = folder_layout(path)
    if layout.kind == "clients":
        raise ConfigurationError(
            f"{path} has data by client ({', '.join(list(layout.clients)[:5])}, ...): it is a source of a "
            "FederatedDataModule."
        )
    if layout.kind == "classes":
        whole = image_folder(path, image_size)
        return ImageData(whole, None, None, len(whole.classes), tuple(whole.classes))
    sets = {}
    for split in ("train", "test", "val"):
        if split == "val" and not (path / split).is_dir():
            continue
        try:
            sets[split] = image_folder(path / split, image_size, allow_empty=False)
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
        check_image(file)
    return images


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
    """Raise ConfigurationError for files that are no 8-bit images, as far as this shows without decoding."""
    try:
        with Image.open(path) as image:
            mode = image.mode
            image.verify()
    except Exception as error:
        raise ConfigurationError(f"{path} cannot be read as an image: {error}. Repair or remove it.") from error
    if mode.startswith(("I", "F")):  # Pillow would cut every pixel at 255
        raise ConfigurationError(
            f"{path} has more than 8 bits per pixel (Pillow's mode {mode}), whose scale is unknown. Save it with 8."
        )


#: Beside the clients, these are nobody's: what the server validates and tests with.
HELD_OUT = ("val", "test")
CAN_BE_READ = (
    "What can be read: images as train/<class>/*.png and test/<class>/*.png, optionally val/<class>/*.png; as "
    "<class>/*.png alone; or by client, <client>/<class>/*.png; tables by client, <client>.csv or one CSV file in each "
    "<client>/. Beside the clients, val and test are the server's."
)


@dataclass(frozen=True)
class Layout:
    """The structure of a folder.

    Args:
        kind: ``"splits"`` or ``"classes"`` of images; ``"clients"``, each with images or a table.
        clients: by name, a folder of class folders or a table; empty unless ``kind`` is ``"clients"``.
        held_out: the same for ``val`` and ``test``.
    """

    kind: Literal["splits", "classes", "clients"]
    clients: dict[str, Path]
    held_out: dict[str, Path]


def folder_layout(path: Path, is_table: Callable[[Path], bool] = is_table_file) -> Layout:
    """Look at a folder, two levels deep.

    Hidden files and folders do not count, nor do files of other kinds.

    Args:
        path: of the folder.
        is_table: whether a file, or a folder as a whole, holds one participant's samples.

    Raises:
        ConfigurationError: nothing of what can be read, or several kinds of it.
    """
    folders = {entry.name: entry for entry in _entries(path) if entry.is_dir()}
    tables = {entry.stem: entry for entry in _entries(path) if entry.is_file() and is_table(entry)}
    if "train" in folders:
        return Layout("splits", {}, {})
    kinds = {name: "table" if is_table(folder) else _kind(folder, is_table) for name, folder in folders.items()}
    if tables and not any(kinds.values()):
        return _of_clients(tables)
    if tables or not kinds:
        both = f"CSV files ({listed(tables)}) and folders ({listed(folders)})"
        raise ConfigurationError(f"{path} has {both if tables else 'no folders and no CSV files'}. {CAN_BE_READ}")
    if set(kinds.values()) == {"class"}:
        return Layout("classes", {}, {})
    _check_alike(path, kinds)
    rows = {
        name: folders[name] if is_table(folders[name]) else next(filter(is_table, _entries(folders[name])))
        for name, kind in kinds.items()
        if kind == "table"
    }
    return _of_clients(folders | rows)


def _of_clients(found: Mapping[str, Path]) -> Layout:
    held_out = {name: each for name, each in found.items() if name in HELD_OUT}
    return Layout("clients", {name: each for name, each in found.items() if name not in HELD_OUT}, held_out)


def _check_alike(path: Path, kinds: Mapping[str, str]) -> None:
    """Check that all clients' folders, and those of the server, hold the same kind of data.

    Raises:
        ConfigurationError: what each of them holds.
    """
    which = {kind for name, kind in kinds.items() if name not in HELD_OUT} or {""}
    if len(which) > 1 or which & {"", "class"} or set(kinds.values()) != which:
        told = "; ".join(f"{name} {_TOLD[kind]}" for name, kind in list(kinds.items())[:6])
        raise ConfigurationError(
            f"{path} has folders of which no federation can be made: {told}{'; ...' if len(kinds) > 6 else ''}. "
            f"{CAN_BE_READ}"
        )


def has_class_folders(path: Path) -> bool:
    """Whether a folder has images in folders by class, some of which may be empty, and no other folders."""
    folders = [entry for entry in _entries(path) if entry.is_dir()]
    kinds = ["class" if not _entries(folder) else _kind(folder) for folder in folders]
    return set(kinds) == {"class"} and any(map(_entries, folders))


_TOLD = {
    "class": "has images",
    "classes": "has folders of images",
    "table": "has a CSV file",
    "": "has neither images, nor folders of images, nor a single CSV file",
}


def _kind(folder: Path, is_table: Callable[[Path], bool] = is_table_file) -> str:
    from torchvision.datasets.folder import IMG_EXTENSIONS

    entries = _entries(folder)
    # A folder may have very many images.
    tables = [entry for entry in entries if entry.suffix.lower() not in IMG_EXTENSIONS and is_table(entry)]
    images = any(map(_is_image, entries))
    below = any(_is_image(file) for entry in entries if entry.is_dir() for file in _entries(entry))
    if images + below + bool(tables) != 1 or len(tables) > 1:
        return ""
    return "class" if images else "classes" if below else "table"


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
