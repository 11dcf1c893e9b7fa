"""Encoding of tables as features and targets, fitted on the training rows only; and tables as the data of a federation:
one with a column of clients, or one of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data.groups import plain_names
from flsv.data.sources.base import ColumnCard, SourceData
from flsv.data.sources.columns import Columns, without_gaps
from flsv.data.sources.reading import read_columns
from flsv.data.sources.table import Table, one_table
from flsv.data.sources.targets import class_labels, class_names, group_values, numeric_target, with_values
from flsv.utilities.errors import ConfigurationError, listed


class TableEncoder:
    """Encoder of tables with the same columns, of one or several clients and of the server.

    Args:
        columns: options of the columns.
        target: the column to predict.
        group: the column of the rows' clients, which is no feature; None: there is none.

    Attributes:
        feature_names: ``D`` names, such as ``("age", "ward=A", "ward=B", "age missing")``, after :meth:`features`.
        read: the columns that these were made of, likewise.
        target_mean, target_std: a prediction times ``target_std`` plus ``target_mean`` is in the table's unit; 0 and 1
            unless ``standardize_target``, after :meth:`targets`.

    Example:
        >>> frame = pd.DataFrame({"age": ["30", "50", ""], "ill": ["no", "yes", "no"]})
        >>> table = Table("wards.csv", frame)
        >>> encoder = TableEncoder(Columns(), "ill")
        >>> fit = np.array([True, True, True])
        >>> encoder.features(table, fit).tolist(), encoder.feature_names
        ([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], ('age', 'age missing'))
        >>> encoder.classes(table), encoder.targets(table, fit)
        (('no', 'yes'), tensor([0, 1, 0]))
    """

    def __init__(self, columns: Columns, target: str, group: str | None = None) -> None:
        columns.check_roles(target, group)
        self.columns, self.target, self.group = columns, target, group
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()
        self.read: tuple[ColumnCard, ...] = ()
        self._classes: tuple[str, ...] | None = None

    def rows(self, table: Table) -> Table:
        """Keep the rows that have a target."""
        return with_values(table, self.target, "target", self.columns)

    def row_names(self, table: Table) -> dict[str, list[str]]:
        """Return names by which readers of the file recognize each row; see :meth:`Table.row_names`."""
        return table.row_names(self.columns.exclude or (), self.group)

    def features(self, table: Table, fit: np.ndarray) -> Tensor:
        """Encode features, float32 ``[N, D]``: numbers, then categories, then marks of missing values.

        Args:
            table: training rows, then others.
            fit: the rows on which statistics and categories are fitted, bool ``[N]``.

        Raises:
            ConfigurationError: columns that are missing in a table, partly numbers and partly words, without a value or
                with too many categories.
        """
        self.read = tuple(read_columns(table, self.names(table), fit, self.columns))
        kinds = {kind: [each.name for each in self.read if each.kind == kind] for kind in (r.kind for r in self.read)}
        lines = [f"{table.path}: read as (otherwise: categorical, gaps and exclude of the columns)"]
        rank_zero_info("\n".join([*lines, *(f"  {kind}: {listed(names, 20)}" for kind, names in kinds.items())]))
        frame = pd.DataFrame({each.name: each.values for each in self.read})
        return torch.from_numpy(self._transformer(fit).fit(frame[fit]).transform(frame).astype(np.float32))

    def _transformer(self, fit: np.ndarray) -> ColumnTransformer:
        """Make the transformer of the columns that were read, and name its features."""
        numbers = [each.name for each in self.read if each.categories is None]
        words = {each.name: each.categories for each in self.read if each.categories is not None}
        gappy = [each.name for each in self.read if each.values[fit].isna().any()]
        one_hot = [f"{name}={category}" for name, categories in words.items() for category in categories]
        self.feature_names = (*numbers, *one_hot, *(f"{name} missing" for name in gappy))
        scale = make_pipeline(
            # Row by row in memory: sums are the same to the bit for every origin of the frame.
            FunctionTransformer(np.ascontiguousarray),
            StandardScaler(),
            SimpleImputer(strategy="constant", fill_value=0.0, keep_empty_features=True),
        )
        encode = OneHotEncoder(categories=list(words.values()), handle_unknown="ignore", sparse_output=False)
        mark = MissingIndicator(features="all")
        parts = [("numbers", scale, numbers), ("categories", encode, list(words)), ("gaps", mark, gappy)]
        return ColumnTransformer(parts, sparse_threshold=0)

    def classes(self, table: Table) -> tuple[str, ...] | None:
        """Find the classes' names in the training rows; return None for regression."""
        if self.columns.task == "classification":
            self._classes = class_names(table, self.target, "target")
        return self._classes

    def targets(self, table: Table, fit: np.ndarray | None = None) -> Tensor:
        """Encode targets: classes int64 ``[N]``, after :meth:`classes`, or numbers float32 ``[N]``.

        Numbers are standardized if ``Columns.standardize_target``, but not without ``fit``.

        Raises:
            ConfigurationError: a class that no training table has, a value that is no number, numbers without spread.
        """
        if self._classes is not None:
            return class_labels(table, self.target, "target", self._classes)
        numbers = numeric_target(table, self.target, self.columns.decimal)
        if self.columns.standardize_target and fit is not None:
            self.target_mean, self.target_std = float(numbers[fit].mean()), float(numbers[fit].std())
            if self.target_std <= 1e-12 * abs(self.target_mean):
                raise ConfigurationError(f"{table.path}: all training rows have the same {self.target!r} (target).")
        return torch.from_numpy((numbers - self.target_mean) / self.target_std).float()

    def encoded(self, table: Table, sizes: Sequence[int], fit: np.ndarray | None = None) -> list[TensorDataset]:
        """Encode features and targets and split them by ``sizes``; without ``fit`` there are no features yet."""
        features = torch.zeros(len(table), 0) if fit is None else self.features(table, fit)
        pairs = zip(features.split(list(sizes)), self.targets(table, fit).split(list(sizes)))
        return [TensorDataset(*pair) for pair in pairs]

    def cards(self, table: Table, rows: int) -> tuple[ColumnCard, ...]:
        """Describe what the columns of the first ``rows`` rows became, after :meth:`features`."""
        cards = list(self.read)
        used = {each.name for each in self.read} | {self.target, self.group}
        for name in table.frame.columns.difference(list(used - {None}), sort=False):
            # One of several tables may lack the column.
            values = without_gaps(replace(table, together=()), name, "exclude", self.columns).astype(object)
            cards.append(ColumnCard(name, "left out", values))
        return tuple(replace(each, values=each.values.iloc[:rows].reset_index(drop=True)) for each in cards)

    def names(self, table: Table) -> list[str]:
        """List the columns to predict from, whether all tables have them or not."""
        for argument in ("features", "categorical", "dates", "exclude", "gaps"):
            named = getattr(self.columns, argument) or ()
            for name in () if argument == "gaps" and isinstance(named, list) else named:
                replace(table, together=()).column(name, argument)
        taken = {self.target, self.group, *(self.columns.exclude or ())}
        names = [name for name in self.columns.features or table.frame.columns if name not in taken]
        if not names:
            raise ConfigurationError(f"Columns: no column is left to predict {self.target!r} from.")
        return names


