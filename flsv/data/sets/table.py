"""A CSV table with a column that says whose each row is: clinics, schools, districts."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from flsv.data.sets.columns import Columns
from flsv.data.sets.csv_data import CSVData
from flsv.data.sets.csv_file import CSVFile
from flsv.data.sets.table_encoder import TableEncoder


class TableData(CSVData):
    """The rows of a CSV file: features, one target, and perhaps a column with the natural clients.

    Samples are ``(features float32 [D], target)``; the target is a class (int64) or a number (float32). What becomes of
    the columns, and whose rows tell their means, deviations and categories, says :class:`~flsv.data.Columns`. Training
    rows are all that are not held out here, those that a federation's clients hold out themselves included.

    Args:
        path: the file, looked up below ``root``, then as it is.
        target: the column to predict.
        task: see :class:`~flsv.data.Columns`, as all up to ``max_categories`` but ``group``.
        group: the column whose values are the clients of a :class:`~flsv.data.GroupPartitioner`; no feature.
        features: columns to predict from; None: all others, with identifiers and what came after the target.
        exclude: columns to leave out of these.
        categorical: columns whose numbers are names of categories.
        gaps: what a missing value looks like, besides white space around it.
        statistics: whose rows tell a column's mean and deviation: ``"pooled"`` or ``"group"``.
        standardise_target: for regression.
        max_categories: how many categories a column may have; more are taken for a mistake.
        options: see :class:`~flsv.data.CSVData`.

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

    pooled_inputs = True

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
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        self.columns = Columns(
            task, features, exclude, categorical, gaps, statistics, standardise_target, max_categories, self.delimiter
        )
        self.columns.check_roles(target, group, "TableData")
        self.target, self.task = target, task
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()

    def encode(self, train: CSVFile, test: CSVFile | None) -> None:
        encoder = TableEncoder(self.columns, self.target, self.group, "TableData")
        files = [encoder.rows(file) for file in (train, test) if file is not None]
        groups = [self.read_groups(file) for file in files]
        splits = self.split(len(files[0]), groups[0])
        fit = np.zeros(sum(map(len, files)), dtype=bool)
        fit[splits["train"]] = True
        # As text: the files may differ in whether all groups are numbers.
        of = (
            None if self.group is None else np.concatenate([group.astype(str) for group in groups if group is not None])
        )
        features = encoder.features(files, fit, of)
        classes = encoder.classes(files[:1])
        targets = encoder.targets(files, fit)
        rest = None if test is None else (features[1], targets[1])
        self.keep((features[0], targets[0]), splits, groups[0], rest, classes)
        self.input_shape = tuple(features[0].shape[1:])
        self.feature_names = encoder.feature_names
        self.target_mean, self.target_std = encoder.target_mean, encoder.target_std
