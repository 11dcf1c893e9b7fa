"""Source of tables: makes features and targets of the clients' and the held-out rows by a data dictionary."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data.groups import check_spelling, client_names_of
from flsv.data.hugging_face import is_hugging_face, visible_table
from flsv.data.labels import in_declared_order, named_class
from flsv.data.sources.source_data import Reading, SourceData
from flsv.data.sources.table_facts import (
    ColumnCard,
    TableWarning,
)
from flsv.tables.dictionary import Dictionary
from flsv.tables.inference import isolated_numbers
from flsv.tables.merger import check_number_of_classes, classes_by_site, compare, infer_all
from flsv.tables.table import USUAL_GAPS, Table, format_of, open_table
from flsv.utilities.errors import ConfigurationError, listed

#: A whole number without leading zeros: 07 stays a text.
_INTEGER = re.compile(r"0|-?[1-9]\d*")


class OpenQuestions(ConfigurationError):
    """Error for tables with columns whose meaning is not clear. ``dictionary`` has the questions."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.dictionary = dictionary
        questions = "\n  ".join(dictionary.questions)
        super().__init__(
            f"The meaning of some columns is not clear:\n  {questions}\n"
            "Exclude each of them, or say what it means, in the data dictionary (data.dictionary), such as "
            '{"excluded": ["patient"], "columns": {"came": {"kind": "days since 1970"}}}. '
            "flsv data --write FILE writes a dictionary with these questions, which you can edit."
        )
        self.without_data = "the meaning of some columns of its table is not clear; the site's own log says of which"


def read_table(source: Any, reading: Reading, client: str) -> Table:
    """Read a client's table in the format that the data dictionary says."""
    dictionary = as_dictionary(reading.dictionary)
    file_format = format_of(dictionary.read, client, source)
    if is_hugging_face(source):
        source = visible_table(source, reading.named_columns, label=reading.label)
    return open_table(source, file_format=file_format)


def group_values(table: Table, name: str) -> np.ndarray:
    """Return each row's group ``[N]`` from the column ``name``.

    Groups are numbers if all are whole numbers without leading zeros, so that 2 is sorted before 10. Else they are
    texts.
    """
    words = table.words(name, "groups")
    empty_rows = np.flatnonzero(words.isna() | (words == "")).tolist()
    if empty_rows:
        raise ConfigurationError(
            f"{table.where(empty_rows)}: {len(empty_rows)} of {len(table)} rows have no value in {name!r} (groups), "
            "but each row needs a client. Fill the values in, or remove the rows."
        )
    names = list(words.cat.categories)
    check_spelling(names, f"{table.name}: {name!r} (groups)")
    are_numbers = all(_INTEGER.fullmatch(name) for name in names)
    groups = np.array([int(name) for name in names] if are_numbers else names)
    return groups[words.cat.codes]


def rows_with_target(table: Table, target: str) -> Table:
    """Return the rows that have a target. Warn if others are excluded."""
    table.check_has(target, "labels")
    is_missing = table.is_missing(target, USUAL_GAPS)
    if is_missing.all():
        raise ConfigurationError(
            f"{table.name}: no row has a value in the target {target!r} (labels)."
        )
    if not is_missing.any():
        return table
    rank_zero_warn(
        f"{table.name}: {is_missing.sum()} of {len(table)} rows have no value in the target {target!r} (labels) "
        "and are excluded."
    )
    return table.take(np.flatnonzero(~is_missing))


def _warn_of_target(table: Table, target: str) -> None:
    isolated_values = isolated_numbers(table.numbers(target))
    if len(isolated_values):
        rank_zero_warn(
            f"{table.title}: {isolated_values[0]:g} in the target {target!r} is farther from all other values "
            "than these are from each other. If it means a missing value, leave the field empty."
        )


