"""Tables as the data of a federation: one with a column that says whose the rows are, or one of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flsv.data.names import plain_names
from flsv.data.sets.columns import Columns
from flsv.data.sets.csv_file import CSVFile
from flsv.data.sets.csv_values import group_values
from flsv.data.sets.table_encoder import TableEncoder
from flsv.data.source_data import SourceData
from flsv.data.splits import FederatedSplits
from flsv.errors import ConfigurationError


def tables_source(
    tables: Mapping[str, CSVFile],
    held_out: Mapping[str, CSVFile | None],
    label: str,
    group: str | None,
    columns: Columns,
    clients: bool,
) -> SourceData:
    """Features and targets of tables, encoded as :class:`~flsv.data.Columns` says.

    Means, deviations and categories are those of the clients' training rows, once it is known which these are: the
    server's validation rows, and the clients' own, tell none.

    Args:
        tables: of each client by name, or a single one.
        held_out: ``val`` and ``test``, whose rows belong to no client.
        label: the column to predict.
        group: the column of a single table that says whose the rows are.
        columns: how the others become features.
        clients: whether ``tables`` are of one client each.

    Raises:
        ConfigurationError: tables with other columns than the first; what :class:`TableEncoder` refuses.
    """
    columns.check_roles(label, "the client" if clients else group, "Columns")
    encoder = TableEncoder(columns, label, group, "Columns")
    train = {name: encoder.rows(table) for name, table in tables.items()}
    held = {name: None if table is None else encoder.rows(table) for name, table in held_out.items()}
    first = next(iter(train))
    for name, table in {**train, **held}.items():
        if table is not None:
            _check_columns(train[first], table, first, name, group)
    groups, names = _groups(train, group, clients)
    rows = list(train.values())
    everything = rows + [table for table in held.values() if table is not None]
    classes = encoder.classes(rows)
    # Who trains on which row is not known yet, and a number's scale with it: nothing looks at a number before.
    nothing = np.ones(sum(map(len, everything)), dtype=bool)
    unscaled = TableEncoder(replace(columns, standardise_target=False), label, group, "Columns")
    unscaled.classes(rows)
    targets = unscaled.targets(everything, nothing)
    blank = [torch.zeros(len(target), 0) for target in targets]
    fitted = partial(
        _fitted, encoder=encoder, tables=everything, parts=len(rows), held=held, groups=groups, names=names
    )
    return replace(
        _as_sets(blank, targets, len(rows), held),
        class_names=classes or (),
        groups=groups,
        group_names=names,
        clients=clients,
        fitted=fitted,
    )


def _fitted(
    splits: FederatedSplits,
    encoder: TableEncoder,
    tables: Sequence[CSVFile],
    parts: int,
    held: Mapping[str, CSVFile | None],
    groups: Tensor | None,
    names: Sequence[str],
) -> SourceData:
    """The data with the features that the clients' training rows tell."""
    fit = np.zeros(sum(map(len, tables)), dtype=bool)
    for client in splits.clients:
        fit[client["train"].numpy()] = True
    of = None
    if encoder.columns.statistics == "group":
        if groups is None or any(table is not None for table in held.values()):
            raise ConfigurationError(
                "Columns(statistics='group'): the val and test data are no client's, and have no statistics of their "
                "own. Say statistics='pooled', or client_test_fraction for the clients' own test rows."
            )
        of = np.array(names)[groups.numpy()]
    return _as_sets(encoder.features(tables, fit, of), encoder.targets(tables, fit), parts, held)


def _as_sets(
    features: Sequence[Tensor], targets: Sequence[Tensor], parts: int, held: Mapping[str, CSVFile | None]
) -> SourceData:
    train = TensorDataset(torch.cat(list(features[:parts])), torch.cat(list(targets[:parts])))
    rest = iter(zip(features[parts:], targets[parts:]))
    sets: dict[str, Dataset | None] = {
        name: None if table is None else TensorDataset(*next(rest)) for name, table in held.items()
    }
    return SourceData(train, sets.get("val"), test=sets.get("test"))


def _check_columns(first: CSVFile, table: CSVFile, one: str, other: str, group: str | None) -> None:
    mine, theirs = set(first.columns) - {group}, set(table.columns) - {group}
    if mine != theirs:
        lacks, more = sorted(mine - theirs), sorted(theirs - mine)
        told = [f"lacks {', '.join(lacks[:5])}"] if lacks else []
        told += [f"has {', '.join(more[:5])} besides"] if more else []
        raise ConfigurationError(
            f"The tables have other columns: {other!r} ({table.path}) {' and '.join(told)}, compared with {one!r} "
            f"({first.path}). All need the same."
        )


def _groups(tables: Mapping[str, CSVFile], group: str | None, clients: bool) -> tuple[Tensor | None, tuple[str, ...]]:
    if clients:
        return torch.repeat_interleave(torch.tensor([len(table) for table in tables.values()])), tuple(tables)
    if group is None:
        return None, ()
    values, numbers = np.unique(group_values(next(iter(tables.values())), group), return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), plain_names(values.tolist(), group)
