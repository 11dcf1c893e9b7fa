"""Data that a user gives: of each client or of all, and the server's validation and test data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pandas as pd
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flsv.data.groups import named_groups, plain_names
from flsv.data.sources.arrays import ColumnSamples, array_set, is_array, is_pair_of_arrays, is_plain
from flsv.data.sources.base import Reading, SourceData
from flsv.data.sources.images import has_class_folders, image_folder
from flsv.data.sources.join import concatenated, one_numbering
from flsv.data.sources.named import DATA_SETS
from flsv.data.tables.columns import Columns
from flsv.data.tables.sources import tables_source
from flsv.data.tables.table import (
    TABLES,
    Table,
    column_keys,
    column_values,
    frame_table,
    is_columnar,
    is_hugging_face,
    read_csv,
)
from flsv.errors import ConfigurationError

KINDS = (
    "a map-style data set, (X, y) arrays, a DataFrame, a Hugging Face data set, or the path of a CSV file or of a "
    "folder of images, <class>/*.png"
)


def read_part(given: Any, reading: Reading, what: str) -> Dataset | Table:
    """A data set, or a table as it is, of whatever was given.

    Args:
        given: see :data:`KINDS`.
        reading: how it is read.
        what: whose data these are, the subject of a message.

    Raises:
        ConfigurationError: nothing that can be read, or nothing in it.
    """
    try:
        part = _read(given, reading)
    except ConfigurationError as error:
        raise ConfigurationError(f"{what}: {error}") from error
    if len(part) == 0:  # type: ignore[arg-type]
        raise ConfigurationError(f"{what}: there are no samples.")
    return part


def find_place(name: str, root: str) -> Path | None:
    """The path of a file or a folder: below ``root``, or as given; None if there is none."""
    return next((place for place in (Path(root) / name, Path(name)) if name and place.exists()), None)


def read_table(path: Path, columns: Columns) -> Table:
    """A CSV file; one called ``.tsv`` has tabs."""
    tabs = path.suffix.lower() == ".tsv" and columns.delimiter == ","
    return read_csv(path, "\t" if tabs else columns.delimiter)


def _read(given: Any, reading: Reading) -> Dataset | Table:
    if isinstance(given, str | Path):
        return _read_path(str(given), reading)
    if is_pair_of_arrays(given):
        return array_set(*given)
    if is_array(given):
        return array_set(given)
    if is_columnar(given):
        return _read_frame(given, reading)
    if isinstance(given, L.LightningDataModule):
        raise ConfigurationError(
            f"a {type(given).__name__} has training, validation and test data of its own: give it as source, or the "
            "data set in it here."
        )
    if isinstance(given, DataLoader):
        raise ConfigurationError(
            f"a DataLoader has batches, and samples are dealt out: give its data set, loader.dataset, and say "
            f"FederatedDataModule(..., batch_size={given.batch_size}). One with a collate_fn goes into a "
            "LightningDataModule's train_dataloader, which is then given as source."
        )
    streams = isinstance(given, IterableDataset) or not hasattr(given, "__len__")
    if streams or isinstance(given, Mapping | list | tuple) or not hasattr(given, "__getitem__"):
        raise ConfigurationError(f"a {type(given).__name__} cannot be read as samples. Expected {KINDS}.")
    return given


def _read_path(name: str, reading: Reading) -> Dataset | Table:
    place = find_place(name, reading.root)
    if place is None:
        looked = " and ".join(dict.fromkeys(str(p.absolute()) for p in (Path(reading.root) / name, Path(name))))
        known = " The data sets known by name are dealt as a whole: source." if name.lower() in DATA_SETS else ""
        raise ConfigurationError(f"{name!r} was not found: looked at {looked}. Expected {KINDS}.{known}")
    if place.is_file():
        if place.suffix.lower() in TABLES:
            return read_table(place, reading.columns)
        raise ConfigurationError(f"{place} cannot be read as samples. Expected {KINDS}.")
    tables = sorted(file for file in place.iterdir() if file.suffix.lower() in TABLES and file.name[0] != ".")
    if len(tables) == 1:
        return read_table(tables[0], reading.columns)
    if not has_class_folders(place):
        raise ConfigurationError(f"{place} has no images in folders by class, or more than that. Expected {KINDS}.")
    return image_folder(place, reading.image_size)


def _read_frame(frame: Any, reading: Reading) -> Dataset | Table:
    keys = column_keys(frame) or {}
    if reading.label is None and is_hugging_face(frame):
        return frame  # rows are dictionaries, and somebody has a model for these
    table = Table(type(frame).__name__, pd.DataFrame(columns=list(keys)), np.array([], int), typed=True)
    label = reading.table_label(table)
    if len(frame) == 0:
        return table
    for name, argument in ((reading.group, "groups"), *((each, "features") for each in reading.columns.features or ())):
        if name is not None:
            table.column(name, argument)
    taken = {label, reading.group, *(reading.columns.exclude or ())}
    inputs = [name for name in reading.columns.features or keys if name not in taken]
    if not is_hugging_face(frame):
        return frame_table(frame, tuple(reading.columns.exclude or ()))
    first = frame[0]
    large = [name for name in inputs if not is_plain(first[keys[name]])]
    if not large:
        return frame_table(frame, tuple(reading.columns.exclude or ()))
    if len(inputs) > 1:
        raise ConfigurationError(
            f"the rows have {', '.join(large)}, of more than a number or a word each, and the inputs are "
            f"{', '.join(inputs)}. Of such columns one is the input: name it, columns.features: [{large[0]}]."
        )
    samples = ColumnSamples(frame, inputs[0], label)
    if reading.group is not None:
        samples.groups = column_values(frame, keys[reading.group])  # type: ignore[attr-defined]
        samples.group_kind = reading.group  # type: ignore[attr-defined]
    return samples


def own_source(
    train: Mapping[str, Any], held_out: Mapping[str, Any], reading: Reading, clients: bool = False
) -> SourceData:
    """What was given, as one source.

    Args:
        train: by client, or a single one under any name; see :data:`~flsv.data.sources.given.KINDS`.
        held_out: ``val`` and ``test``, each None where there is none.
        reading: how all are read.
        clients: whether ``train`` is by client.

    Raises:
        ConfigurationError: something that cannot be read, is empty, or does not go with the rest.

    Example:
        >>> data = own_source(
        ...     {"Boston": (torch.zeros(2, 3), ["ill", "well"]), "Lyon": (torch.ones(1, 3), ["well"])},
        ...     {},
        ...     Reading(),
        ...     clients=True,
        ... )
        >>> data.train.tensors[1], data.groups, data.group_names, data.class_names
        (tensor([0, 1, 1]), tensor([0, 0, 1]), ('Boston', 'Lyon'), ('ill', 'well'))
    """
    if clients:
        train = dict(zip(plain_names(train, "site"), train.values()))
    parts = {
        name: read_part(each, reading, f"client {name!r}" if clients else "source") for name, each in train.items()
    }
    held = {name: None if each is None else read_part(each, reading, name) for name, each in held_out.items()}
    together = {**parts, **{f"the {name} data": part for name, part in held.items() if part is not None}}
    tables = {name: part for name, part in together.items() if isinstance(part, Table)}
    other = next((name for name in together if name not in tables), None)
    if tables and other is not None:
        raise ConfigurationError(
            f"{next(iter(tables))!r} is a table and {other!r} is not ({type(together[other]).__name__}). Give all as "
            "tables, or all as data sets of the same samples."
        )
    if tables:
        label = reading.table_label(next(iter(tables.values())))
        return tables_source(parts, held, label, reading.group, reading.columns, clients)  # type: ignore[arg-type]
    sets, rest, classes = one_numbering(parts, held)  # type: ignore[arg-type]
    whole = concatenated(sets)
    groups, names = _groups(sets, reading.group, clients)
    return SourceData(
        whole,
        rest.get("val"),
        test=rest.get("test"),
        class_names=classes,
        groups=groups,
        group_names=names,
        clients=clients,
        labelled=all(isinstance(part, ColumnSamples) for part in together.values()),
    )


def _groups(
    parts: Mapping[str, Dataset], group: str | None, clients: bool
) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    if clients:
        sizes = torch.tensor([len(part) for part in parts.values()])  # type: ignore[arg-type]
        return torch.repeat_interleave(sizes), tuple(parts)
    found = named_groups(next(iter(parts.values()))) if group is not None else None
    return found or (None, ())
