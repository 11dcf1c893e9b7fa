"""TableEncoder, which encodes tables as features and targets, and the source of tables.

It is fitted on the training rows only. The clients are groups of one table's column, or have a table each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data.groups import check_spelling, client_names_of
from flsv.data.labels import chosen_by_rarity
from flsv.data.sources.agreed import LARGEST_NUMBER, AgreedEncoder, ColumnCode, TableSummary
from flsv.data.sources.base import Reading, SourceData
from flsv.data.sources.column_values import (
    by_format,
    read_column,
    read_columns,
    with_gaps_as_nan,
)
from flsv.data.sources.columns import ColumnCard, Columns, as_columns, raise_problems
from flsv.data.sources.dictionary import refuse_misfits
from flsv.data.sources.frames import (
    as_texts,
    by_file,
    category_names,
    concatenated_tables,
    places_of_words,
)
from flsv.data.sources.notation import parse_numbers
from flsv.data.sources.summaries import (
    agreed_classes,
    agreed_encoder,
    count_frequent,
    moments_of_enough,
    summarize_column,
)
from flsv.data.sources.table import Table
from flsv.utilities.errors import ColumnError, ConfigurationError, listed


class TableEncoder:
    """Encoder that turns the tables of clients and server, which have the same columns, into features and targets.

    Attributes:
        agreed: by what columns become features, once they do.
        feature_names: names of the ``D`` features, such as ``("age", "ward=A", "ward=B", "age missing")``.
        read: a :class:`ColumnCard` for each column from which features were made.
        target_mean, target_std: mean and standard deviation of a standardized target, else 0 and 1. A prediction times
            ``target_std`` plus ``target_mean`` is in the unit of the table.

    Example:
        >>> frame = pd.DataFrame({"age": ["30", "50", ""], "ill": ["no", "yes", "no"]})
        >>> table = Table("wards.csv", frame)
        >>> encoder = TableEncoder(Columns(), "ill")
        >>> rows_by_client = [np.array([0, 1]), np.array([2])]
        >>> encoder.features(table, rows_by_client).tolist(), encoder.feature_names
        ([[-1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], ('age', 'age missing'))
        >>> encoder.classes(table), encoder.targets(table)
        (('no', 'yes'), tensor([0, 1, 0]))
    """

    def __init__(
        self,
        columns: Columns,
        target: str,
        group: str | None = None,
        pos_label: Any = None,
        is_alone: bool = False,
        split_columns: Sequence[str] = (),
    ) -> None:
        columns.check_roles(target, group)
        if columns.agreed is not None and columns.agreed.target not in (None, target):
            raise ConfigurationError(
                f"labels: {target!r} is to be predicted, and the data dictionary has target: "
                f"{columns.agreed.target!r}."
            )
        self._split_columns = split_columns
        self._is_alone = is_alone
        self.columns = columns
        self.target = target
        self.group = group
        self.pos_label = pos_label
        self.agreed: AgreedEncoder | None = columns.agreed
        self.read: tuple[ColumnCard, ...] = ()
        self._classes: tuple[str, ...] | None = None

    @property
    def feature_names(self) -> tuple[str, ...]:
        return () if self.agreed is None else self.agreed.feature_names

    @property
    def target_mean(self) -> float:
        return 0.0 if self.agreed is None else self.agreed.target_mean

    @property
    def target_std(self) -> float:
        return 1.0 if self.agreed is None else self.agreed.target_scale

    def rows_with_target(self, table: Table) -> Table:
        """Return the rows that have a target. Warn if others are left out."""
        targets = with_gaps_as_nan(table, self.target, "target", self.columns)
        is_missing = targets.isna().to_numpy()
        if is_missing.all():
            raise ConfigurationError(f"{table.path}: no row has a {self.target!r} (labels).")
        if is_missing.any():
            rank_zero_warn(
                f"{table.path}: {is_missing.sum()} of {len(table)} rows have no {self.target!r} (labels) and are left "
                "out."
            )
            return table.take(np.flatnonzero(~is_missing))
        return table

    def features(
        self,
        table: Table,
        rows_by_client: Sequence[np.ndarray],
    ) -> Tensor:
        """Encode numbers, categories, and marks of missing values as features, float32 ``[N, D]``.

        ``rows_by_client`` has the positions of each client's training rows, on which the encoder is fitted, unless the
        options have an encoder.
        """
        # Read the columns, whose cards are in `self.read` then.
        unreadable = self.read_table(table)

        # Agree on categories and scales.
        self.agreed = self.columns.agreed
        if self.agreed is None:
            self.agreed = self._fit_encoder(table, rows_by_client, unreadable)
        raise_problems(list(unreadable.values()), self.columns)
        self._log_kinds(table)

        # Encode. Columns [N, k] of the features: numbers first, then words, then marks of missing values.
        numbers = [np.zeros((len(table), 0))]
        words = []
        marks = []
        cards = {card.name: card for card in self.read}
        for code in self.agreed.columns:
            card = cards[code.name]
            if code.categories is None:
                numbers.append(_standardized(card.values, code))
            else:
                words.append(_one_hot(card.values, code.categories))
                cards[code.name] = replace(card, categories=list(code.categories))
            if code.gaps:
                is_missing = card.values.isna().to_numpy(dtype=np.float64)
                marks.append(is_missing[:, None])
        self.read = tuple(cards.values())  # which now tell the categories, too
        features = np.concatenate([*numbers, *words, *marks], axis=1)
        return torch.from_numpy(features.astype(np.float32))

    def read_table(self, table: Table) -> dict[str, ColumnError]:
        """Read the columns that become features, and store them in :attr:`read`. Return errors of unusable ones."""
        cards, problems = read_columns(table, self.names(table), self.columns)
        self.read = tuple(cards)
        if self.columns.agreed is None:
            return problems

        expected_kinds = {code.name: code.kind_as_read for code in self.columns.agreed.columns}
        for card in cards:
            has_values = card.values.notna().any()
            expected = expected_kinds[card.name]
            if has_values and card.kind != expected:
                for part in table.parts:
                    kind, values = read_column(part, card.name, self.columns)
                    if kind != expected and values.notna().any():
                        break
                raise ConfigurationError(
                    f"{part.path}: {card.name!r} has {kind}, and the encoder that was agreed on expects {expected}."
                )
        if self.columns.agreed.is_dictionary:
            raise_problems(list(problems.values()), self.columns)  # such as a missing column
            refuse_misfits(table, cards, self.columns.agreed)
        return problems

    def _fit_encoder(
        self,
        table: Table,
        rows_by_client: Sequence[np.ndarray],
        unreadable: Mapping[str, ColumnError],
    ) -> AgreedEncoder:
        if self.columns.min_rows == 1:
            # No summary hides small numbers of rows. Since sums are exact, all rows have one summary.
            rows_by_client = [np.concatenate(rows_by_client)]
        summaries = {}
        for client, rows in enumerate(rows_by_client):
            summaries[f"client {client}"] = self.summary(table, rows)
        return agreed_encoder(
            summaries,
            self.columns,
            target=self.target,
            classes=self._classes,
            names=self.names(table),
            where=str(table.path),
            unreadable=unreadable,
        )

    def summary(
        self,
        table: Table,
        rows: np.ndarray,
        num_train_rows: int | None = None,
    ) -> TableSummary:
        """Return what a client tells about its table, of which :meth:`read_table` has read the columns.

        ``rows`` are the positions of the rows that it trains on. ``num_train_rows`` counts the rows of its training
        tables, which come first, before any is split off. Without it no classes are counted.
        """
        min_rows = self.columns.min_rows
        columns = {}
        for card in self.read:
            columns[card.name] = summarize_column(card, rows, min_rows)
        target_column = table.column(self.target, "target")

        classes = None
        if num_train_rows is not None and self.columns.task == "classification":
            labels = category_names(target_column)
            classes = count_frequent(labels.iloc[:num_train_rows], min_rows)

        target_moments = None
        if self.columns.standardize_target:
            numbers = self._numbers(table, target_column)[rows]
            target_moments = moments_of_enough(numbers, min_rows)
        return TableSummary(self.settings(), columns, classes, target_moments)

    def settings(self) -> dict[str, Any]:
        """Return the options that all clients must share, in values of JSON's types.

        How a client's own file writes numbers, dates and gaps is not among them.
        """
        shared = ("task", "classes", "standardize_target", "max_categories", "min_rows")
        return {
            "target": self.target,
            "pos_label": self.pos_label,
            "columns": {option: getattr(self.columns, option) for option in shared},
        }

    def _log_kinds(self, table: Table) -> None:
        names_by_kind: dict[str, list[str]] = {}
        for card in self.read:  # the columns that were read
            names_by_kind.setdefault(card.kind, []).append(card.name)
        lines = [
            f"{table.path}: columns are read as (to change this: categorical, gaps and exclude in columns)"
        ]
        for kind, names in names_by_kind.items():
            lines.append(f"  {kind}: {listed(names, 20)}")
        rank_zero_info("\n".join(lines))

    def classes(self, table: Table) -> tuple[str, ...] | None:
        """Return the class names, the positive one of two last, or None for regression.

        They are stored for :meth:`targets`.
        """
        if self.columns.agreed is not None:
            self._classes = self.columns.agreed.classes
        elif self.columns.task == "classification":
            labels = category_names(table.column(self.target, "target"))
            counts_by_file = {}
            for part, labels_of_file in zip(table.parts, by_file(table, labels)):
                counts_by_file[str(part.path)] = count_frequent(
                    labels_of_file, self.columns.min_rows
                )
            self._classes = agreed_classes(
                counts_by_file,
                self.columns,
                target=self.target,
                pos_label=self.pos_label,
                where=str(table.path),
                places=lambda: places_of_words(table, labels),
            )
        return self._classes

    def targets(self, table: Table) -> Tensor:
        """Return each row's class index, int64 ``[N]``, or its number, float32 ``[N]``.

        Numbers are standardized, once :meth:`features` has made features, if the options say so.
        """
        column = table.column(self.target, "target")
        if self._classes is not None:
            return self._class_indices(table, column, self._classes)

        numbers = self._numbers(table, column)
        return torch.from_numpy((numbers - self.target_mean) / self.target_std).float()

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
        numbers_by_file = []
        for text_format, texts_of_file in by_format(table, column, self.columns):
            decimal, thousands = text_format.decimal, text_format.thousands
            numbers_by_file.append(parse_numbers(texts_of_file, decimal, thousands))
        numbers = np.concatenate(numbers_by_file)
        is_valid = np.abs(numbers) <= LARGEST_NUMBER
        if not is_valid.all():
            first_row = int(np.argmin(is_valid))  # the first False
            raise ConfigurationError(
                f"{table.where(first_row)}: {str(texts[first_row])!r} in {self.target!r} (labels) is not a "
                "valid number: a class, a missing value (gaps), or in another notation (decimal, "
                "thousands)?"
            )
        return numbers

    def encoded(
        self,
        table: Table,
        sizes: Sequence[int],
        rows_by_client: Sequence[np.ndarray] | None = None,
    ) -> list[TensorDataset]:
        """Encode a table as data sets of consecutive rows, one data set for each number of rows in ``sizes``.

        ``rows_by_client`` has the positions of each client's training rows. Without it, samples have a target but no
        features.
        """
        features = torch.zeros(len(table), 0)
        if rows_by_client is not None:
            features = self.features(table, rows_by_client)
        pairs = zip(features.split(list(sizes)), self.targets(table).split(list(sizes)))
        return [TensorDataset(*pair) for pair in pairs]

    def cards(self, train: Table) -> tuple[ColumnCard, ...]:
        """Return the records :attr:`read` of the columns, with the values of the first rows, which are those of
        ``train``. Lines index them.
        """
        cards = []
        for card in self.read:
            values = card.values.iloc[: len(train)]
            cards.append(replace(card, values=values.set_axis(train.lines)))
        return tuple(cards)

    def names(self, table: Table) -> list[str]:
        """Return the columns to use as features, including those that only some concatenated tables have."""
        if self.columns.agreed is not None:
            return [code.name for code in self.columns.agreed.columns]
        for argument in ("features", "categorical", "dates"):
            self._check_present(table, argument, getattr(self.columns, argument))
        if not self._is_alone:  # other sites may have the columns to leave out
            self._check_present(table, "exclude", self.columns.exclude)
        if isinstance(self.columns.gaps, dict):
            self._check_present(table, "gaps", self.columns.gaps)

        excluded_names = {self.target, self.group, *(self.columns.exclude or ())}
        if self.columns.features is None:
            # A column by which samples are split is a feature only if an option names it.
            named_columns = {*(self.columns.categorical or ()), *(self.columns.dates or ())}
            excluded_names |= set(self._split_columns) - named_columns
        candidates = self.columns.features or table.frame.columns
        return [name for name in candidates if name not in excluded_names]

    def _check_present(
        self,
        table: Table,
        argument: str,
        names: Iterable[str] | None,
    ) -> None:
        """Raise ColumnError if no table has one of the columns that an option names."""
        for name in names or ():
            replace(table, together=()).check_has(name, argument)


def _standardized(values: pd.Series, code: ColumnCode) -> np.ndarray:
    """Return float64 ``[N, 1]``. A gap is 0, the mean."""
    numbers = values.to_numpy(dtype=np.float64)
    standardized = (numbers - code.mean) / code.scale
    return np.nan_to_num(standardized, nan=0.0)[:, None]


def _one_hot(words: pd.Series, categories: Sequence[str]) -> np.ndarray:
    """Return float64 ``[N, categories]``. A gap or an unknown word is a row of zeros."""
    indices = pd.Index(categories, dtype=object).get_indexer(words.astype(object))
    is_category = indices >= 0
    features = np.zeros((len(words), len(categories)))
    features[np.flatnonzero(is_category), indices[is_category]] = 1.0
    return features


#: A whole number without leading zeros: 07 stays a text.
_INTEGER = re.compile(r"0|-?[1-9]\d*")


def group_values(table: Table, name: str) -> np.ndarray:
    """Return each row's group ``[N]`` from the column ``name``.

    Groups become numbers, which sort 2 before 10, unless one begins with a zero.
    """
    values = as_texts(table.column(name, "group")).fillna("")
    empty_rows = np.flatnonzero(values == "").tolist()
    if empty_rows:
        raise ConfigurationError(
            f"{table.path}: {len(empty_rows)} of {len(table)} rows have no {name!r} (group): "
            f"{table.places(empty_rows)}. Every row needs a client: fill them in, or leave the rows out."
        )
    names = list(dict.fromkeys(values))
    check_spelling(names, f"{table.path}: {name!r} (group)")
    are_numbers = all(_INTEGER.fullmatch(name) for name in names)
    return values.map(int if are_numbers else str).to_numpy()


def tables_source(
    tables: Mapping[str, Table],
    held_out: Mapping[str, Table | None],
    reading: Reading,
    clients: bool,
) -> SourceData:
    """Return the source of the clients' and the held-out tables.

    Its function ``fitted`` makes the features once the training rows are known. The source of one site alone has
    ``summary`` in its place, unless the options have an encoder.
    """
    first_table = next(iter(tables.values()))
    if reading.label is None:
        raise ConfigurationError(
            f"{first_table.path} is a table: set labels, the column to predict. It has "
            f"{listed(first_table.frame.columns, 20)}."
        )
    if clients:
        tables = {name: _with_owner(table, name) for name, table in tables.items()}
    columns = as_columns(reading.columns)
    _check_named_files(columns, [*tables.values(), *held_out.values()])
    encoder = TableEncoder(
        columns,
        reading.label,
        group=reading.group,
        pos_label=reading.pos_label,
        is_alone=reading.is_alone,
        split_columns=reading.split_columns,
    )
    train = [encoder.rows_with_target(table) for table in tables.values()]
    held_out_tables = {}
    for name, table in held_out.items():
        if table is not None:
            held_out_tables[name] = encoder.rows_with_target(table)
    groups, names = _groups(train, reading.group, tuple(tables), clients)
    table = concatenated_tables([*train, *held_out_tables.values()])
    sizes = [sum(map(len, train)), *map(len, held_out_tables.values())]
    train_table = concatenated_tables(train)
    split_columns = {}
    for name in reading.split_columns:
        split_columns[name] = train_table.column(name, "splits").tolist()
    if reading.is_alone and columns.agreed is None:
        source = _source_without_features(encoder, table, sizes[0])
        return replace(source, split_columns=split_columns)
    classes = encoder.classes(train_table) or ()

    def make_source(samples_by_client: Mapping[str, Tensor] | None) -> SourceData:
        rows_by_client = None
        columns_read: tuple[ColumnCard, ...] = ()
        fitted: Callable[..., SourceData] | None = make_source
        if samples_by_client is not None:
            rows_by_client = [samples.numpy() for samples in samples_by_client.values()]
            fitted = None
        whole, *held_out_sets = encoder.encoded(table, sizes, rows_by_client)
        if rows_by_client is not None:
            columns_read = encoder.cards(train_table)
        sets: dict[str, Any] = dict(zip(held_out_tables, held_out_sets))
        for name, part in held_out_tables.items():
            sets[name].row_names = part.row_names(columns.exclude or (), reading.group)
        return SourceData(
            whole,
            **sets,
            class_names=classes,
            groups=groups,
            group_names=names,
            clients=clients,
            labeled=True,
            by_rarity=by_rarity,
            columns=columns_read,
            split_columns=split_columns,
            fitted=fitted,
            encoder=encoder.agreed,
        )

    by_rarity = chosen_by_rarity(classes, reading.pos_label)
    if columns.agreed is not None:
        by_rarity = False
        return make_source({})
    # The training rows, and so the scale of numbers, are not known yet; no component reads numbers before they are.
    return make_source(None)


def _check_named_files(columns: Columns, tables: Sequence[Table | None]) -> None:
    """Raise ConfigurationError if ``read`` names a client without a text file."""
    names = [table.client for table in tables if table is not None and not table.typed]
    unknown = [name for name in columns.read or () if name not in names]
    if unknown:
        raise ConfigurationError(
            f"read: {listed(unknown, show=repr)} has no text file of its own, as {listed(names) or 'nobody'} has. For "
            "one file set decimal, thousands and encoding in columns."
        )


def _with_owner(table: Table, client: str) -> Table:
    """Return a table whose path, in messages, names its client. A file has a name of its own."""
    if not table.typed:
        return table
    return replace(table, path=f"the {table.path} of {client!r}")


def _source_without_features(encoder: TableEncoder, table: Table, num_rows: int) -> SourceData:
    """Return the source of one site's rows before the sites agree on features and targets."""

    def summary(samples: Tensor) -> TableSummary:
        unreadable = encoder.read_table(table)
        raise_problems(list(unreadable.values()), encoder.columns)
        return encoder.summary(table, samples.numpy(), num_rows)

    return SourceData(TensorDataset(torch.zeros(num_rows, 0)), labeled=True, summary=summary)


def _groups(
    tables: Sequence[Table], group: str | None, table_names: tuple[str, ...], are_clients: bool
) -> tuple[Tensor | None, tuple[str, ...]]:
    """Return each row's group and the groups' names: the tables if these are clients, else the column ``group``."""
    table_sizes = torch.tensor([len(table) for table in tables])
    table_of_row = torch.repeat_interleave(table_sizes)  # its number, from 0
    if are_clients:
        return table_of_row, table_names
    if group is None:
        return None, ()

    # The first table's rows have the groups of its column.
    group_of_row = group_values(tables[0], group)
    distinct_groups, numbers = np.unique(group_of_row, return_inverse=True)
    group_numbers = torch.from_numpy(numbers.reshape(-1).astype(np.int64))
    names = client_names_of(distinct_groups.tolist(), group)

    # Each further table is a group of its own: table 1 gets the next number, which is len(distinct_groups).
    table_of_further_row = table_of_row[len(group_numbers) :]
    further_numbers = table_of_further_row - 1 + len(distinct_groups)
    return torch.cat([group_numbers, further_numbers]), (*names, *table_names[1:])
