"""Rows of tables as features and targets, fitted to the training rows only."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import Tensor

from flsv.data.groups import spelled_alike
from flsv.data.sources.base import ColumnCard
from flsv.data.sources.columns import Columns
from flsv.data.sources.table import Table
from flsv.data.sources.targets import class_labels, class_names, numeric_target, with_values
from flsv.data.sources.values import (
    FEW,
    NUMBERS,
    TRUTH,
    WORDS,
    all_of,
    parsed,
    read_column,
    read_dates,
    without_gaps,
)
from flsv.errors import ColumnError, ConfigurationError, listed

_IDENTIFIER = re.compile(
    r"(?i)(^|[ _.-])(id|nr|no|number|key|index|pid|uid|uuid|mrn|patient|person|case|record)s?$|[a-z]I[Dd]$"
)


@dataclass(frozen=True)
class ReadColumn:
    """How a column became inputs.

    Args:
        name: of it, or of one of the columns that dates became.
        kind: what it was taken for.
        values: of all tables, ``[N]``: numbers or words, NaN for a gap.
        categories: of words, those that the training rows have; None for numbers.
        doubt: what speaks against using it, if anything.
    """

    name: str
    kind: str
    values: pd.Series
    categories: Sequence[str] | None = None
    doubt: ColumnError | None = None

    @property
    def missing(self) -> np.ndarray:
        """Where it has gaps, bool ``[N]``."""
        return self.values.isna().to_numpy()

    @property
    def became(self) -> str:
        """In words."""
        if self.categories is not None:
            return f"{len(self.categories)} categories"
        return {NUMBERS: "a number", TRUTH: "0 or 1"}.get(self.kind, self.kind)


class TableEncoder:
    """Encodes tables with the same columns, of one or several clients and of the server.

    Args:
        columns: which columns, and how.
        target: the column to predict.
        group: a column that says whose the rows are, which is no feature; None: there is none.

    Attributes:
        feature_names: ``D`` names, such as ``("age", "ward=A", "ward=B", "age missing")``, after :meth:`features`.
        read: the columns that these are of, likewise.
        target_mean, target_std: what a prediction is multiplied by (``target_std``) and then moved by to be in the
            table's unit; 0 and 1 unless ``standardize_target``, after :meth:`targets`.

    Example:
        >>> frame = pd.DataFrame({"age": ["30", "50", ""], "ill": ["no", "yes", "no"]})
        >>> table = Table("wards.csv", frame)
        >>> encoder = TableEncoder(Columns(), "ill")
        >>> fit = np.array([True, True, True])
        >>> encoder.features([table], fit, np.zeros(3))[0].tolist(), encoder.feature_names
        ([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], ('age', 'age missing'))
        >>> encoder.classes([table]), encoder.targets([table], fit)[0]
        (('no', 'yes'), tensor([0, 1, 0]))
    """

    def __init__(self, columns: Columns, target: str, group: str | None = None) -> None:
        self.columns, self.target, self.group = columns, target, group
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()
        self.read: tuple[ReadColumn, ...] = ()
        self._classes: tuple[str, ...] | None = None

    def rows(self, table: Table) -> Table:
        """The rows that have a target."""
        return with_values(table, self.target, "target", self.columns)

    def features(self, tables: Sequence[Table], fit: np.ndarray, groups: np.ndarray | None) -> list[Tensor]:
        """Features of each table, float32 ``[N_i, D]``: numbers, then categories, then where values are missing.

        Args:
            tables: training tables, then others.
            fit: which rows tell statistics and categories, bool ``[N]`` over all tables.
            groups: the group of each row ``[N]`` for ``statistics="group"``.

        Raises:
            ConfigurationError: columns that a table has not, partly numbers and partly words, without a value or with
                too many categories; groups without a training row.
        """
        self.read = tuple(self._read(tables, self.names(tables), fit))
        self._log_kinds(tables)
        numbers = [each for each in self.read if each.categories is None]
        words = [each for each in self.read if each.categories is not None]
        gappy = [each for each in self.read if each.missing[fit].any()]
        blocks = []
        if numbers:
            x = np.stack([each.values.to_numpy(dtype=np.float64) for each in numbers], axis=1)
            blocks.append(standardize(x, fit, self._statistics_of(fit, groups)))
        if words:
            known: Any = [each.categories for each in words]
            encoder = OneHotEncoder(categories=known, handle_unknown="ignore", sparse_output=False)
            blocks.append(encoder.fit_transform(np.stack([each.values.fillna("") for each in words], axis=1)))
        blocks += [each.missing[:, None] for each in gappy]
        one_hot = [f"{each.name}={category}" for each in words for category in each.categories or ()]
        self.feature_names = (*_named(numbers), *one_hot, *(f"{name} missing" for name in _named(gappy)))
        whole = torch.from_numpy(np.concatenate(blocks, axis=1, dtype=np.float32, casting="unsafe"))
        return [part.clone() for part in whole.split([len(table) for table in tables])]

    def _statistics_of(self, fit: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
        """Whose statistics each row is standardized by, ``[N]``."""
        if self.columns.statistics == "pooled":
            return np.zeros(len(fit))
        assert groups is not None
        strangers = np.setdiff1d(groups, groups[fit])
        if len(strangers):
            raise ConfigurationError(
                f"Columns(statistics='group'): {self.group!r} has groups without a training row: "
                f"{listed(strangers, 10)}. With statistics='pooled' they need none."
            )
        return groups

    def classes(self, tables: Sequence[Table]) -> tuple[str, ...] | None:
        """The classes' names by training tables; None for regression."""
        if self.columns.task == "classification":
            self._classes = class_names(tables, self.target, "target")
        return self._classes

    def targets(self, tables: Sequence[Table], fit: np.ndarray | None = None) -> list[Tensor]:
        """Targets of each table: classes int64 ``[N_i]``, after :meth:`classes`, or numbers float32 ``[N_i]``; not
        standardized without ``fit``.

        Raises:
            ConfigurationError: a class that no training table has, no number, numbers without spread.
        """
        if self._classes is not None:
            return [class_labels(table, self.target, "target", self._classes) for table in tables]
        numbers = [numeric_target(table, self.target) for table in tables]
        if self.columns.standardize_target and fit is not None:
            fitted = np.concatenate(numbers)[fit]
            self.target_mean, self.target_std = float(fitted.mean()), float(fitted.std())
            if self.target_std <= 1e-12 * abs(self.target_mean):
                raise ConfigurationError(f"{all_of(tables)}: all training rows have the same {self.target!r} (target).")
        return [torch.from_numpy((y - self.target_mean) / self.target_std).float() for y in numbers]

    def cards(self, tables: Sequence[Table]) -> tuple[ColumnCard, ...]:
        """What became of the columns of the training tables, after :meth:`features`."""
        rows = sum(map(len, tables))
        cards = [ColumnCard(each.name, each.became, each.values.iloc[:rows]) for each in self.read]
        used = {each.name for each in self.read} | {*(self.columns.dates or ())} - {*(self.columns.exclude or ())}
        for name in _names_of(tables):
            if name not in {*used, self.target, self.group}:
                there = [table if name in table.frame else _with_empty(table, name) for table in tables]
                values = [without_gaps(table, name, "exclude", self.columns).astype(object) for table in there]
                cards.append(ColumnCard(name, "left out", pd.concat(values, ignore_index=True)))
        return tuple(cards)

    def check(self, tables: Mapping[str, Table]) -> None:
        """Raise ConfigurationError where not all tables have the columns to predict from, as of :meth:`features`."""
        names, problems = self.names(list(tables.values())), []
        for name in names:
            without = [each for each, table in tables.items() if name not in table.frame]
            if without:
                has = next(each for each, table in tables.items() if name in table.frame)
                problems.append(
                    ColumnError(
                        f"The tables have other columns: {listed(without, show=repr)} "
                        f"({tables[without[0]].path}) lacks {name}, compared with {has!r} ({tables[has].path}).",
                        {"exclude": [name]},
                    )
                )
        if problems:
            common = [name for name in names if all(name in table.frame for table in tables.values())]
            every = np.ones(sum(map(len, tables.values())), dtype=bool)
            self._read(list(tables.values()), common, every, problems)

    def names(self, tables: Sequence[Table]) -> list[str]:
        """The columns to predict from, whether all tables have them or not."""
        first = tables[0]
        for argument in ("features", "categorical", "dates"):
            for name in getattr(self.columns, argument) or ():
                first.column(name, argument)
        for name in self.columns.exclude or ():
            next((table for table in tables if name in table.frame), first).column(name, "exclude")
        taken = {self.target, self.group, *(self.columns.exclude or ())}
        names = [name for name in (self.columns.features or _names_of(tables)) if name not in taken]
        if not names:
            raise ConfigurationError(f"Columns: no column is left to predict {self.target!r} from.")
        return names

    def _read(
        self, tables: Sequence[Table], names: Sequence[str], fit: np.ndarray, lacking: Sequence[ColumnError] = ()
    ) -> list[ReadColumn]:
        """What the columns hold. Of all that cannot be used one ConfigurationError, with a line to paste."""
        found: list[ReadColumn] = []
        problems = list(lacking)
        for name in names:
            try:
                found += self._column(tables, name, fit)
            except ColumnError as error:
                problems.append(error)
        if not problems:
            return found
        problems += [each.doubt for each in found if each.doubt is not None]
        lines = [str(problem) for problem in problems]
        if len(lines) > 1:
            lines = [f"{len(lines)} columns cannot be used as they are:", *(f"  - {each}" for each in lines)]
        options = json.dumps(self.columns.remedied(problems), ensure_ascii=False)
        lines += ["With this line they can (in Python columns={...}):", f"  columns: {options}"]
        raise ConfigurationError("\n".join(lines))

    def _column(self, tables: Sequence[Table], name: str, fit: np.ndarray) -> list[ReadColumn]:
        """A column of all tables, so that whatever is fitted is applied alike; of dates perhaps several."""
        if name in (self.columns.dates or {}):
            parts = read_dates(tables, name, self.columns)
        else:
            kind, values = read_column(tables, name, self.columns)
            parts = [(name, kind, values)]
        found = []
        for part, kind, values in parts:
            if values[fit].isna().all():
                message = f"{all_of(tables)}: no training row has a {part!r}. Leave the column out (exclude: [{name}])."
                raise ColumnError(message, {"exclude": [name]})
            if kind == WORDS or kind in ("month", "weekday"):
                found.append(ReadColumn(part, kind, values, self._categories(tables, part, values, fit)))
            else:
                doubt = None if part in (self.columns.features or ()) else _identifier(tables, part, values)
                found.append(ReadColumn(part, kind, values, doubt=doubt))
        return found

    def _categories(self, tables: Sequence[Table], name: str, words: pd.Series, fit: np.ndarray) -> list[str]:
        """The values of the training rows, sorted; of what the others have besides, it is said."""
        known = sorted(words[fit].dropna().unique())
        unseen = sorted({*words.dropna().unique()} - {*known})
        if len(known) > self.columns.max_categories:
            numbers = np.isfinite(parsed(known)).all()
            hint = " Numbers that are kept as words: make them numbers (astype(float))." if numbers else ""
            raise ColumnError(
                f"{all_of(tables)}: {name!r} has {len(known)} different values, more than max_categories="
                f"{self.columns.max_categories}. An identifier or free text is no feature: leave it out (exclude: "
                f"[{name}]), or raise max_categories.{hint}",
                {"exclude": [name]},
            )
        if unseen:
            rank_zero_warn(
                f"{all_of(tables)}: no training row has {listed(unseen, show=repr)} in {name!r}. Validation and test "
                "rows with it are encoded as having none of the categories."
            )
        for alike in spelled_alike(known):
            rank_zero_warn(
                f"{all_of(tables)}: {name!r} has {', '.join(map(repr, alike))}, each a category of its own. If they "
                "are one, spell it alike."
            )
        return known

    def _log_kinds(self, tables: Sequence[Table]) -> None:
        """What the columns were taken for, a line for each kind, and what gaps look like; what is in doubt, as a
        warning."""
        for doubt in (each.doubt for each in self.read if each.doubt is not None):
            rank_zero_warn(str(doubt))
        kinds = {kind: [each.name for each in self.read if each.kind == kind] for kind in (r.kind for r in self.read)}
        kinds["gaps"] = []
        for each in self.read:
            if each.missing.any() and each.name not in (self.columns.dates or {}):
                marks = {word for table in tables if each.name in table.frame for word in self._marks(table, each.name)}
                kinds["gaps"].append(each.name + "".join(f" {mark!r}" for mark in sorted(marks - {""})))
        lines = [f"  {what}: {listed(names, 20)}" for what, names in kinds.items() if names]
        hint = " (otherwise: categorical, gaps and exclude of the columns)"
        rank_zero_info("\n".join([f"{all_of(tables)} is read as{hint}", *lines]))

    def _marks(self, table: Table, name: str) -> Iterable[str]:
        words = table.words(name, "features")
        return words[words.isin(self.columns.missing(name, table.typed))].unique()