def tables_source(
    tables: Mapping[str, Table],
    held_out: Mapping[str, Table | None],
    label: str,
    group: str | None,
    columns: Columns,
    clients: bool,
) -> SourceData:
    """Encode tables into features and targets by the options of :class:`~flsv.data.Columns`.

    Means, deviations and categories are fitted on the clients' training rows, once these are known: neither the
    server's validation rows nor the clients' own count.

    Args:
        tables: each client's table by name, or a single table.
        held_out: ``val`` and ``test``, whose rows belong to no client.
        label: the column to predict.
        group: the column of the rows' clients in a single table.
        columns: options by which the others become features.
        clients: whether ``tables`` are of one client each.

    Raises:
        ConfigurationError: tables with other columns than the first; columns that :class:`TableEncoder` refuses.
    """
    if clients:  # for messages: a file has a name of its own
        tables = {
            name: replace(table, path=f"the {table.path} of {name!r}") if table.typed else table
            for name, table in tables.items()
        }
    encoder = TableEncoder(columns, label, group)
    train = [encoder.rows(table) for table in tables.values()]
    held = {name: encoder.rows(table) for name, table in held_out.items() if table is not None}
    groups, names = _groups(train, group, tuple(tables) if clients else ())
    table = one_table([*train, *held.values()])
    sizes = [sum(map(len, train)), *map(len, held.values())]
    classes = encoder.classes(one_table(train)) or ()

    def found(fit_rows: Sequence[Tensor] | None) -> SourceData:
        """Encode with statistics of the clients' training rows ``fit_rows``; None leaves features for later."""
        fit = None
        if fit_rows is not None:
            fit = np.zeros(len(table), dtype=bool)
            fit[torch.cat(list(fit_rows)).numpy()] = True
        whole, *rest = encoder.encoded(table, sizes, fit)
        sets: dict[str, Any] = dict(zip(held, rest))
        for name, part in held.items():
            sets[name].row_names = encoder.row_names(part)
        return SourceData(
            whole,
            **sets,
            class_names=classes,
            groups=groups,
            group_names=names,
            clients=clients,
            labeled=True,
            columns=() if fit is None else encoder.cards(table, sizes[0]),
            fitted=found if fit is None else None,
        )

    # The training rows, and so the scale of numbers, are not known yet; no component reads numbers before they are.
    return found(None)


def _groups(
    tables: Sequence[Table], group: str | None, clients: tuple[str, ...]
) -> tuple[Tensor | None, tuple[str, ...]]:
    if clients:
        return torch.repeat_interleave(torch.tensor([len(table) for table in tables])), clients
    if group is None:
        return None, ()
    values, numbers = np.unique(group_values(tables[0], group), return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), plain_names(values.tolist(), group)
