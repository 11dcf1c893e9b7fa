"""TableEncoder, which encodes tables as features and targets, and the source of tables.

It is fitted on the training rows only. The clients are groups of one table's column, or have a table each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data.groups import check_spelling, plain_names
from flsv.data.labels import chosen_by_rarity, in_order, positive_last
from flsv.data.sources.base import Reading, SourceData
from flsv.data.sources.columns import LARGEST, ColumnCard, Columns, read_columns, without_gaps
from flsv.data.sources.notation import parsed
from flsv.data.sources.table import (
    Table,
    category_names,
    one_table,
    places_of_words,
    texts_by_file,
    without_point_zero,
    words_of,
)
from flsv.utilities.errors import ConfigurationError, listed


class TableEncoder:
    """Encoder that turns the tables of clients and server, which have the same columns, into features and targets.

    Attributes:
        feature_names: names of the ``D`` features, such as ``("age", "ward=A", "ward=B", "age missing")``.
        read: a :class:`ColumnCard` for each column from which features were made.
        target_mean, target_std: mean and standard deviation of a standardized target, else 0 and 1. A prediction times
            ``target_std`` plus ``target_mean`` is in the unit of the table.

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

    def __init__(
        self, columns: Columns, target: str, group: str | None = None, pos_label: Any = None
    ) -> None:
        columns.check_roles(target, group)
        self.columns, self.target, self.group, self.pos_label = columns, target, group, pos_label
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()
        self.read: tuple[ColumnCard, ...] = ()
        self._classes: tuple[str, ...] | None = None

    def rows(self, table: Table) -> Table:
        """Return the rows that have a target. Warn if others are left out."""
        missing = without_gaps(table, self.target, "target", self.columns).isna().to_numpy()
        if missing.all():
            raise ConfigurationError(f"{table.path}: no row has a {self.target!r} (target).")
        if missing.any():
            left = f"{missing.sum()} of {len(table)} rows have no {self.target!r} (target) and are left out"
            rank_zero_warn(f"{table.path}: {left}.")
            return table.take(np.flatnonzero(~missing))
        return table

    def features(self, table: Table, fit: np.ndarray) -> Tensor:
        """Encode numbers, categories, and marks of missing values as features, float32 ``[N, D]``.

        ``fit``, bool ``[N]``, marks the training rows, on which the encoder is fitted.
        """
        self.read = tuple(read_columns(table, self.names(table), fit, self.columns))
        kinds = {
            kind: [each.name for each in self.read if each.kind == kind]
            for kind in (r.kind for r in self.read)
        }
        lines = [
            f"{table.path}: columns are read as (to change this: categorical, gaps and exclude in columns)"
        ]
        rank_zero_info(
            "\n".join(
                [*lines, *(f"  {kind}: {listed(names, 20)}" for kind, names in kinds.items())]
            )
        )
        frame = pd.DataFrame({each.name: each.values for each in self.read})
        return torch.from_numpy(
            self._transformer(fit).fit(frame[fit]).transform(frame).astype(np.float32)
        )

    def _transformer(self, fit: np.ndarray) -> ColumnTransformer:
        """Return scikit-learn's unfitted transformer of the columns :attr:`read`, and set :attr:`feature_names`."""
        numbers = [each.name for each in self.read if each.categories is None]
        words = {each.name: each.categories for each in self.read if each.categories is not None}
        gappy = [each.name for each in self.read if each.values[fit].isna().any()]
        one_hot = [
            f"{name}={category}" for name, categories in words.items() for category in categories
        ]
        self.feature_names = (*numbers, *one_hot, *(f"{name} missing" for name in gappy))
        scale = make_pipeline(
            # Row by row in memory: sums are the same to the bit for every origin of the frame.
            FunctionTransformer(np.ascontiguousarray),
            StandardScaler(),
            SimpleImputer(strategy="constant", fill_value=0.0, keep_empty_features=True),
        )
        encode = OneHotEncoder(
            categories=list(words.values()), handle_unknown="ignore", sparse_output=False
        )
        mark = MissingIndicator(features="all")
        parts = [
            ("numbers", scale, numbers),
            ("categories", encode, list(words)),
            ("gaps", mark, gappy),
        ]
        return ColumnTransformer(parts, sparse_threshold=0)

    def classes(self, table: Table) -> tuple[str, ...] | None:
        """Return the class names, the positive one of two last, or None for regression.

        They are stored for :meth:`targets`.
        """
        if self.columns.task == "classification":
            values = category_names(table.column(self.target, "target"))
            if self.columns.classes is None:
                names = in_order(values.unique().tolist())
                self._check_labels(table, values, names)
            else:
                names = in_order(without_point_zero(self.columns.classes))
            counts = values.value_counts().reindex(names, fill_value=0).tolist()
            self._classes = positive_last(names, counts, self.pos_label)
        return self._classes

    def _check_labels(
        self,
        table: Table,
        values: pd.Series,
        names: Sequence[str],
    ) -> None:
        target = f"target {self.target!r}"
        most_classes = max(2, len(values) // 2)
        if not 2 <= len(names) <= most_classes:
            raise ConfigurationError(
                f"{table.path}: {target} has {len(names)} different values in {len(values)} rows, "
                "which cannot be classes. Name another column; to predict a number, set task: "
                "regression in columns."
            )
        check_spelling(names, f"{table.path}: {target}", places_of_words(table, values))

        labels_by_table = [set(texts) for texts in texts_by_file(table, values)]
        joined = _joined_labels(labels_by_table)
        paths = []
        for part, labels in zip(table.parts, labels_by_table):
            if not labels <= joined:
                paths.append(str(part.path))
        if paths:
            raise ConfigurationError(
                f"{listed(paths)}: {target} has no label of {listed(sorted(joined), 8, repr)}, "
                "which the other tables have. Write the classes the same way everywhere. If all "
                f'these are classes, name them: columns: {{"classes": {json.dumps(names)}}}.'
            )

    def targets(self, table: Table, fit: np.ndarray | None = None) -> Tensor:
        """Return each row's class index, int64 ``[N]``, or its number, float32 ``[N]``.

        Numbers are standardized by the rows ``fit`` if the options say so.
        """
        column = table.column(self.target, "target")
        if self._classes is not None:
            return self._class_indices(table, column, self._classes)

        numbers = self._numbers(table, column)
        if self.columns.standardize_target and fit is not None:
            self.target_mean = float(numbers[fit].mean())
            self.target_std = float(numbers[fit].std())
            if self.target_std <= 1e-12 * abs(self.target_mean):
                raise ConfigurationError(
                    f"{table.path}: all training rows have the same {self.target!r} (target)."
                )
        standardized = (numbers - self.target_mean) / self.target_std
        return torch.from_numpy(standardized).float()

    def _class_indices(
        self,
        table: Table,
        column: pd.Series,
        classes: Sequence[str],
    ) -> Tensor:
        values = category_names(column)
        indices = pd.Index(classes).get_indexer(values)
        unknown_rows = np.flatnonzero(indices < 0).tolist()
        if unknown_rows:
            row = unknown_rows[0]
            raise ConfigurationError(
                f"{table.where(row)}: {values.iloc[row]!r} in target {self.target!r} is none of "
                f"the {len(classes)} classes: {listed(classes, 20)}."
            )
        return torch.from_numpy(indices.astype(np.int64))

    def _numbers(self, table: Table, column: pd.Series) -> np.ndarray:
        texts = column.tolist()
        numbers = parsed(texts, self.columns.decimal, self.columns.thousands)
        is_valid = np.abs(numbers) <= LARGEST
        if not is_valid.all():
            row = int(np.argmin(is_valid))
            raise ConfigurationError(
                f"{table.where(row)}: {str(texts[row])!r} in {self.target!r} (target) is not a "
                "valid number: a class, a missing value (gaps), or in another notation (decimal, "
                "thousands)?"
            )
        return numbers

    def encoded(
        self, table: Table, sizes: Sequence[int], fit: np.ndarray | None = None
    ) -> list[TensorDataset]:
        """Encode a table as data sets of consecutive rows, one data set for each number of rows in ``sizes``.

        ``fit``, bool ``[N]``, marks the training rows. Without it, samples have a target but no features.
        """
        features = torch.zeros(len(table), 0) if fit is None else self.features(table, fit)
        pairs = zip(features.split(list(sizes)), self.targets(table, fit).split(list(sizes)))
        return [TensorDataset(*pair) for pair in pairs]

    def cards(self, rows: int) -> tuple[ColumnCard, ...]:
        """Return the records :attr:`read` of the columns, with the values of the first ``rows`` rows."""
        return tuple(replace(each, values=each.values.iloc[:rows]) for each in self.read)

    def names(self, table: Table) -> list[str]:
        """Return the columns to use as features, including those that only some concatenated tables have."""
        for argument in ("features", "categorical", "dates", "exclude", "gaps"):
            named = getattr(self.columns, argument) or ()
            for name in () if argument == "gaps" and isinstance(named, list) else named:
                replace(table, together=()).column(name, argument)
        taken = {self.target, self.group, *(self.columns.exclude or ())}
        return [name for name in self.columns.features or table.frame.columns if name not in taken]


def _joined_labels(labels_by_table: Sequence[set[str]]) -> set[str]:
    """Return the labels of the first table that has some, and of all tables that share a label with these."""
    joined = next(filter(None, labels_by_table), set())
    num_labels = 0
    while len(joined) > num_labels:
        num_labels = len(joined)
        for labels in labels_by_table:
            if joined & labels:
                joined = joined | labels
    return joined


def group_values(table: Table, name: str) -> np.ndarray:
    """Return each row's group ``[N]`` from the column ``name``.

    Groups become numbers, which sort 2 before 10, unless one begins with a zero.
    """
    values = words_of(table.column(name, "group")).fillna("")
    empty = np.flatnonzero(values == "").tolist()
    if empty:
        raise ConfigurationError(
            f"{table.path}: {len(empty)} of {len(table)} rows have no {name!r} (group): {table.places(empty)}. Every "
            "row needs a client: fill them in, or leave the rows out."
        )
    names = list(dict.fromkeys(values))
    check_spelling(names, f"{table.path}: {name!r} (group)")
    whole = all(re.fullmatch(r"0|-?[1-9]\d*", each) for each in names)
    return values.map(int if whole else str).to_numpy()


def tables_source(
    tables: Mapping[str, Table],
    held_out: Mapping[str, Table | None],
    reading: Reading,
    clients: bool,
) -> SourceData:
    """Return the source of the clients' and the held-out tables.

    Its function ``fitted`` makes the features once the training rows are known.
    """
    first = next(iter(tables.values()))
    if reading.label is None:
        has = f"It has {listed(first.frame.columns, 20)}."
        raise ConfigurationError(
            f"{first.path} is a table: set labels, the column to predict. {has}"
        )
    if clients:  # for messages: a file has a name of its own
        tables = {
            name: replace(table, path=f"the {table.path} of {name!r}") if table.typed else table
            for name, table in tables.items()
        }
    encoder = TableEncoder(reading.columns, reading.label, reading.group, reading.pos_label)
    train = [encoder.rows(table) for table in tables.values()]
    held = {name: encoder.rows(table) for name, table in held_out.items() if table is not None}
    groups, names = _groups(train, reading.group, tuple(tables), clients)
    table = one_table([*train, *held.values()])
    sizes = [sum(map(len, train)), *map(len, held.values())]
    classes = encoder.classes(one_table(train)) or ()

    def found(fit_rows: Sequence[Tensor] | None) -> SourceData:
        fit = None
        if fit_rows is not None:
            fit = np.zeros(len(table), dtype=bool)
            fit[torch.cat(list(fit_rows)).numpy()] = True
        whole, *rest = encoder.encoded(table, sizes, fit)
        sets: dict[str, Any] = dict(zip(held, rest))
        for name, part in held.items():
            sets[name].row_names = part.row_names(reading.columns.exclude or (), reading.group)
        return SourceData(
            whole,
            **sets,
            class_names=classes,
            groups=groups,
            group_names=names,
            clients=clients,
            labeled=True,
            by_rarity=chosen_by_rarity(classes, reading.pos_label),
            columns=() if fit is None else encoder.cards(sizes[0]),
            fitted=found if fit is None else None,
        )

    # The training rows, and so the scale of numbers, are not known yet; no component reads numbers before they are.
    return found(None)


def _groups(
    tables: Sequence[Table], group: str | None, called: tuple[str, ...], clients: bool
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return each row's group and the groups' names: the tables if they are ``clients``, else the column ``group``."""
    of_table = torch.repeat_interleave(torch.tensor([len(table) for table in tables]))
    if clients:
        return of_table, called
    if group is None:
        return None, ()
    values, numbers = np.unique(group_values(tables[0], group), return_inverse=True)
    first = torch.from_numpy(numbers.reshape(-1).astype(np.int64))
    rest = of_table[len(first) :] + len(values) - 1
    return torch.cat([first, rest]), (*plain_names(values.tolist(), group), *called[1:])
