"""A user's own data, all together: the clients' or one for all, and what the server validates and tests with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from flsv.data.groups import named_groups
from flsv.data.names import plain_names
from flsv.data.parts.column_samples import ColumnSamples
from flsv.data.parts.join import concatenated, one_numbering
from flsv.data.parts.read import Reading, read_part
from flsv.data.parts.tables import tables_source
from flsv.data.sets.csv_file import CSVFile
from flsv.data.source_data import SourceData
from flsv.errors import ConfigurationError


def own_source(
    train: Mapping[str, Any], held_out: Mapping[str, Any], reading: Reading, clients: bool = False
) -> SourceData:
    """What was given, as one source.

    Args:
        train: by client, or a single one under any name; see :data:`~flsv.data.parts.read.KINDS`.
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
    tables = {name: part for name, part in together.items() if isinstance(part, CSVFile)}
    other = next((name for name in together if name not in tables), None)
    if tables and other is not None:
        raise ConfigurationError(
            f"{next(iter(tables))!r} is a table and {other!r} is not ({type(together[other]).__name__}). Give all as "
            "tables, or all as data sets of the same samples."
        )
    if tables:
        label = reading.table_label(next(iter(tables.values())))
        return tables_source(parts, held, label, reading.group, reading.columns, clients)  # type: ignore[arg-type]
    if reading.label is not None and not all(isinstance(part, ColumnSamples) for part in together.values()):
        raise ConfigurationError(
            f"label={reading.label!r} names the column to predict of a table, a DataFrame or a Hugging Face data set; "
            f"a {type(next(iter(parts.values()))).__name__} has no columns. labels names an attribute or a field with "
            "the classes."
        )
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
    )


def _groups(
    parts: Mapping[str, Dataset], group: str | None, clients: bool
) -> tuple[torch.Tensor | None, tuple[str, ...]]:
    if clients:
        sizes = torch.tensor([len(part) for part in parts.values()])  # type: ignore[arg-type]
        return torch.repeat_interleave(sizes), tuple(parts)
    found = named_groups(next(iter(parts.values()))) if group is not None else None
    return found or (None, ())
