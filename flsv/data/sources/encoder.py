"""Rows of tables as features and targets, fitted to the training rows only."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from sklearn.preprocessing import OneHotEncoder
from torch import Tensor

from flsv.data.groups import spelled_alike
from flsv.data.sources.base import ColumnCard
from flsv.data.sources.columns import Columns
from flsv.data.sources.dates import date_columns, without_dates
from flsv.data.sources.table import CATEGORIES, NUMBERS, TRUTH, Table, parsed
from flsv.data.sources.values import (
    check_no_days,
    check_written_alike,
    class_labels,
    class_names,
    declared_kind,
    identifier_found,
    numbers_of,
    numeric_target,
    say_kinds,
    standardise,
    with_values,
)
from flsv.errors import ColumnError, ConfigurationError, listed


@dataclass(frozen=True)
class ReadColumn:
    """How a column became inputs.

    Args:
        name: of it, or of one of the columns that dates became.
        kind: what it was taken for.
        missing: where it has gaps, bool ``[N]``.
        values: ``[N]``, numbers with NaN for a gap, or words.
        categories: of words, of the training rows.
        marks: what its gaps look like.
        doubt: what speaks against using it, if anything.
    """

    name: str
    kind: str
    missing: np.ndarray
    values: np.ndarray
    categories: Sequence[str] | None
    marks: Collection[str]
    doubt: ColumnError | None = None

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
        owner: whose options these are, for messages.

    Attributes:
        feature_names: ``D`` names, such as ``("age", "ward=A", "ward=B", "age missing")``, after :meth:`features`.
        read: the columns that these are of, likewise.
        target_mean, target_std: what a prediction is multiplied by (``target_std``) and then moved by to be in the
            table's unit; 0 and 1 unless ``standardise_target``, after :meth:`targets`.

    Example:
        >>> import pandas as pd
        >>> frame = pd.DataFrame({"age": ["30", "50", ""], "ill": ["no", "yes", "no"]})
        >>> table = Table("wards.csv", frame, np.arange(2, 5))
        >>> encoder = TableEncoder(Columns(), "ill", None, "table")
        >>> fit = np.array([True, True, True])
        >>> encoder.features([table], fit, np.zeros(3))[0].tolist(), encoder.feature_names
        ([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], ('age', 'age missing'))
        >>> encoder.classes([table]), encoder.targets([table], fit)[0]
        (('no', 'yes'), tensor([0, 1, 0]))
    """

    def __init__(self, columns: Columns, target: str, group: str | None, owner: str) -> None:
        self.columns, self.target, self.group, self.owner = columns, target, group, owner
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()
        self.read: tuple[ReadColumn, ...] = ()
        self._classes: tuple[str, ...] | None = None

    def rows(self, table: Table) -> Table:
        """The rows that have a target."""
        return with_values(table, self.target, "target", self._gaps(table))

    def features(self, tables: Sequence[Table], fit: np.ndarray, groups: np.ndarray | None) -> list[Tensor]:
        """Features of each table, float32 ``[N_i, D]``.

        Args:
            tables: training tables, then others.
            fit: which rows tell statistics and categories, bool ``[N]`` over all tables.
            groups: the group of each row ``[N]`` for ``statistics="group"``.

        Raises:
            ConfigurationError: columns that a table has not, partly numbers and partly words, without a value or with
                too many categories; groups without a training row.
        """
        found = self._read(tables, self.names(tables), fit)
        for doubt in (each.doubt for each in found if each.doubt is not None):
            rank_zero_warn(str(doubt))
        self.read = tuple(found)
        numbers = {each.name: each.values for each in found if each.categories is None}
        words = {each.name: each.values for each in found if each.categories is not None}
        categories = [each.categories for each in found if each.categories is not None]
        missing = {each.name: each.missing for each in found}
        self._say(tables, found)
        whole = self._joined(
            numbers, words, categories, {n: g for n, g in missing.items() if g[fit].any()}, fit, groups
        )
        return [torch.from_numpy(part.copy()) for part in _cut(whole, tables)]

    def _joined(
        self,
        numbers: Mapping[str, np.ndarray],
        words: Mapping[str, np.ndarray],
        categories: Sequence[Sequence[str]],
        gappy: Mapping[str, np.ndarray],
        fit: np.ndarray,
        groups: np.ndarray | None,
    ) -> np.ndarray:
        """The features ``[N, D]``, numbers first, then categories, then where values are missing; and their names."""
        blocks = [self._scaled(np.stack(list(numbers.values()), axis=1), fit, groups)] if numbers else []
        if words:
            encoder = OneHotEncoder(categories=categories, handle_unknown="ignore", sparse_output=False)  # type: ignore[arg-type]
            blocks.append(encoder.fit_transform(np.stack(list(words.values()), axis=1)))
        blocks += [gaps[:, None] for gaps in gappy.values()]
        self.feature_names = (
            *numbers,
            *(f"{name}={category}" for name, known in zip(words, categories) for category in known),
            *(f"{name} missing" for name in gappy),
        )
        return np.concatenate(blocks, axis=1, dtype=np.float32, casting="unsafe")

    def classes(self, tables: Sequence[Table]) -> tuple[str, ...] | None:
        """The classes' names by training tables; None for regression."""
        if self.columns.task == "classification":
            about, labels = f"target {self.target!r}", [self._target_of(table) for table in tables]
            check_written_alike(tables, labels, about)
            self._classes = class_names(_all_of(tables), [value for column in labels for value in column], about)
        return self._classes

    def targets(self, tables: Sequence[Table], fit: np.ndarray | None = None) -> list[Tensor]:
        """Targets of each table: classes int64 ``[N_i]``, after :meth:`classes`, or numbers float32 ``[N_i]``; not
        standardised without ``fit``.

        Raises:
            ConfigurationError: a class that no training table has, no number, numbers without spread.
        """
        if self._classes is not None:
            values = [self._target_of(table) for table in tables]
            about = f"target {self.target!r}"
            return [class_labels(table, column, self._classes, about) for table, column in zip(tables, values)]
        numbers = [numeric_target(table, self.target) for table in tables]
        if self.columns.standardise_target and fit is not None:
            fitted = np.concatenate(numbers)[fit]
            self.target_mean, self.target_std = float(fitted.mean()), float(fitted.std())
            if self.target_std <= 1e-12 * abs(self.target_mean):
                raise ConfigurationError(
                    f"{_all_of(tables).path}: all training rows have the same {self.target!r} (target)."
                )
        return [torch.from_numpy((y - self.target_mean) / self.target_std).float() for y in numbers]

    def cards(self, tables: Sequence[Table]) -> tuple[ColumnCard, ...]:
        """What became of the columns of the training tables, after :meth:`features`."""
        rows = sum(map(len, tables))
        cards = [ColumnCard(each.name, each.became, each.missing[:rows]) for each in self.read]
        used = {each.name for each in self.read} | {*(self.columns.dates or ())} - {*(self.columns.exclude or ())}
        for name in dict.fromkeys(name for table in tables for name in table.frame.columns):
            if name not in {*used, self.target, self.group}:
                gaps = [
                    table.gaps(name, self._gaps(table)) if name in table.frame else np.ones(len(table), bool)
                    for table in tables
                ]
                cards.append(ColumnCard(name, "left out", np.concatenate(gaps)))
        return tuple(cards)

    def _gaps(self, table: Table) -> frozenset[str]:
        return self.columns.missing(typed=table.typed)

    def _target_of(self, table: Table) -> list[str]:
        return table.text(self.target, "target").tolist()

    def check(self, tables: Mapping[str, Table]) -> None:
        """Raise ConfigurationError where not all tables have the columns to predict from, as of :meth:`features`."""
        names, problems = self.names(list(tables.values())), []
        common = [name for name in names if all(name in table.frame for table in tables.values())]
        for name in names:
            if name not in common:
                without = [each for each, table in tables.items() if name not in table.frame]
                has = next(each for each, table in tables.items() if name in table.frame)
                problems.append(
                    ColumnError(
                        f"The tables have other columns: {listed(without, show=repr)} "
                        f"({tables[without[0]].path}) lacks {name}, compared with {has!r} ({tables[has].path}).",
                        {"exclude": [name]},
                    )
                )
        if problems:
            every = np.ones(sum(map(len, tables.values())), dtype=bool)
            self._read(list(tables.values()), common, every, problems)

    def names(self, tables: Sequence[Table]) -> list[str]:
        """The columns to predict from, whether all tables have them or not."""
        first = tables[0]
        given: dict[str, Any] = {name: getattr(self.columns, name) for name in ("features", "categorical", "dates")}
        for argument, names in given.items():
            for name in names or ():
                first.column(name, argument)
        for name in self.columns.exclude or ():
            next((table for table in tables if name in table.frame), first).column(name, "exclude")
        there = list(dict.fromkeys(name for table in tables for name in table.frame.columns))
        taken = {self.target, self.group, *(self.columns.exclude or ())}
        names = [name for name in (given["features"] or there) if name not in taken]
        if not names:
            raise ConfigurationError(f"{self.owner}: no column is left to predict {self.target!r} from.")
        return names

    def _read(
        self, tables: Sequence[Table], names: Sequence[str], fit: np.ndarray, known: Sequence[ColumnError] = ()
    ) -> list[ReadColumn]:
        """What the columns hold. Of all that cannot be used one ConfigurationError, with a line to paste."""
        found: list[ReadColumn] = []
        problems = list(known)
        for name in names:
            try:
                found += self._column(tables, name, fit)
            except ColumnError as error:
                problems.append(error)
        if not problems:
            return found
        problems += [each.doubt for each in found if each.doubt is not None]
        told = [str(problem) for problem in problems]
        if len(told) > 1:
            told = [f"{len(told)} columns cannot be used as they are:", *(f"  - {each}" for each in told)]
        options = json.dumps(self.columns.remedied(problems, tables[0].typed), ensure_ascii=False)
        line = f"columns: {options}" if self.owner == "Columns" else f"{self.owner}(**{options})"
        raise ConfigurationError("\n".join([*told, "With this line they can (in Python columns={...}):", f"  {line}"]))

    def _column(self, tables: Sequence[Table], name: str, fit: np.ndarray) -> list[ReadColumn]:
        """A column of all tables, so that whatever is fitted is applied alike; of dates perhaps several."""
        how = (self.columns.dates or {}).get(name)
        if how is None:
            for table in tables:
                table.column(name, "features")
            return [self._one(tables, name, fit)]
        form = self.columns.date_format
        made = [without_dates(table, name, how, form, self._gaps(table)) for table in tables]
        return [replace(self._one(made, each, fit), kind=kind) for each, kind in date_columns(name, how).items()]

    def _one(self, tables: Sequence[Table], name: str, fit: np.ndarray) -> ReadColumn:
        missing = np.concatenate([table.gaps(name, self._gaps(table)) for table in tables])
        given = name in (self.columns.categorical or ())
        kind = CATEGORIES if given else declared_kind(tables, name)
        column = None if kind == CATEGORIES else numbers_of(tables, name, missing, kind)
        if missing[fit].all():
            message = (
                f"{_all_of(tables).path}: no training row has a {name!r}. Leave the column out (exclude: [{name}])."
            )
            raise ColumnError(message, {"exclude": [name]})
        parts = [(table, gap) for table, gap in zip(tables, _cut(missing, tables)) if gap.any()]
        parsed = [(table, gap) for table, gap in parts if not table.has_numbers(name) or self._gaps(table) != {""}]
        marks = {text for table, gap in parsed for text in table.text(name)[gap]}
        marks |= {""} if len(parsed) < len(parts) else set()
        if column is not None:
            chosen = name in (self.columns.features or ())
            doubt = None if chosen else identifier_found(tables, name, column)
            return ReadColumn(name, kind or NUMBERS, missing, column, None, marks, doubt)
        text = np.concatenate([table.text(name) for table in tables])
        if kind is None:
            check_no_days(_all_of(tables), name, text[~missing])
        words = np.where(missing, "", text)
        return ReadColumn(name, CATEGORIES, missing, words, self._categories(_all_of(tables), name, words, fit), marks)

    def _say(self, tables: Sequence[Table], found: Sequence[ReadColumn]) -> None:
        """Say what was taken for what, and what a gap looks like."""
        say_kinds(_all_of(tables), {each.name: each.kind for each in found}, {each.name: each.marks for each in found})

    def _categories(self, table: Table, name: str, values: np.ndarray, fit: np.ndarray) -> list[str]:
        """The values of the training rows, sorted; of what the others have besides, it is said."""
        known = sorted(set(values[fit]) - {""})
        unseen = sorted(set(values) - {"", *known})
        if len(known) > self.columns.max_categories:
            numbers = np.isfinite(parsed(known)).all()
            hint = " Numbers that are kept as words: make them numbers (astype(float))." if numbers else ""
            raise ColumnError(
                f"{table.path}: {name!r} has {len(known)} different values, more than max_categories="
                f"{self.columns.max_categories}. An identifier or free text is no feature: leave it out (exclude: "
                f"[{name}]), or raise max_categories.{hint}",
                {"exclude": [name]},
            )
        if unseen:
            rank_zero_warn(
                f"{table.path}: no training row has {listed(unseen, show=repr)} in {name!r}. Validation and test rows "
                "with it are encoded as having none of the categories."
            )
        for alike in spelled_alike(known):
            rank_zero_warn(
                f"{table.path}: {name!r} has {', '.join(map(repr, alike))}, each a category of its own. If they are "
                "one, spell it alike."
            )
        return known

    def _scaled(self, numbers: np.ndarray, fit: np.ndarray, groups: np.ndarray | None) -> np.ndarray:
        if self.columns.statistics == "pooled":
            return standardise(numbers, fit, np.zeros(len(fit)))
        assert groups is not None
        strangers = np.setdiff1d(groups, groups[fit])
        if len(strangers):
            raise ConfigurationError(
                f"{self.owner}(statistics='group'): {self.group!r} has groups without a training row: "
                f"{', '.join(map(str, strangers[:10]))}. With statistics='pooled' they need none."
            )
        return standardise(numbers, fit, groups)


def _cut(whole: np.ndarray, tables: Sequence[Table]) -> list[np.ndarray]:
    return np.split(whole, np.cumsum([len(table) for table in tables])[:-1])


def _all_of(tables: Sequence[Table]) -> Table:
    """The first, under a name for messages about all of them."""
    return tables[0] if len(tables) == 1 else replace(tables[0], path=f"the {len(tables)} tables")