def _named(columns: Sequence[ReadColumn]) -> list[str]:
    return [each.name for each in columns]


def _names_of(tables: Sequence[Table]) -> list[str]:
    return list(dict.fromkeys(name for table in tables for name in table.frame.columns))


def _with_empty(table: Table, name: str) -> Table:
    return Table(table.path, table.frame.assign(**{name: None}), table.typed)


def _identifier(tables: Sequence[Table], name: str, numbers: pd.Series) -> ColumnError | None:
    """What speaks against numbers that are called as identifiers are, and are whole and no two alike in any table."""
    if not _IDENTIFIER.search(name):
        return None
    for part in np.split(numbers.to_numpy(dtype=np.float64), np.cumsum([len(table) for table in tables])[:-1]):
        held = part[np.isfinite(part)]
        if len(held) <= FEW or len(np.unique(held)) < len(held) or (held != np.round(held)).any():
            return None
    return ColumnError(
        f"{tables[0].path}: {name!r} has another whole number in every row. An identifier is no feature: leave it out "
        f"(exclude: [{name}]).",
        {"exclude": [name]},
    )


def standardize(x: np.ndarray, fit: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each group's columns less their mean, over their standard deviation; gaps become 0, which is the mean.

    By scikit-learn's ``StandardScaler``, fitted to the group's values in the rows that ``fit`` marks. A column without
    spread is only shifted. Where a group has no value to fit to, all of its values become 0.

    Args:
        x: float64 ``[N, D]``, NaN where there is a gap.
        fit: which rows the statistics are taken from, bool ``[N]``.
        groups: the group of each row ``[N]``; one for all pools the statistics.

    Returns:
        float64 ``[N, D]``, finite.

    Example:
        >>> x = np.array([[1.0], [3.0], [np.nan], [5.0]])
        >>> standardize(x, fit=np.array([True, True, True, False]), groups=np.zeros(4)).tolist()
        [[-1.0], [1.0], [0.0], [3.0]]
    """
    scaled = np.zeros_like(x)
    for group in np.unique(groups):
        rows = groups == group
        with np.errstate(invalid="ignore"):  # of a column without a value
            scaled[rows] = StandardScaler().fit(x[rows & fit]).transform(x[rows])
    return np.nan_to_num(scaled, nan=0.0, posinf=0.0, neginf=0.0)
