"""Tables as the data of a federation: one with a column that says whose the rows are, or one of each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data.groups import plain_names
from flsv.data.sources.base import SourceData
from flsv.data.sources.columns import Columns
from flsv.data.sources.csv_data import CSVData
from flsv.data.sources.encoder import TableEncoder
from flsv.data.sources.table import Table
from flsv.data.sources.values import group_values


def tables_source(
    tables: Mapping[str, Table],
    held_out: Mapping[str, Table | None],
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
    columns.check_roles(label, "the client" if clients else group)
    if clients:  # for messages: a file has a name of its own
        tables = {
            name: replace(table, path=f"the {table.path} of {name!r}") if table.typed else table
            for name, table in tables.items()
        }
    encoder = TableEncoder(columns, label, group)
    train = {name: encoder.rows(table) for name, table in tables.items()}
    held = {name: encoder.rows(table) for name, table in held_out.items() if table is not None}
    groups, names = _groups(train, group, clients)
    rows = [*train.values(), *held.values()]
    classes = encoder.classes(list(train.values())) or ()

    def as_sets(features: Sequence[Tensor], targets: Sequence[Tensor]) -> SourceData:
        pairs = list(zip(features, targets))
        sets: dict[str, Any] = {name: TensorDataset(*pair) for name, pair in zip(held, pairs[len(train) :])}
        for name, table in held.items():
            sets[name].row_names = table.row_names(columns.exclude or (), group)
        whole = [torch.cat(parts) for parts in zip(*pairs[: len(train)])]
        found = SourceData(TensorDataset(*whole), **sets, class_names=classes, groups=groups, group_names=names)
        return replace(found, clients=clients, labeled=True)

    def fitted(fit_rows: Sequence[Tensor]) -> SourceData:
        """The data with the features that the clients' training rows tell."""
        fit = np.zeros(sum(map(len, rows)), dtype=bool)
        fit[torch.cat(list(fit_rows)).numpy()] = True
        sets = as_sets(encoder.features(rows, fit), encoder.targets(rows, fit))
        return replace(sets, columns=encoder.cards(list(train.values())))

    # Who trains on which row is not known yet, and a number's scale with it: nothing looks at a number before.
    targets = encoder.targets(rows)
    return replace(as_sets([torch.zeros(len(target), 0) for target in targets], targets), fitted=fitted)


def _groups(tables: Mapping[str, Table], group: str | None, clients: bool) -> tuple[Tensor | None, tuple[str, ...]]:
    if clients:
        return torch.repeat_interleave(torch.tensor([len(table) for table in tables.values()])), tuple(tables)
    if group is None:
        return None, ()
    values, numbers = np.unique(group_values(next(iter(tables.values())), group), return_inverse=True)
    return torch.from_numpy(numbers.reshape(-1).astype(np.int64)), plain_names(values.tolist(), group)


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
        standardize_target: for regression.
        max_categories: how many categories a column may have; more are taken for a mistake.
        options: see :class:`~flsv.data.CSVData`.

    Attributes:
        feature_names: ``D`` names, such as ``("age", "ward=A", "ward=B", "age missing")``.
        target_mean, target_std: what a prediction is multiplied by (``target_std``) and then moved by to be in the
            file's unit; 0 and 1 unless ``standardize_target``.

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
        standardize_target: bool = False,
        max_categories: int = 50,
        **options: Any,
    ) -> None:
        super().__init__(path, group, **options)
        self.columns = Columns(
            task, features, exclude, categorical, gaps, standardize_target, max_categories, self.delimiter
        )
        self.columns.check_roles(target, group)
        self.target, self.task = target, task
        self.target_mean, self.target_std = 0.0, 1.0
        self.feature_names: tuple[str, ...] = ()

    def encode(self, train: Table, test: Table | None) -> None:
        encoder = TableEncoder(self.columns, self.target, self.group)
        files = [encoder.rows(file) for file in (train, test) if file is not None]
        groups = None if self.group is None else group_values(files[0], self.group)
        splits = self.split(len(files[0]), groups)
        fit = np.zeros(sum(map(len, files)), dtype=bool)
        fit[splits["train"]] = True
        features = encoder.features(files, fit)
        cards = encoder.cards(files[:1])
        self.columns_read = tuple(replace(card, values=card.values.iloc[splits["train"]]) for card in cards)
        classes = encoder.classes(files[:1])
        pairs = list(zip(features, encoder.targets(files, fit)))
        self.keep(pairs[0], splits, groups, None if test is None else pairs[1], classes)
        if self.test_set is not None:
            table = files[0].take(splits["test"]) if test is None else files[1]
            self.test_set.row_names = table.row_names(self.columns.exclude or (), self.group)  # type: ignore[attr-defined]
        self.input_shape = tuple(features[0].shape[1:])
        self.feature_names = encoder.feature_names
        self.target_mean, self.target_std = encoder.target_mean, encoder.target_std
