"""A CSV table with a column that says whose each row is: clinics, schools, districts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from flsv.arguments import check_number
from flsv.data.sets.csv_data import CSVData
from flsv.data.sets.csv_file import CSVFile
from flsv.data.sets.csv_values import class_labels, class_names, numbers_of, numeric_target, with_values
from flsv.data.sets.encoding import find_gaps, one_hot, standardise
from flsv.errors import ConfigurationError

GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")


class TableData(CSVData):
    """The rows of a CSV file: features, one target, and perhaps a column with the natural clients.

    Samples are ``(features float32 [D], target)``; the target is a class (int64) or a number (float32).
    Numbers are standardised, and a gap becomes 0, the mean. Other columns are one-hot; a gap, or a category that no
    training row has, is a row of zeros. A column with a gap among the training rows gets another one, 1 where the gap
    is. Rows without a target are left out, with a warning.

    Only training rows tell means, deviations and categories. ``statistics="pooled"`` takes means and deviations over
    all clients together: everybody's rows influence everybody's features a little, and in a federation of several
    machines the clients would have to send, for each column, how many values they have, their sum and their sum of
    squares. ``"group"`` takes each client's own, for its validation and test rows too: no number crosses, but what
    distinguishes the clients' means goes lost, and a small client's are rough. With either, all agree beforehand on the
    columns, the categories' names and which columns have gaps.

    A number to predict is as in the file, or, with ``standardise_target``, less the mean and over the deviation of all
    training rows' (pooled over the clients, whatever ``statistics`` says): squared errors are shares of its variance
    then. Otherwise a network starts far from the mean, and what everybody's training gains first, is the mean.

    Args:
        path: the file, looked up below ``root``, then as it is.
        target: the column to predict.
        task: ``"classification"``, the target's values are classes, or ``"regression"``.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`; no feature.
        features: columns to predict from; None: all others, with identifiers and what came after the target.
        exclude: columns to leave out of these.
        categorical: columns whose numbers are names of categories.
        gaps: what a missing value looks like, besides white space around it.
        statistics: whose rows tell a column's mean and deviation: ``"pooled"`` or ``"group"``.
        standardise_target: for regression.
        max_categories: how many categories a column may have; more are taken for a mistake.
        root: folder of the files.
        test_path: a second file with the same columns for testing.
        batch_size: samples per batch.
        val_fraction: share of the rows for validation.
        test_fraction: share of the rows for testing, unless there is a ``test_path``.
        delimiter: one character between values.
        seed: of the choice of validation and test rows.

    Attributes:
        feature_names: ``D`` names, such as ``("age", "ward=A", "ward=B", "age missing")``.
        target_mean, target_std: what a prediction is multiplied by (``target_std``) and then moved by to be in the
            file's unit; 0 and 1 unless ``standardise_target``.

    Raises:
        ConfigurationError: from construction, arguments out of range or that contradict each other; from ``setup``, a
            file that is no table, columns that it has not, a row without a group, a feature that is partly numbers and
            partly words, too many categories, a target that does not suit the task.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     text = "ward,age,sex,ill\\nA,30,f,no\\nA,50,m,yes\\nB,,f,no\\nB,40,m,yes\\n"
        ...     _ = Path(folder, "wards.csv").write_text(text)
        ...     data = TableData("wards.csv", "ill", group="ward", root=folder, val_fraction=0, test_fraction=0)
        ...     data.setup()
        >>> data.feature_names, data.group_names, data.train_set.classes
        (('age', 'sex=f', 'sex=m', 'age missing'), ('A', 'B'), ('no', 'yes'))
        >>> data.train_set[2]
        (tensor([0., 1., 0., 1.]), tensor(0))
    """

    def __init__(
        self,
        path: str,
        target: str,
        task: Literal["classification", "regression"] = "classification",
        group: str | None = None,
        features: list[str] | None = None,
        exclude: list[str] | None = None,
        categorical: list[str] | None = None,
        gaps: list[str] | None = None,
        statistics: Literal["pooled", "group"] = "pooled",
        standardise_target: bool = False,
        max_categories: int = 50,
        root: str = "data",
        test_path: str | None = None,
        batch_size: int = 32,
        val_fraction: float = 0.1,
        test_fraction: float = 0.0,
        delimiter: str = ",",
        seed: int = 0,
    ) -> None:
        super().__init__(path, test_path, root, group, batch_size, val_fraction, test_fraction, delimiter, seed)
        for name, value, known in (
            ("task", task, ("classification", "regression")),
            ("statistics", statistics, ("pooled", "group")),
        ):
            if value not in known:
                raise ConfigurationError(f"TableData({name}={value!r}): expected one of {', '.join(known)}.")
        check_number(self, "max_categories", max_categories, least=2, whole=True)
        if statistics == "group" and group is None:
            raise ConfigurationError("TableData(statistics='group') needs group, the column with the rows' groups.")
        if standardise_target and task != "regression":
            raise ConfigurationError(
                "TableData(standardise_target=True) is for task: regression; classes have no mean."
            )
        used = [*(features or ()), *(categorical or ())]
        for column, argument in ((target, "target"), (group, "group")):
            if column is not None and column in used:
                raise ConfigurationError(
                    f"TableData: {column!r} is the {argument}, and cannot be among features or categorical."
                )
        if target == group:
            raise ConfigurationError(f"TableData: target and group are both {target!r}.")
        twice = next((column for column in features or () if (features or []).count(column) > 1), None)
        if twice is not None:
            raise ConfigurationError(f"TableData: features has {twice!r} more than once.")
        self.target, self.task, self.statistics = target, task, statistics
        self.features, self.exclude, self.categorical = features, list(exclude or ()), list(categorical or ())
        self.gaps = frozenset(GAPS if gaps is None else ("", *map(str, gaps)))
        self.max_categories, self.standardise_target = max_categories, standardise_target
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()

    def encode(self, train: CSVFile, test: CSVFile | None) -> None:
        files = [with_values(file, self.target, "target", self.gaps) for file in (train, test) if file is not None]
        groups = [self.read_groups(file) for file in files]
        splits = self.split(len(files[0]), groups[0])
        fit = np.zeros(len(files[0]), dtype=bool)
        fit[splits["train"]] = True
        features = self._encoded(files, groups, fit)
        targets, classes = self._targets(files, fit)
        rest = None if test is None else (features[1], targets[1])
        self.keep((features[0], targets[0]), splits, groups[0], rest, classes)
        self.input_shape = tuple(features[0].shape[1:])

    def _encoded(
        self, files: Sequence[CSVFile], groups: Sequence[np.ndarray | None], fit: np.ndarray
    ) -> tuple[Tensor, ...]:
        """Features of each file, float32 ``[N, D]``, with the first one's rows in ``fit`` for statistics."""
        names = self._feature_columns(files[0])
        # One table of all files, so that whatever is fitted is applied alike.
        ends = np.cumsum([len(file) for file in files])[:-1]
        fit = np.concatenate([fit, *(np.zeros(len(file), dtype=bool) for file in files[1:])])
        numbers, codes, indicators, titles = [], [], [], ([], [], [])  # type: ignore[var-annotated]
        for name in names:
            values = [value.strip() for file in files for value in file.column(name, "features")]
            missing = find_gaps(values, self.gaps)
            column = None if name in self.categorical else numbers_of(files, name, values, missing)
            if missing[fit].all():
                raise ConfigurationError(
                    f"{files[0].path}: no training row has a {name!r}. Leave the column out (exclude: [{name}])."
                )
            if column is not None:
                numbers.append(column)
                titles[0].append(name)
            else:
                categories = self._categories(files[0], name, values, missing, fit)
                codes.append(one_hot(["" if gap else value for value, gap in zip(values, missing)], categories))
                titles[1].extend(f"{name}={category}" for category in categories)
            if missing[fit].any():
                indicators.append(missing.astype(float))
                titles[2].append(f"{name} missing")
        blocks = [self._scaled(numbers, fit, groups)] if numbers else []
        blocks += codes + [indicator[:, None] for indicator in indicators]
        self.feature_names = tuple(titles[0] + titles[1] + titles[2])
        whole = np.concatenate(blocks, axis=1).astype(np.float32)
        return tuple(torch.from_numpy(part.copy()) for part in np.split(whole, ends))

    def _feature_columns(self, file: CSVFile) -> list[str]:
        for argument, names in (
            ("features", self.features or []),
            ("exclude", self.exclude),
            ("categorical", self.categorical),
        ):
            for name in names:
                file.column(name, argument)
        taken = {self.target, self.group, *self.exclude}
        names = [name for name in (file.columns if self.features is None else self.features) if name not in taken]
        if not names:
            raise ConfigurationError(f"TableData({self.path!r}): no column is left to predict {self.target!r} from.")
        return names

    def _categories(
        self, file: CSVFile, name: str, values: Sequence[str], missing: np.ndarray, fit: np.ndarray
    ) -> list[str]:
        known = {value for value, gap, used in zip(values, missing, fit) if used and not gap}
        unseen = {value for value, gap in zip(values, missing) if not gap} - known
        if len(known) > self.max_categories:
            raise ConfigurationError(
                f"{file.path}: {name!r} has {len(known)} different values, more than max_categories="
                f"{self.max_categories}. An identifier or free text is no feature: leave it out (exclude: [{name}]), "
                "or raise max_categories."
            )
        if unseen:
            shown = ", ".join(repr(value) for value in sorted(unseen)[:5]) + (", ..." if len(unseen) > 5 else "")
            rank_zero_warn(
                f"{file.path}: no training row has {shown} in {name!r}. Validation and test rows with it are encoded "
                "as having none of the categories."
            )
        return sorted(known)

    def _scaled(
        self, numbers: Sequence[np.ndarray], fit: np.ndarray, groups: Sequence[np.ndarray | None]
    ) -> np.ndarray:
        if self.statistics == "pooled":
            return standardise(np.stack(numbers, axis=1), fit, np.zeros(len(fit)))
        of = np.concatenate([group for group in groups if group is not None])
        of = of.astype(str)  # the files may differ in whether all are numbers
        strangers = np.setdiff1d(of, of[fit])
        if len(strangers):
            raise ConfigurationError(
                f"TableData(statistics='group'): {self.group!r} has groups without a training row: "
                f"{', '.join(map(str, strangers[:10]))}. With statistics='pooled' they need none."
            )
        return standardise(np.stack(numbers, axis=1), fit, of)

    def _targets(self, files: Sequence[CSVFile], fit: np.ndarray) -> tuple[list[Tensor], tuple[str, ...] | None]:
        values = [[value.strip() for value in file.column(self.target, "target")] for file in files]
        if self.task == "classification":
            names = class_names(files[0], values[0], f"target {self.target!r}")
            return [class_labels(f, v, names, f"target {self.target!r}") for f, v in zip(files, values)], names
        numbers = [numeric_target(file, self.target, column) for file, column in zip(files, values)]
        if self.standardise_target:
            self.target_mean, self.target_std = float(numbers[0][fit].mean()), float(numbers[0][fit].std())
            if self.target_std <= 1e-12 * abs(self.target_mean):
                raise ConfigurationError(f"{files[0].path}: all training rows have the same {self.target!r} (target).")
        return [torch.from_numpy((y - self.target_mean) / self.target_std).float() for y in numbers], None