def classes_of(
    tables: Mapping[str, Table],
    target: str,
    pos_label: Any,
    is_site: bool = False,
) -> tuple[str, ...]:
    """Return the classes of all tables, in the order that these declare or else sorted.

    The positive one of two is last unless the rows are of one site.
    """
    orders = {}
    counts_by_table = {}
    for name, table in tables.items():
        order = table.declared_order(target)
        if order and pos_label is None:
            orders[name] = order
        class_sizes = table.words(target, "labels").value_counts()
        counts_by_table[name] = class_sizes.set_axis(list(class_sizes.index))
    counts = pd.DataFrame(counts_by_table).fillna(0.0)
    if not is_site:
        return classes_by_site(counts, target, pos_label, orders)

    where = f"The target {target!r}"
    classes = in_declared_order(list(counts.index), orders, where)
    check_spelling(classes, where)
    check_number_of_classes(len(classes), int(counts.to_numpy().sum()), target=target)
    return classes


def tables_source(
    tables: Mapping[str, Table],
    held_out: Mapping[str, Table | None],
    reading: Reading,
    are_clients: bool,
) -> SourceData:
    """Return the source of the clients' and the held-out tables.

    Its function ``make_features`` makes the features when the training rows are known.
    """
    source = _TablesSource(tables, held_out, reading, are_clients)
    return source.without_features


