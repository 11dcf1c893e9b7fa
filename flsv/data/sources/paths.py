"""Data by a path or a name: a table's file, a folder of images, a named data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, TensorDataset

from flsv.data.sources.base import Reading, SourceData, known_as
from flsv.data.sources.named import (
    has_class_folders,
    image_folder,
    load_image_data,
    warn_of_empty_classes,
)
from flsv.data.sources.places import TableRows, find_place, is_table_file, looked_at
from flsv.utilities.errors import ConfigurationError


def read_path(
    source: str | Path, reading: Reading, client: str, is_whole: bool, kinds: str
) -> Dataset[Any] | TableRows | SourceData:
    """Read a table file or a folder of images by class.

    If ``is_whole``, the path may also be a data set's name. ``kinds`` says in an error what can be read.
    """
    files = reading.files
    path = None
    if not (is_whole and known_as(source)):
        path = find_place(source, files.root)
    if path is not None and path.is_dir() and not is_whole:
        path = _only_table(path) or path

    if path is not None and is_table_file(path):
        from flsv.data.tables.source import read_table

        return read_table(path, reading, client)
    if path is not None and path.is_dir() and has_class_folders(path):
        images = image_folder(path, files.image_size)
        if is_whole:
            warn_of_empty_classes(path, images)
        return images

    name = str(source)
    if not is_whole:
        places = looked_at(name, files.root)
        raise ConfigurationError(
            f"{name!r} was not found, or cannot be read: looked at {places}. Expected {kinds}."
        )
    data = load_image_data(
        name, root=files.root, download=files.download, image_size=files.image_size
    )
    for part in (data.train, data.val, data.test):
        # The user's own validation and test data must have the same numbers of classes.
        if type(part) is TensorDataset:
            part.classes = data.class_names  # type: ignore[attr-defined]  # an attribute of ours
    return data


def _only_table(folder: Path) -> Path | None:
    """Return the table's file in a client's folder, or None if it has none or several."""
    tables = []
    for entry in folder.iterdir():
        if is_table_file(entry) and not entry.name.startswith("."):
            tables.append(entry)
    if len(tables) != 1:
        return None
    return tables[0]
