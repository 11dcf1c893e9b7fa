"""TableEncoder, which encodes tables as features and targets and is fitted on the training rows only, and a function
that makes a source of tables: of one table with a column of clients, or of one table per client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from pandas.api.types import is_numeric_dtype
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data.groups import plain_names
from flsv.data.positive_class import chosen_by_rarity
from flsv.data.sources.base import ColumnCard, Reading, SourceData
from flsv.data.sources.columns import FEW, Columns, without_gaps
from flsv.data.sources.reading import read_columns
from flsv.data.sources.table import Table, one_table
from flsv.data.sources.targets import class_labels, class_names, group_values, numeric_target, with_values
from flsv.utilities.errors import ConfigurationError, listed


class TableEncoder:
    """Encoder that turns the tables of clients and server, which have the same columns, into features and targets.

    Args:
        columns: options by which columns become features and targets.
        target: the column to predict.
        group: the column with each row's client, which is not a feature; None: there is no such column.
        pos_label: the positive one of two classes; None: the larger number, ``True``, or else the rarer one.

    Attributes:
        feature_names: names of the ``D`` features, such as ``("age", "ward=A", "ward=B", "age missing")``; set by
            :meth:`features`.
        read: a :class:`ColumnCard` for each column from which features were made; set by :meth:`features`.
        target_mean, target_std: mean and standard deviation of a standardized target, set by :meth:`targets`; 0 and 1
            for other targets. A prediction times ``target_std`` plus ``target_mean`` is in the unit of the table.

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

    def __init__(self, columns: Columns, target: str, group: str | None = None, pos_label: Any = None) -> None:
        columns.check_roles(target, group)
        self.columns, self.target, self.group, self.pos_label = columns, target, group, pos_label
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()
        self.read: tuple[ColumnCard, ...] = ()
        self._classes: tuple[str, ...] | None = None

    def rows(self, table: Table) -> Table:
        """Return the rows of ``table`` that have a target."""
        return with_values(table, self.target, "target", self.columns)

    def row_names(self, table: Table) -> dict[str, list[str]]:
        """Return ``{title: texts}`` with which users recognize each row in the file; see :meth:`Table.row_names`."""
        return table.row_names(self.columns.exclude or (), self.group)

    def features(self, table: Table, fit: np.ndarray) -> Tensor:
        """Encode the features, float32 ``[N, D]``: first numbers, then categories, then indicators of missing values.

        Args:
            table: rows of all tables, the training rows first.
            fit: bool ``[N]``, the rows on which means, deviations and categories are fitted.

        Raises:
            ConfigurationError: a column is missing in a table, has both numbers and words, has no value in a training
                row, or has too many categories.
        """
        self.read = tuple(read_columns(table, self.names(table), fit, self.columns))
        kinds = {kind: [each.name for each in self.read if each.kind == kind] for kind in (r.kind for r in self.read)}
        lines = [f"{table.path}: columns are read as (to change this: categorical, gaps and exclude in columns)"]
        rank_zero_info("\n".join([*lines, *(f"  {kind}: {listed(names, 20)}" for kind, names in kinds.items())]))
        frame = pd.DataFrame({each.name: each.values for each in self.read})
        return torch.from_numpy(self._transformer(fit).fit(frame[fit]).transform(frame).astype(np.float32))

    def _transformer(self, fit: np.ndarray) -> ColumnTransformer:
        """Return scikit-learn's transformer of the columns in :attr:`read`, unfitted, and set :attr:`feature_names`.

        Args:
            fit: bool ``[N]``, the training rows, on which the caller fits the transformer.
        """
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
        """Return the names of the classes in ``table``, which are stored for :meth:`targets`; None for regression."""
        if self.columns.task == "classification":
            self._classes = class_names(table, self.target, "target", self.pos_label, self.columns.classes)
        return self._classes

    def targets(self, table: Table, fit: np.ndarray | None = None) -> Tensor:
        """Encode the targets. The option ``task`` of the columns decides whether they are classes or numbers.

        Args:
            table: the rows.
            fit: bool ``[N]``, the rows on which the mean and deviation of a standardized target are fitted; None:
                numbers are not standardized now.

        Returns:
            The index of each row's class, int64 ``[N]`` (call :meth:`classes` before), or the numbers to predict,
            float32 ``[N]``.

        Raises:
            ConfigurationError: a class is not among the training rows' classes; a value is not a number; or all rows of
                ``fit`` have the same number, which cannot be standardized.
        """
        if self._classes is not None:
            return class_labels(table, self.target, "target", self._classes)
        numbers = numeric_target(table, self.target, self.columns)
        if self.columns.standardize_target and fit is not None:
            self.target_mean, self.target_std = float(numbers[fit].mean()), float(numbers[fit].std())
            if self.target_std <= 1e-12 * abs(self.target_mean):
                raise ConfigurationError(f"{table.path}: all training rows have the same {self.target!r} (target).")
        return torch.from_numpy((numbers - self.target_mean) / self.target_std).float()

    def encoded(self, table: Table, sizes: Sequence[int], fit: np.ndarray | None = None) -> list[TensorDataset]:
        """Encode the features and targets of several tables and return one data set per table.

        Args:
            table: rows of all tables, one table after the other.
            sizes: number of rows of each table.
            fit: bool ``[N]``, the rows on which the encoding is fitted; None: the data sets have 0 features.
        """
        features = torch.zeros(len(table), 0) if fit is None else self.features(table, fit)
        pairs = zip(features.split(list(sizes)), self.targets(table, fit).split(list(sizes)))
        return [TensorDataset(*pair) for pair in pairs]

    def cards(self, table: Table, rows: int) -> tuple[ColumnCard, ...]:
        """Return a :class:`ColumnCard` for each column, also for columns that are no features, with the column's values
        in the first ``rows`` rows of ``table``; call :meth:`features` before."""
        cards = list(self.read)
        used = {each.name for each in self.read} | {self.target, self.group}
        for name in table.frame.columns.difference(list(used - {None}), sort=False):
            # One of several tables may lack the column.
            values = without_gaps(replace(table, together=()), name, "exclude", self.columns).astype(object)
            cards.append(ColumnCard(name, "left out", values))
        return tuple(replace(each, values=each.values.iloc[:rows].reset_index(drop=True)) for each in cards)

    def names(self, table: Table) -> list[str]:
        """Return the names of the columns to read as features, including columns that only some of the concatenated
        tables have."""
        for argument in ("features", "categorical", "dates", "exclude", "gaps"):
            named = getattr(self.columns, argument) or ()
            for name in () if argument == "gaps" and isinstance(named, list) else named:
                replace(table, together=()).column(name, argument)
        taken = {self.target, self.group, *(self.columns.exclude or ())}
        names = [name for name in self.columns.features or table.frame.columns if name not in taken]
        if not names:
            raise ConfigurationError(f"Columns: no column is left from which to predict {self.target!r}.")
        return names


