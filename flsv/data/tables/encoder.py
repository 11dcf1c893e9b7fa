"""Encodes rows of tables as features and targets, fitted to the training rows only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.data.groups import spelled_alike
from flsv.data.tables.columns import Columns
from flsv.data.tables.table import CATEGORIES, NUMBERS, TRUTH, CSVFile
from flsv.data.tables.values import (
    as_numbers,
    check_no_days,
    class_labels,
    class_names,
    declared_kind,
    find_gaps,
    numbers_of,
    numeric_target,
    one_hot,
    say_kinds,
    standardise,
    with_values,
)
from flsv.errors import ConfigurationError


class TableEncoder:
    """Encodes tables with the same columns, of one or several clients and of the server.

    Args:
        columns: which columns, and how.
        target: the column to predict.
        group: a column that says whose the rows are, which is no feature; None: there is none.
        owner: whose options these are, for messages.

    Attributes:
        feature_names: ``D`` names, such as ``("age", "ward=A", "ward=B", "age missing")``, after :meth:`features`.
        target_mean, target_std: what a prediction is multiplied by (``target_std``) and then moved by to be in the
            table's unit; 0 and 1 unless ``standardise_target``, after :meth:`targets`.

    Example:
        >>> table = CSVFile("wards.csv", {"age": ["30", "50", ""], "ill": ["no", "yes", "no"]}, [2, 3, 4])
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
        self._classes: tuple[str, ...] | None = None

    def rows(self, table: CSVFile) -> CSVFile:
        """The rows that have a target."""
        return with_values(table, self.target, "target", self._gaps(table))

    def features(self, tables: Sequence[CSVFile], fit: np.ndarray, groups: np.ndarray | None) -> list[Tensor]:
        """Features of each table, float32 ``[N_i, D]``.

        Args:
            tables: training tables, then others.
            fit: which rows tell statistics and categories, bool ``[N]`` over all tables.
            groups: the group of each row ``[N]`` for ``statistics="group"``.

        Raises:
            ConfigurationError: columns that a table has not, partly numbers and partly words, without a value or with
                too many categories; groups without a training row.
        """
        numbers: list[np.ndarray] = []
        codes: list[np.ndarray] = []
        indicators: list[np.ndarray] = []
        titles: tuple[list[str], ...] = ([], [], [])
        kinds: dict[str, str] = {}
        gaps: dict[str, list[str]] = {}
        for name in self._names(tables):
            # One column of all tables, so that whatever is fitted is applied alike.
            values = [value.strip() for table in tables for value in table.column(name, "features")]
            missing = np.concatenate([find_gaps(table.columns[name], self._gaps(table)) for table in tables])
            given = name in (self.columns.categorical or ())
            kind = CATEGORIES if given else declared_kind(tables, name)
            if kind == TRUTH:
                values = [{"True": "1", "False": "0"}.get(value, value) for value in values]
            column = (
                None if kind == CATEGORIES else numbers_of(tables, name, values, missing, declared=kind is not None)
            )
            if missing[fit].all():
                raise ConfigurationError(
                    f"{tables[0].path}: no training row has a {name!r}. Leave the column out (exclude: [{name}])."
                )
            if column is not None:
                numbers.append(column)
                titles[0].append(name)
            else:
                if kind is None:
                    check_no_days(tables[0], name, [value for value, gap in zip(values, missing) if not gap])
                categories = self._categories(tables[0], name, values, missing, fit)
                codes.append(one_hot(["" if gap else value for value, gap in zip(values, missing)], categories))
                titles[1].extend(f"{name}={category}" for category in categories)
            kinds[name] = kind or (CATEGORIES if column is None else NUMBERS)
            gaps[name] = [value for value, gap in zip(values, missing) if gap]
            if missing[fit].any():
                indicators.append(missing.astype(float))
                titles[2].append(f"{name} missing")
        blocks = [self._scaled(np.stack(numbers, axis=1), fit, groups)] if numbers else []
        blocks += codes + [indicator[:, None] for indicator in indicators]
        say_kinds(tables[0], kinds, gaps)
        self.feature_names = tuple(titles[0] + titles[1] + titles[2])
        whole = np.concatenate(blocks, axis=1).astype(np.float32)
        return [torch.from_numpy(part.copy()) for part in _cut(whole, tables)]

    def classes(self, tables: Sequence[CSVFile]) -> tuple[str, ...] | None:
        """The classes' names by training tables; None for regression."""
        if self.columns.task == "classification":
            values = [value for table in tables for value in self._target_of(table)]
            self._classes = class_names(tables[0], values, f"target {self.target!r}")
        return self._classes

    def targets(self, tables: Sequence[CSVFile], fit: np.ndarray) -> list[Tensor]:
        """Targets of each table: classes int64 ``[N_i]``, after :meth:`classes`, or numbers float32 ``[N_i]``.

        Raises:
            ConfigurationError: a class that no training table has, no number, numbers without spread.
        """
        values = [self._target_of(table) for table in tables]
        if self._classes is not None:
            about = f"target {self.target!r}"
            return [class_labels(table, column, self._classes, about) for table, column in zip(tables, values)]
        numbers = [numeric_target(table, self.target, column) for table, column in zip(tables, values)]
        if self.columns.standardise_target:
            fitted = np.concatenate(numbers)[fit]
            self.target_mean, self.target_std = float(fitted.mean()), float(fitted.std())
            if self.target_std <= 1e-12 * abs(self.target_mean):
                raise ConfigurationError(f"{tables[0].path}: all training rows have the same {self.target!r} (target).")
        return [torch.from_numpy((y - self.target_mean) / self.target_std).float() for y in numbers]

    def _gaps(self, table: CSVFile) -> frozenset[str]:
        return self.columns.missing(typed=table.kinds is not None)

    def _target_of(self, table: CSVFile) -> list[str]:
        return [value.strip() for value in table.column(self.target, "target")]

    def _names(self, tables: Sequence[CSVFile]) -> list[str]:
        first = tables[0]
        given: dict[str, Any] = {name: getattr(self.columns, name) for name in ("features", "exclude", "categorical")}
        for argument, names in given.items():
            for name in names or ():
                first.column(name, argument)
        taken = {self.target, self.group, *(given["exclude"] or ())}
        names = [name for name in (given["features"] or first.columns) if name not in taken]
        if not names:
            raise ConfigurationError(f"{self.owner}: no column is left to predict {self.target!r} from.")
        return names

    def _categories(
        self, table: CSVFile, name: str, values: Sequence[str], missing: np.ndarray, fit: np.ndarray
    ) -> list[str]:
        known = {value for value, gap, used in zip(values, missing, fit) if used and not gap}
        unseen = {value for value, gap in zip(values, missing) if not gap} - known
        if len(known) > self.columns.max_categories:
            numbers = as_numbers(sorted(known), np.zeros(len(known), dtype=bool)) is not None
            hint = " Numbers that are kept as words: make them numbers (astype(float))." if numbers else ""
            raise ConfigurationError(
                f"{table.path}: {name!r} has {len(known)} different values, more than max_categories="
                f"{self.columns.max_categories}. An identifier or free text is no feature: leave it out (exclude: "
                f"[{name}]), or raise max_categories.{hint}"
            )
        if unseen:
            shown = ", ".join(repr(value) for value in sorted(unseen)[:5]) + (", ..." if len(unseen) > 5 else "")
            rank_zero_warn(
                f"{table.path}: no training row has {shown} in {name!r}. Validation and test rows with it are encoded "
                "as having none of the categories."
            )
        for alike in spelled_alike(sorted(known)):
            rank_zero_warn(
                f"{table.path}: {name!r} has {', '.join(map(repr, alike))}, each a category of its own. If they are "
                "one, spell it alike."
            )
        return sorted(known)

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


def _cut(whole: np.ndarray, tables: Sequence[CSVFile]) -> list[np.ndarray]:
    return np.split(whole, np.cumsum([len(table) for table in tables])[:-1])