class _TablesSource:
    def __init__(
        self,
        tables: Mapping[str, Table],
        held_out: Mapping[str, Table | None],
        reading: Reading,
        are_clients: bool,
    ) -> None:
        self._reading = reading
        self._are_clients = are_clients
        first_table = next(iter(tables.values()))
        dictionary = _with_target(as_dictionary(reading.dictionary), reading, first_table)
        target = dictionary.target
        self._is_inferred_at_site = reading.is_alone and not dictionary.is_complete
        self._tables = {}
        for name, table in tables.items():
            self._tables[name] = rows_with_target(self._named(table, name), target)
        self._held_out = {}
        for name, held_out_table in held_out.items():
            if held_out_table is not None:
                table = replace(held_out_table, name=name)
                self._held_out[name] = rows_with_target(table, target)

        self._dictionary = self._with_classes(self._with_excluded(dictionary))

    def _named(self, table: Table, client_name: str) -> Table:
        if self._are_clients and not table.is_text_file:
            table = replace(table, name=f"the {table.name} of {client_name!r}")
        # The questions of a dictionary that leaves the site must not reveal the site's folders.
        if self._is_inferred_at_site:
            table = replace(table, path=Path(table.path).name)
        return table

    def _with_excluded(self, dictionary: Dictionary) -> Dictionary:
        """Exclude the column with the clients, and the columns by which rows are held out."""
        if dictionary.is_complete:
            return dictionary
        excluded = dict(dictionary.excluded)
        if self._reading.group is not None:
            excluded.setdefault(self._reading.group, "the clients")
        for name in self._reading.split_columns:
            if name not in dictionary.columns:
                excluded.setdefault(name, "rows are held out by it")
        return replace(dictionary, excluded=excluded)

    def _with_classes(self, dictionary: Dictionary) -> Dictionary:
        """Return the dictionary with the classes of all tables, the positive one of two last."""
        if dictionary.task == "regression":
            return dictionary

        pos_label = self._reading.pos_label
        classes = dictionary.classes
        if classes is None:
            classes = classes_of(
                self._tables, dictionary.target, pos_label, is_site=self._is_inferred_at_site
            )
        classified = replace(dictionary, classes=classes)
        if pos_label is None:
            return classified.with_positive(dictionary.positive)
        if self._is_inferred_at_site and len(classes) == 1:
            raise ConfigurationError(
                f"All rows have the value {classes[0]!r} in the target {dictionary.target!r}, but "
                f"pos_label={pos_label!r} needs two classes. Name both in the data dictionary, such as "
                'classes: ["no", "yes"].'
            )
        positive = named_class(classes, pos_label)
        _check_same_positive(dictionary, positive, pos_label)
        return classified.with_positive(positive)

    @cached_property
    def without_features(self) -> SourceData:
        """Source without features, before the training rows are known."""
        groups, group_names = self._groups()
        split_columns = {}
        for name in self._reading.split_columns:
            words_by_table = [table.words(name, "splits") for table in self._tables.values()]
            split_columns[name] = pd.concat(words_by_table).tolist()
        held_out_sets = {name: self._data_set([table]) for name, table in self._held_out.items()}
        classes = tuple(self._dictionary.classes or ())
        return SourceData(
            self._data_set(self._tables.values()),
            class_names=classes,
            groups=groups,
            group_names=group_names,
            is_by_client=self._are_clients,
            has_target_column=True,
            pos_label=self._dictionary.positive,
            split_columns=split_columns,
            make_features=self.with_features,
            dictionary=self._dictionary,
            **held_out_sets,
        )

    def with_features(self, samples_by_client: Mapping[str, Tensor]) -> SourceData:
        """Return the source with features. What is missing in the dictionary is inferred from the training rows."""
        dictionary, values, data_warnings = self._read_values(samples_by_client)
        features = list(map(dictionary.encode, values))
        num_tables = len(self._tables)  # those with training rows come first
        features_by_held_out = dict(zip(self._held_out, features[num_tables:]))
        held_out_sets = {}
        for name, table in self._held_out.items():
            held_out_set = self._data_set([table], [features_by_held_out[name]], dictionary)
            held_out_set.row_names = self._row_names(table)
            held_out_sets[name] = held_out_set
        return replace(
            self.without_features,
            train=self._data_set(self._tables.values(), features[:num_tables], dictionary),
            make_features=None,
            columns=_cards(dictionary, values[:num_tables]),
            dictionary=dictionary,
            is_inferred=not self._dictionary.is_complete,
            missing_from_dictionary=self._dictionary.missing_parts,
            data_warnings=tuple(data_warnings),
            **held_out_sets,
        )

    def _read_values(
        self, samples_by_client: Mapping[str, Tensor]
    ) -> tuple[Dictionary, list[dict[str, pd.Series]], list[TableWarning]]:
        """Return a complete dictionary, the values of each table, the held-out ones last, and data warnings."""
        tables = [*self._tables.values(), *self._held_out.values()]
        if self._dictionary.task == "regression":
            for table in tables:
                _warn_of_target(table, self._dictionary.target)
        if self._dictionary.is_complete and not self._dictionary.questions:
            return self._dictionary, *self._compare()
        dictionary, data_warnings = self._infer(samples_by_client)
        return dictionary, [dictionary.values(table) for table in tables], data_warnings

    def _compare(self) -> tuple[list[dict[str, pd.Series]], list[TableWarning]]:
        """Return the values of each table, and data warnings where it differs from the complete dictionary."""
        values = []
        data_warnings = []
        for name, table in [*self._tables.items(), *self._held_out.items()]:
            site = name if self._are_clients else table.name
            values_of_table, warnings_of_table = compare(self._dictionary, table, site)
            values.append(values_of_table)
            data_warnings += warnings_of_table
        return values, data_warnings

    def _infer(
        self, samples_by_client: Mapping[str, Tensor]
    ) -> tuple[Dictionary, list[TableWarning]]:
        dictionary, data_warnings = infer_all(
            self._tables_and_rows(samples_by_client),
            list(self._held_out.values()),
            self._dictionary,
            is_site=self._is_inferred_at_site,
        )
        if dictionary.questions:
            raise OpenQuestions(dictionary)
        if not dictionary.columns:
            raise ConfigurationError(
                "All columns are excluded, so that there is nothing to predict from. Name at least one of them in the "
                "data dictionary: columns."
            )
        return dictionary, data_warnings

    def _tables_and_rows(
        self, samples_by_client: Mapping[str, Tensor]
    ) -> list[tuple[Table, dict[str, np.ndarray]]]:
        """Return each table with the positions of each client's training rows in it."""
        tables_and_rows = []
        num_rows_before = 0  # in all tables before
        for table in self._tables.values():
            rows_by_client = {}
            for client, samples in samples_by_client.items():
                rows = samples.numpy() - num_rows_before
                rows_in_table = rows[(rows >= 0) & (rows < len(table))]
                if len(rows_in_table):
                    rows_by_client[client] = rows_in_table
            tables_and_rows.append((table, rows_by_client))
            num_rows_before += len(table)
        return tables_and_rows

    def _data_set(
        self,
        tables: Any,
        features: Sequence[np.ndarray] | None = None,
        dictionary: Dictionary | None = None,
    ) -> Any:
        """Return the rows of tables as a data set. Without ``features`` the inputs have no columns."""
        dictionary = dictionary or self._dictionary
        targets = np.concatenate([dictionary.targets(table) for table in tables])
        if features is None:
            inputs = torch.zeros(len(targets), 0)
        else:
            inputs = torch.from_numpy(np.concatenate(features))
        return TensorDataset(inputs, torch.from_numpy(targets))

    def _groups(self) -> tuple[Tensor | None, tuple[str, ...]]:
        """Return each row's group number and the groups' names: by table if these are clients, else by the column."""
        if self._are_clients:
            sizes = [len(table) for table in self._tables.values()]
            tables_of_rows = torch.repeat_interleave(torch.tensor(sizes))
            return tables_of_rows, tuple(self._tables)

        name = self._reading.group
        if name is None:
            return None, ()
        (table,) = self._tables.values()
        groups = group_values(table, name)
        numbers, distinct_groups = pd.factorize(groups, sort=True)
        group_numbers = torch.from_numpy(numbers.astype(np.int64))
        return group_numbers, client_names_of(distinct_groups.tolist(), name)

    def _row_names(self, table: Table) -> dict[str, list[str]]:
        """Return texts that identify each row, ``{title: texts}``: its line, client, and excluded columns."""
        texts = {"line": [str(line) for line in table.lines()]}
        for name in (self._reading.group or "", *self._dictionary.excluded):
            if name in table.frame:
                title = "client" if name == self._reading.group else name
                words = table.words(name).astype(object)
                texts[title] = words.fillna("").tolist()
        return texts