def tables_source(
    tables: Mapping[str, Table],
    held_out: Mapping[str, Table | None],
    label: str,
    reading: Reading,
    clients: bool,
) -> SourceData:
    """Return the source for tables, whose columns a :class:`TableEncoder` turns into features and targets.

    The source has no features yet: its function ``fitted`` makes them when the clients' training rows are known, and
    fits means, deviations and categories on these rows only.

    Args:
        tables: ``{client: table}``, or a single table under any name.
        held_out: the tables ``val`` and ``test``, whose rows belong to no client; None without such a table.
        label: the column to predict.
        reading: options of reading: the column with each row's client in a single table, the options by which the other
            columns become features, and the positive class.
        clients: whether each table belongs to one client.

    Raises:
        ConfigurationError: the tables differ in their columns, or :class:`TableEncoder` refuses a column.
    """
    if clients:  # for messages: a file has a name of its own
        tables = {
            name: replace(table, path=f"the {table.path} of {name!r}") if table.typed else table
            for name, table in tables.items()
        }
    group = reading.group
    encoder = TableEncoder(reading.columns, label, group, reading.pos_label)
    train = [encoder.rows(table) for table in tables.values()]
    held = {name: encoder.rows(table) for name, table in held_out.items() if table is not None}
    groups, names = _groups(train, group, tuple(tables) if clients else ())
    if groups is not None:
        rows, left_out = one_table(train).frame.reset_index(drop=True), [group, *(reading.columns.exclude or ())]
        _warn_of_copies(rows.drop(columns=left_out, errors="ignore"), pd.Series(groups.numpy()), names)
    table = one_table([*train, *held.values()])
    sizes = [sum(map(len, train)), *map(len, held.values())]
    classes = encoder.classes(one_table(train)) or ()

    def found(fit_rows: Sequence[Tensor] | None) -> SourceData:
        """Return the source with features that are fitted on ``fit_rows``, the indices of each client's training rows;
        if ``fit_rows`` is None, without features."""
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
            by_rarity=chosen_by_rarity(classes, reading.pos_label),
            columns=() if fit is None else encoder.cards(table, sizes[0]),
            fitted=found if fit is None else None,
        )

    # The training rows, and so the scale of numbers, are not known yet; no component reads numbers before they are.
    return found(None)


def _warn_of_copies(frame: pd.DataFrame, groups: pd.Series, names: Sequence[str]) -> None:
    """Warn of clients that have the same rows, in any order; ``groups`` has the number of each row's client."""
    sizes = groups.value_counts()
    held = groups.isin(sizes.index[(sizes > FEW) & sizes.duplicated(keep=False)])  # a copy has as many rows
    plain = frame[held].apply(lambda column: column if is_numeric_dtype(column) else column.astype(str))
    first: dict[bytes, str] = {}
    for client, rows in pd.util.hash_pandas_object(plain, index=False).sort_values().groupby(groups):
        whose = first.setdefault(rows.to_numpy().tobytes(), names[client])
        if whose != names[client]:
            rank_zero_warn(f"{names[client]!r} has the same rows as {whose!r}, and a value of its own. Leave one out.")


def _groups(
    tables: Sequence[Table], group: str | None, clients: tuple[str, ...]
) -> tuple[Tensor | None, tuple[str, ...]]:
    if clients:
        return torch.repeat_interleave(torch.tensor([len(table) for table in tables])), clients
    if group is None:
        return None, ()
    values, numbers = np.unique(group_values(tables[0], group), return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), plain_names(values.tolist(), group)
