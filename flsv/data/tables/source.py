"""Source of tables: the clients' and the held-out rows, as features and targets by a data dictionary."""

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
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import TensorDataset

from flsv.data.groups import check_spelling, client_names_of
from flsv.data.labels import in_order, named_class
from flsv.data.sources.base import Reading, SourceData
from flsv.data.tables.cells import USUAL_GAPS, Cells, format_of, read_cells
from flsv.data.tables.dictionary import Dictionary, DictionaryOptions
from flsv.data.tables.drafts import ColumnCard, TableDoubt, apart
from flsv.data.tables.merger import check_number_of_classes, classes_by_site, compare, draft_all
from flsv.utilities.errors import ConfigurationError, listed

#: A whole number without leading zeros: 07 stays a text.
_INTEGER = re.compile(r"0|-?[1-9]\d*")


class OpenQuestions(ConfigurationError):
    """Error for tables whose columns leave questions. It has the draft in which these are answered."""

    def __init__(self, dictionary: Dictionary, doubts: Sequence[TableDoubt]) -> None:
        self.dictionary = dictionary
        self.doubts = doubts
        questions = "\n  ".join(dictionary.questions)
        super().__init__(
            f"The tables leave questions:\n  {questions}\n"
            "Leave a column out, or say what it means, in the data dictionary (data.dictionary). Such as: "
            '{"excluded": ["patient"], "columns": {"came": {"kind": "days since 1970"}}}. '
            "flsv data --write FILE drafts it."
        )
        self.without_data = (
            "its table leaves questions that no data dictionary answers, and its own log says which"
        )


def read_table(source: Any, reading: Reading, client: str) -> Cells:
    """Read the cells of a client's table in the notation that the data dictionary says."""
    dictionary = reading.dictionary or Dictionary()
    file_format = format_of(dictionary.read, client, source)
    return read_cells(source, file_format=file_format)


def group_values(cells: Cells, name: str) -> np.ndarray:
    """Return each row's group ``[N]`` from the column ``name``.

    Groups become numbers, which sort 2 before 10, unless one begins with a zero.
    """
    words = cells.words(name, "groups")
    empty_rows = np.flatnonzero(words.isna() | (words == "")).tolist()
    if empty_rows:
        raise ConfigurationError(
            f"{cells.where(empty_rows)}: {len(empty_rows)} of {len(cells)} rows have no {name!r} (groups). Every row "
            "needs a client: fill them in, or leave the rows out."
        )
    names = list(words.cat.categories)
    check_spelling(names, f"{cells.name}: {name!r} (groups)")
    are_numbers = all(_INTEGER.fullmatch(name) for name in names)
    groups = np.array([int(name) for name in names] if are_numbers else names)
    return groups[words.cat.codes]


def rows_with_target(cells: Cells, target: str) -> Cells:
    """Return the rows that have a target, with a warning if others are left out."""
    cells.check_has(target, "labels")
    is_missing = cells.is_missing(target, USUAL_GAPS)
    if is_missing.all():
        raise ConfigurationError(f"{cells.name}: no row has a {target!r} (labels).")
    if not is_missing.any():
        return cells
    rank_zero_warn(
        f"{cells.name}: {is_missing.sum()} of {len(cells)} rows have no {target!r} (labels) and are left out."
    )
    return cells.take(np.flatnonzero(~is_missing))


def _warn_of_target(cells: Cells, target: str) -> None:
    """Warn of numbers to predict that lie apart, as codes of missing values do."""
    numbers_apart = apart(cells.numbers(target))
    if len(numbers_apart):
        rank_zero_warn(
            f"{cells.title}: {numbers_apart[0]:g} in the target {target!r} lies farther from all others than these "
            "from each other. If it means that the number is missing, leave the cell empty."
        )


def classes_of(
    tables: Mapping[str, Cells],
    target: str,
    pos_label: Any,
    is_site: bool = False,
) -> tuple[str, ...]:
    """Return the classes of all tables, the positive one of two last unless the rows are one site's."""
    counts_by_table = {}
    for name, cells in tables.items():
        counts = cells.words(target, "labels").value_counts()
        counts_by_table[name] = counts.set_axis(list(counts.index))
    counts = pd.DataFrame(counts_by_table).fillna(0.0)
    if not is_site:
        return classes_by_site(counts, target, pos_label)

    classes = in_order(list(counts.index))
    check_spelling(classes, f"the target {target!r}")
    check_number_of_classes(len(classes), int(counts.to_numpy().sum()), target=target)
    return classes


def tables_source(
    tables: Mapping[str, Cells],
    held_out: Mapping[str, Cells | None],
    reading: Reading,
    are_clients: bool,
) -> SourceData:
    """Return the source of the clients' and the held-out tables.

    Its function ``fitted`` makes the features once the training rows are known.
    """
    source = _TablesSource(tables, held_out, reading, are_clients)
    return source.without_features


