"""Data by a path or a name: a table's file, a folder of images, a named data set."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import Dataset, TensorDataset

from flsv.data.sources.base import Reading, SourceData, known_as
from flsv.data.sources.columns import as_columns
from flsv.data.sources.frames import read_table_file
from flsv.data.sources.named import (
    has_class_folders,
    image_folder,
    load_image_data,
    warn_of_empty_classes,
)
from flsv.data.sources.table import Table, find_place, is_table_file, looked_at
from flsv.utilities.errors import ConfigurationError


def read_path(
    source: str | Path,
    reading: Reading,
    whole: bool,
    kinds: str,
) -> Dataset | Table | SourceData:
    """Read a table file or a folder of images by class.

    With ``whole``, the path may also be a data set's name. ``kinds`` says in an error what can be read.
    """
    files = reading.files
    path = None if whole and known_as(source) else find_place(source, files.root)
    if path is not None and path.is_dir() and not whole:  # one file in a client's folder
        tables = [
            entry for entry in path.iterdir() if entry.name[0] != "." and is_table_file(entry)
        ]
        path = tables[0] if len(tables) == 1 else path
    if path is not None and is_table_file(path):
        return read_table_file(path, as_columns(reading.columns).encoding)
    if path is not None and path.is_dir() and has_class_folders(path):
        images = image_folder(path, files.image_size)
        if whole:
            warn_of_empty_classes(path, images)
        return images
    if not whole:
        looked = looked_at(str(source), files.root)
        raise ConfigurationError(
            f"{str(source)!r} was not found, or cannot be read: looked at {looked}. Expected {kinds}."
        )
    data = load_image_data(str(source), files.root, files.download, files.image_size)
    for part in (data.train, data.val, data.test):
        # The user's own validation and test data must have the same numbers of classes.
        if type(part) is TensorDataset:
            part.classes = data.class_names  # type: ignore[attr-defined]  # an attribute of ours
    return data