def _with_target(dictionary: Dictionary, reading: Reading, table: Table) -> Dictionary:
    """Return the dictionary with the target, which ``labels`` may name. ``table`` is for the message."""
    target = reading.label or dictionary.target
    if not target:
        raise ConfigurationError(
            f"{table.name} is a table, so set labels to the column to predict. Its columns are "
            f"{listed(table.frame, 20)}."
        )
    if reading.group == target or reading.group in dictionary.columns:
        raise ConfigurationError(
            f"{reading.group!r} (groups) is also the target or one of the dictionary's columns, which become "
            "features."
        )
    return replace(dictionary, target=target)


def _check_same_positive(dictionary: Dictionary, positive: str, pos_label: Any) -> None:
    if dictionary.is_complete and dictionary.positive not in (None, positive):
        raise ConfigurationError(
            f"pos_label={pos_label!r}, but the data dictionary has positive: {dictionary.positive!r}. Make "
            "them equal, or remove pos_label."
        )


def _cards(
    dictionary: Dictionary, values: Sequence[Mapping[str, pd.Series]]
) -> tuple[ColumnCard, ...]:
    """Return a card of each column, by the values of the training tables."""
    cards = []
    for name, column in dictionary.columns.items():
        is_missing = [values_of_table[name].isna() for values_of_table in values]
        cards.append(ColumnCard(name, column.read_as, np.concatenate(is_missing)))
    return tuple(cards)


def as_dictionary(options: Any) -> Dictionary:
    """Make a dictionary, which may be incomplete, of options in a mapping or of the path of a file."""
    if options is None:
        return Dictionary()
    if isinstance(options, Dictionary):
        return options
    if isinstance(options, Mapping):
        return Dictionary.from_plain(options)
    return Dictionary.from_file(options)