class _TablesSource:
    """Tables with the roles of their columns, before and after the training rows are known."""

    def __init__(
        self,
        tables: Mapping[str, Cells],
        held_out: Mapping[str, Cells | None],
        reading: Reading,
        are_clients: bool,
    ) -> None:
        self._reading = reading
        self._are_clients = are_clients
        dictionary = reading.dictionary or Dictionary()
        first_table = next(iter(tables.values()))
        target = reading.label or dictionary.target
        if not target:
            raise ConfigurationError(
                f"{first_table.name} is a table: set labels, the column to predict. It has "
                f"{listed(first_table.frame, 20)}."
            )
        if reading.group == target or reading.group in dictionary.columns:
            raise ConfigurationError(
                f"{reading.group!r} (groups) is the target or a column to predict from, too."
            )
        dictionary = replace(dictionary, target=target)

        self._is_site_draft = reading.is_alone and not dictionary.is_complete
        self._tables = {}
        for name, cells in tables.items():
            if are_clients and not cells.is_text_file:
                cells = replace(cells, name=f"the {cells.name} of {name!r}")
            if self._is_site_draft:  # whose questions leave the site without its folders
                cells = replace(cells, path=Path(cells.path).name)
            self._tables[name] = rows_with_target(cells, target)
        self._held_out = {}
        for name, held_out_cells in held_out.items():
            if held_out_cells is not None:
                cells = replace(held_out_cells, name=name)
                self._held_out[name] = rows_with_target(cells, target)

        self._dictionary = self._with_classes(self._with_excluded(dictionary))

    def _with_excluded(self, dictionary: Dictionary) -> Dictionary:
        """Return the dictionary without columns that say whose a row is, or by which rows are held out."""
        if dictionary.is_complete:
            return dictionary
        excluded = dict(dictionary.excluded)
        if self._reading.group is not None:
            excluded.setdefault(self._reading.group, "its clients")
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
                self._tables, dictionary.target, pos_label, is_site=self._is_site_draft
            )
        if pos_label is not None:
            if self._is_site_draft and len(classes) == 1:
                raise ConfigurationError(
                    f"all rows have the {dictionary.target!r} {classes[0]!r}, and pos_label={pos_label!r} needs two "
                    f'classes. Name both in the data dictionary, such as classes: ["no", "yes"].'
                )
            positive = named_class(classes, pos_label)
            if dictionary.is_complete and dictionary.positive not in (None, positive):
                raise ConfigurationError(
                    f"pos_label={pos_label!r}, and the data dictionary has positive: {dictionary.positive!r}."
                )
            return replace(dictionary, classes=classes).with_positive(positive)

        return replace(dictionary, classes=classes).with_positive(dictionary.positive)

    @cached_property
    def without_features(self) -> SourceData:
        """The source before the training rows are known, without features."""
        groups, group_names = self._groups()
        split_columns = {}
        for name in self._reading.split_columns:
            words = [cells.words(name, "splits") for cells in self._tables.values()]
            split_columns[name] = pd.concat(words).tolist()
        held_out_sets = {name: self._data_set([cells]) for name, cells in self._held_out.items()}
        classes = tuple(self._dictionary.classes or ())
        return SourceData(
            self._data_set(self._tables.values()),
            class_names=classes,
            groups=groups,
            group_names=group_names,
            clients=self._are_clients,
            labeled=True,
            pos_label=self._dictionary.positive,
            split_columns=split_columns,
            fitted=self.with_features,
            dictionary=self._dictionary,
            **held_out_sets,
        )

    def with_features(self, samples_by_client: Mapping[str, Tensor]) -> SourceData:
        """Return the source with features by the dictionary, which is drafted from the training rows if incomplete."""
        dictionary = self._dictionary
        doubts: list[TableDoubt] = []
        values = []
        tables = [*self._tables.items(), *self._held_out.items()]
        if dictionary.task == "regression":
            for _, cells in tables:
                _warn_of_target(cells, dictionary.target)
        if dictionary.is_complete and not dictionary.questions:
            for name, cells in tables:
                site = name if self._are_clients else cells.name
                values_of_table, doubts_of_table = compare(dictionary, cells, site)
                values.append(values_of_table)
                doubts += doubts_of_table
        else:
            dictionary, doubts = self._draft(samples_by_client)
            values = [dictionary.values(cells) for _, cells in tables]

        features = list(map(dictionary.encode, values))
        num_tables = len(self._tables)
        cards = []
        for name, column in dictionary.columns.items():
            is_missing = [values_of_table[name].isna() for values_of_table in values[:num_tables]]
            cards.append(ColumnCard(name, column.became, np.concatenate(is_missing)))

        held_out_sets = {}
        for (name, cells), features_of_table in zip(self._held_out.items(), features[num_tables:]):
            held_out_set = self._data_set([cells], [features_of_table], dictionary)
            held_out_set.row_names = self._row_names(cells)
            held_out_sets[name] = held_out_set
        return replace(
            self.without_features,
            train=self._data_set(self._tables.values(), features[:num_tables], dictionary),
            fitted=None,
            columns=tuple(cards),
            dictionary=dictionary,
            is_draft=not self._dictionary.is_complete,
            dictionary_lacks=self._dictionary.lacks,
            doubts=tuple(doubts),
            **held_out_sets,
        )

    def _draft(
        self, samples_by_client: Mapping[str, Tensor]
    ) -> tuple[Dictionary, list[TableDoubt]]:
        """Draft what the dictionary does not say, and log how the columns are read."""
        rows_by_table = self._rows_by_table(samples_by_client)
        tables = [(cells, rows_by_table[name]) for name, cells in self._tables.items()]
        dictionary, doubts = draft_all(
            tables,
            list(self._held_out.values()),
            self._dictionary,
            is_site=self._is_site_draft,
        )
        if dictionary.questions:
            raise OpenQuestions(dictionary, doubts)
        if not dictionary.columns:
            raise ConfigurationError("No column is left to predict from.")
        _log(dictionary)
        return dictionary, doubts

    def _rows_by_table(
        self, samples_by_client: Mapping[str, Tensor]
    ) -> dict[str, dict[str, np.ndarray]]:
        """Return the positions of each client's training rows in each table."""
        rows_by_table: dict[str, dict[str, np.ndarray]] = {}
        num_rows_before = 0
        for name, cells in self._tables.items():
            rows_by_client = {}
            for client, samples in samples_by_client.items():
                rows = samples.numpy() - num_rows_before
                rows = rows[(rows >= 0) & (rows < len(cells))]
                if len(rows):
                    rows_by_client[client] = rows
            rows_by_table[name] = rows_by_client
            num_rows_before += len(cells)
        return rows_by_table

    def _data_set(
        self,
        tables: Any,
        features: Sequence[np.ndarray] | None = None,
        dictionary: Dictionary | None = None,
    ) -> Any:
        """Return the samples of some tables, without features as long as these are not known."""
        dictionary = dictionary or self._dictionary
        targets = np.concatenate([dictionary.targets(cells) for cells in tables])
        if features is None:
            inputs = torch.zeros(len(targets), 0)
        else:
            inputs = torch.from_numpy(np.concatenate(features))
        return TensorDataset(inputs, torch.from_numpy(targets))

    def _groups(self) -> tuple[Tensor | None, tuple[str, ...]]:
        """Return each row's group and the groups' names: the tables if these are clients, else the group column."""
        if self._are_clients:
            sizes = [len(cells) for cells in self._tables.values()]
            tables_of_rows = torch.repeat_interleave(torch.tensor(sizes))
            return tables_of_rows, tuple(self._tables)

        name = self._reading.group
        if name is None:
            return None, ()
        (cells,) = self._tables.values()
        groups = group_values(cells, name)
        numbers, distinct_groups = pd.factorize(groups, sort=True)
        group_numbers = torch.from_numpy(numbers.astype(np.int64))
        return group_numbers, client_names_of(distinct_groups.tolist(), name)

    def _row_names(self, cells: Cells) -> dict[str, list[str]]:
        """Return the texts that identify each row, ``{title: texts}``: line, client, and excluded columns."""
        texts = {"line": [str(line) for line in cells.lines()]}
        for name in (self._reading.group or "", *self._dictionary.excluded):
            if name in cells.frame:
                title = "client" if name == self._reading.group else name
                words = cells.words(name).astype(object)
                texts[title] = words.fillna("").tolist()
        return texts


def _log(dictionary: Dictionary) -> None:
    """Say how columns are read by a dictionary that nobody has written."""
    names_by_kind: dict[str, list[str]] = {}
    for name, column in dictionary.columns.items():
        names_by_kind.setdefault(column.kind, []).append(name)
    lines = [
        f"The data dictionary {dictionary.hash}, drafted from the training rows, reads columns as"
    ]
    for kind, names in names_by_kind.items():
        lines.append(f"  {kind}: {listed(names, 20)}")
    rank_zero_info("\n".join(lines))


def as_dictionary(options: DictionaryOptions) -> Dictionary:
    """Convert options in a mapping, or the path of a file, to a dictionary, which may be incomplete."""
    if options is None:
        return Dictionary()
    if isinstance(options, Dictionary):
        return options
    if isinstance(options, Mapping):
        return Dictionary.from_plain(options)
    return Dictionary.from_file(options)
