"""The data dictionary: what each column of a federation's tables means, by which alone they are read.

A cell that does not fit is refused by file, line and column. All sites have the same file, so that they have the same
features. What columns may mean is drafted in ``drafts``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pandas as pd
import yaml

from flsv.data.tables.cells import (
    LARGEST_NUMBER,
    USUAL_GAPS,
    Cells,
    FileFormat,
    dates_of,
    numbers_of,
    texts_of,
)
from flsv.utilities.declared import NonNegative, Positive, Rules, checked
from flsv.utilities.errors import ConfigurationError, listed, nearest
from flsv.utilities.plain_values import digest

NUMBERS = "numbers"
WHOLE_NUMBERS = "whole numbers"
TRUTHS = "truth values"
CATEGORIES = "categories"
DAYS = "days since "
DAYS_SINCE_1970 = "days since 1970"
#: Key of what holds for all columns or files that are not named.
REST = "*"
#: YAML takes no, 01067 and 1e9 for something else.
Text = Annotated[str, "Write texts in quotation marks."]
#: A column's numbers or words, NaN for gaps, and which of its cells do not fit, bool ``[N]``.
ValuesOfColumn: TypeAlias = tuple[pd.Series, np.ndarray]
#: Spellings of truth values.
NUMBER_BY_TRUTH = {"true": 1.0, "True": 1.0, "TRUE": 1.0, "false": 0.0, "False": 0.0, "FALSE": 0.0}
_KINDS = (NUMBERS, WHOLE_NUMBERS, TRUTHS, CATEGORIES)
#: Largest number of cells that an error names.
_MAX_CELLS = 10


def _is_kind(kind: str) -> bool:
    is_days = kind.startswith(DAYS) and len(kind) > len(DAYS)
    return is_days or kind in ("", *_KINDS)


def _are_distinct(words: Sequence[str] | None) -> bool:
    return words is None or len(set(words)) == len(words)


@cache
def _numbers_among(marks: tuple[str, ...]) -> np.ndarray:
    """Return the marks of gaps that are numbers."""
    numbers = numbers_of(pd.Series(marks, dtype=object), FileFormat())
    return numbers[np.isfinite(numbers)]


@checked
@dataclass(frozen=True)
class Column:
    """What a column means, and how it becomes features: ``(number - mean) / scale``, or one for each category.

    A cell without a value is the mean, or no category. Unless ``gaps`` is False a further feature is 1 there.

    Args:
        kind: ``numbers``, ``whole numbers``, ``truth values``, ``categories``, ``days since 1970`` or ``days since
            <another column>``. Empty until it is drafted.
        mean: what is subtracted from a number. None until it is drafted.
        scale: by what it is divided then. None until it is drafted. Drafted as 0 for a constant column.
        low: smallest number that fits. None: no bound.
        high: largest number that fits. None: no bound.
        unit: unit of its numbers, which may stand behind each.
        categories: its words. None until they are drafted.
        other_words: whether it may have further words, which become no category.
        gaps: marks of missing values, besides blanks. True for the usual ones. False if each row has a value.
        count: of a draft, the number of rows with a value.
        missing: of a draft, the number of rows without a value.

    Raises:
        ConfigurationError: an argument has another type, or a column cannot be so.
    """

    rules: ClassVar[Rules] = (
        (lambda a: None in (a.low, a.high) or a.low <= a.high, "low={low} is above high={high}."),
        (
            lambda a: _is_kind(a.kind),
            'kind={kind!r}: expected "numbers", "whole numbers", "truth values", "categories", "days since 1970" or '
            '"days since <column>".',
        ),
        (lambda a: _are_distinct(a.categories), "categories={categories}: one is there twice."),
        (
            lambda a: a.categories is None or a.kind in ("", CATEGORIES),
            "kind={kind!r} has no categories.",
        ),
        (lambda a: a.scale != 0 or a.count, "scale=0: expected a number above 0."),
    )

    kind: Text = ""
    mean: float | None = None
    scale: NonNegative | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    categories: Sequence[Text] | None = None
    other_words: bool = False
    gaps: bool | Sequence[Text] = True
    count: int = 0
    missing: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether cells can be encoded."""
        if not self.kind:
            return False
        if self.kind == CATEGORIES:
            return self.categories is not None
        return self.mean is not None and self.scale is not None

    @property
    def has_numbers(self) -> bool:
        """Whether its cells are numbers, of whatever kind."""
        return self.kind in (NUMBERS, WHOLE_NUMBERS)

    @property
    def bounds(self) -> tuple[float, float]:
        """Between what its numbers lie."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return low, high

    @property
    def description(self) -> str:
        """What is expected in a cell, for messages."""
        if self.categories is not None:
            return f"one of {listed(self.categories, 8, repr)}"
        low, high = self.bounds
        return f"{self.kind} from {low:g} to {high:g} {self.unit}".strip()

    @property
    def became(self) -> str:
        """Features that the column becomes, as text."""
        if self.categories is not None:
            return f"{len(self.categories)} categories"
        texts = {NUMBERS: "a number", WHOLE_NUMBERS: "a number", TRUTHS: "0 or 1"}
        return texts.get(self.kind, self.kind)

    def gap_marks(self, is_text_file: bool) -> tuple[str, ...]:
        """Return the texts of cells without a value. The usual ones are of text files: in a frame NA is a word."""
        if not isinstance(self.gaps, bool):
            return ("", *self.gaps)
        return USUAL_GAPS if is_text_file else ("",)

    def values(self, cells: Cells, name: str) -> ValuesOfColumn:
        """Return a column's numbers or words, NaN for gaps, and which of its cells do not fit, bool ``[N]``."""
        if self.kind == CATEGORIES:
            values, is_misfit = self._words(cells, name)
        else:
            values, is_misfit = self._numbers(cells, name)
        if self.gaps is False:
            is_misfit = is_misfit | values.isna().to_numpy()
        return values, is_misfit

    def _words(self, cells: Cells, name: str) -> ValuesOfColumn:
        words = cells.words(name)
        gap_marks = self.gap_marks(cells.is_text_file)
        marks = set(gap_marks)
        marks.update(texts_of(pd.Series(gap_marks, dtype=object)))
        marks.intersection_update(words.cat.categories)
        values = words.cat.remove_categories(marks)
        if self.other_words:
            return values, np.zeros(len(values), dtype=bool)
        is_misfit = values.notna() & ~values.isin(self.categories or ())
        return values, is_misfit.to_numpy()

    def _numbers(self, cells: Cells, name: str) -> ValuesOfColumn:
        numbers = self._all_numbers(cells, name)
        gap_marks = self.gap_marks(cells.is_text_file)
        is_gap = np.isnan(numbers)
        blank_cells = texts_of(cells.frame[name][is_gap])
        is_gap[is_gap] = blank_cells.isna() | blank_cells.isin(gap_marks)
        is_gap |= np.isin(numbers, _numbers_among(gap_marks))  # -99.0 for "-99"
        if self.kind.startswith(DAYS) and self.kind != DAYS_SINCE_1970:
            is_gap |= cells.is_missing(self.kind.removeprefix(DAYS), gap_marks)

        low, high = self.bounds
        is_inside = (numbers >= low) & (numbers <= high)
        is_inside &= np.abs(numbers) <= LARGEST_NUMBER
        if self.kind == WHOLE_NUMBERS:
            is_inside &= numbers % 1 == 0
        known_numbers = np.where(is_gap, np.nan, numbers)
        return pd.Series(known_numbers), ~is_gap & ~is_inside

    def _all_numbers(self, cells: Cells, name: str) -> np.ndarray:
        if self.kind == TRUTHS:
            numbers = cells.words(name).map(NUMBER_BY_TRUTH)
            return numbers.to_numpy(dtype=float, na_value=np.nan)
        if not self.kind.startswith(DAYS):
            return cells.numbers(name, self.unit)

        start_dates: Any = pd.Timestamp(
            "1970-01-01", tz="UTC"
        )  # in seconds, which reach the year 9999
        if self.kind != DAYS_SINCE_1970:
            start_name = self.kind.removeprefix(DAYS)
            cells.check_has(start_name, f"kind of {name}")
            start_dates = dates_of(cells.frame[start_name], cells.file_format)
        durations = dates_of(cells.frame[name], cells.file_format) - start_dates
        days = durations / pd.Timedelta(days=1)
        return days.to_numpy(dtype=float)


#: Conditions on a dictionary, each with the message where it does not hold.
_RULES: Rules = (
    (
        lambda a: not a.standardize_target or a.task == "regression",
        "standardize_target is for task: regression. Classes have no mean.",
    ),
    (
        lambda a: a.classes is None or a.task == "classification",
        "task: regression has no classes.",
    ),
    (lambda a: _are_distinct(a.classes), "classes={classes}: one is there twice."),
    (
        lambda a: not {a.target, a.patient}.intersection(a.columns),
        "the target {target!r} or the patient is among the columns.",
    ),
    (
        lambda a: not (a.columns.keys() & a.excluded.keys()) - {REST},
        "a column is both among columns and excluded.",
    ),
    (
        lambda a: a.positive is None or a.classes is None or a.positive in a.classes,
        "positive={positive!r} is none of classes={classes}.",
    ),
)


@checked
@dataclass(frozen=True)
class Dictionary:
    """What the columns of a federation's tables mean, by name.

    It is incomplete until classes, and means, scales or categories of all its columns are known. In one process the
    rest is drafted from the training rows of all clients.

    Args:
        target: the column to predict.
        task: whether its values are classes, or numbers.
        columns: each column that becomes features. ``"*"``: what holds for columns that are not named.
        classes: classes of the target, the positive one of two last.
        positive: the positive one of two classes. None: the larger number or ``True``.
        class_counts: of a draft, the rows of each class.
        standardize_target: whether numbers to predict are standardized.
        target_mean: what is subtracted from a number to predict.
        target_scale: by what it is divided then.
        excluded: columns that are left out, each with the reason. A reason that begins with a question mark is a
            question, which somebody has to answer. ``"*"``: all columns that are not named.
        patient: column whose rows stay together when some are held out.
        read: how text files are written, by the client's or the file's name. ``"*"``: all others.

    Raises:
        ConfigurationError: an argument has another type, or they contradict each other.
    """

    target: Text = ""
    task: Literal["classification", "regression"] = "classification"
    columns: Mapping[str, Column] = field(default_factory=dict)
    classes: Sequence[Text] | None = None
    positive: Text | None = None
    class_counts: Sequence[int] = ()
    standardize_target: bool = False
    target_mean: float = 0.0
    target_scale: Positive = 1.0
    excluded: Mapping[str, str] = field(default_factory=dict)
    patient: str | None = None
    read: Mapping[str, FileFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for holds, message in _RULES:
            if not holds(self):
                raise ConfigurationError(f"the data dictionary: {message.format(**vars(self))}")

    @property
    def questions(self) -> list[str]:
        """What somebody has to answer, by column."""
        questions = []
        for name, reason in self.excluded.items():
            if reason.startswith("?"):
                questions.append(f"{name}: {reason[1:].strip()}")
        return questions

    @property
    def is_complete(self) -> bool:
        """Whether tables can be read by it, if it has no questions."""
        has_target = len(self.classes or ()) > 1 or self.task == "regression"
        are_complete = all(column.is_complete for column in self.columns.values())
        return has_target and bool(self.columns) and are_complete

    @property
    def lacks(self) -> str:
        """What a draft has to add, with the way to it. Empty if nothing is missing."""
        missing_parts = []
        for name, column in self.columns.items():
            if not column.is_complete:
                part = "categories" if column.kind == CATEGORIES else "kind, mean and scale"
                missing_parts.append(f"{part} of {name!r}")
        if not self.classes and self.task == "classification":
            missing_parts.append("classes")
        if not missing_parts:
            return ""
        return (
            f"it lacks {listed(missing_parts, 20)}. flsv data --write drafts these. Sites say what they know in their "
            "own dictionaries, draft again with it, and merge again"
        )

    def column(self, name: str) -> Column:
        """Return what is known of a column, of which nothing may be said."""
        return self.columns.get(name) or self.columns.get(REST) or Column()

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features: numbers, then each category of each column, then marks of missing values."""
        number_names = []
        category_names = []
        mark_names = []
        for name, column in self.columns.items():
            if column.categories is None:
                number_names.append(name)
            for category in column.categories or ():
                category_names.append(f"{name}={category}")
            if column.gaps is not False:
                mark_names.append(f"{name} missing")
        return (*number_names, *category_names, *mark_names)

    def values(self, cells: Cells) -> dict[str, pd.Series]:
        """Return the values of all columns, or raise ConfigurationError that names ten cells that do not fit."""
        self._check_readable(cells)
        values = {}
        misfits: list[str] = []
        unfit_columns = []
        num_misfits = 0
        for name, column in self.columns.items():
            values_of_column, is_misfit = column.values(cells, name)
            values[name] = values_of_column
            if not is_misfit.any():
                continue

            rows = np.flatnonzero(is_misfit)
            num_misfits += len(rows)
            unfit_columns.append(f"{name!r} ({column.description})")
            for row in rows[: _MAX_CELLS - len(misfits)].tolist():
                cell = cells.frame[name].iloc[row]
                shown_cell = "a missing value" if pd.isna(cell) else repr(cell)
                line = cells.where([row])
                misfits.append(f"{line}: {shown_cell} in {name!r}, expected {column.description}")

        if misfits:
            title = f"Cells that do not fit the data dictionary {self.hash}: {num_misfits}"
            remedy = "Correct the cells, or the dictionary, which all sites share."
            raise ConfigurationError(
                "\n".join([title, *misfits, remedy]),
                without_data=self.without_cells(unfit_columns),
            )
        return values

    def without_cells(self, unfit_columns: Sequence[str]) -> str:
        """Return what a site may say of columns that do not fit, which are in the dictionary, and their cells not."""
        columns = listed(unfit_columns)
        return f"its table does not fit the data dictionary {self.hash} in {columns}, its own log says more"

    def _check_readable(self, cells: Cells) -> None:
        """Raise ConfigurationError if the dictionary is not complete, or the table lacks a column."""
        if self.questions:
            raise ConfigurationError(
                "The data dictionary has questions without an answer:\n  "
                + "\n  ".join(self.questions)
            )
        if self.lacks:
            raise ConfigurationError(f"The data dictionary is not complete: {self.lacks}.")
        for name in (self.target, *self.columns):
            cells.check_has(name, "the data dictionary")

    def encode(self, values: Mapping[str, pd.Series]) -> np.ndarray:
        """Return the features, float32 ``[N, D]``, of all columns' values."""
        first_values, *_ = values.values()
        position_by_name = {name: position for position, name in enumerate(self.feature_names)}
        shape = (len(first_values), len(position_by_name))
        features = np.zeros(shape, dtype=np.float32)
        for name, values_of_column in values.items():
            column = self.columns[name]
            is_missing = values_of_column.isna().to_numpy()
            if column.categories is None:
                numbers = values_of_column.to_numpy(dtype=float)
                standardized = (numbers - column.mean) / (column.scale or 1.0)
                standardized[is_missing] = 0.0
                features[:, position_by_name[name]] = standardized
            elif column.categories:
                words = values_of_column.cat.set_categories(column.categories)
                category_of_row = words.cat.codes.to_numpy(dtype=np.int64)
                rows = np.flatnonzero(category_of_row >= 0)
                first_position = position_by_name[f"{name}={column.categories[0]}"]
                features[rows, first_position + category_of_row[rows]] = 1.0
            if column.gaps is not False:
                features[:, position_by_name[f"{name} missing"]] = is_missing
        return features

    def targets(self, cells: Cells) -> np.ndarray:
        """Return each row's class, int64 ``[N]``, or its number, float32 ``[N]``."""
        if self.task == "regression":
            numbers = cells.numbers(self.target)
            is_misfit = ~(np.abs(numbers) <= LARGEST_NUMBER)
            valid_numbers = np.where(is_misfit, 0.0, numbers)
            standardized = (valid_numbers - self.target_mean) / self.target_scale
            targets = standardized.astype(np.float32)
            description = "a number in the file's notation (read)"
        else:
            classes = self.classes or ()
            words = cells.words(self.target, "target").cat.set_categories(classes)
            targets = words.cat.codes.to_numpy(dtype=np.int64)
            is_misfit = targets < 0
            description = f"one of {len(classes)} classes: {listed(classes, 20)}"
        if is_misfit.any():
            row = int(np.argmax(is_misfit))
            cell = str(cells.frame[self.target].iloc[row])
            raise ConfigurationError(
                f"{cells.where([row])}: {cell!r} in target {self.target!r}, expected {description}.",
                without_data=self.without_cells([f"{self.target!r} ({description})"]),
            )
        return targets

    @property
    def hash(self) -> str:
        """Fingerprint that server and sites compare, 12 hexadecimal digits."""
        return digest(self.to_plain()).hex()[:12]

    def to_plain(self) -> dict[str, Any]:
        """Return the dictionary as values of YAML's types, without what has its default."""
        plain = _changed_fields(self)
        for name, record_type in (("read", FileFormat), ("columns", Column)):
            records: Mapping[str, Any] = getattr(self, name)
            if records or record_type is Column:
                plain[name] = {key: _changed_fields(record) for key, record in records.items()}
        return plain

    def to_text(self, comments: Mapping[str, str] | None = None) -> str:
        """Return the dictionary in YAML, one line a column, with all texts in quotation marks."""
        comments = comments or {}
        lines = list(_HEAD)
        plain = self.to_plain()
        columns = plain.pop("columns")
        lines += [
            f"{name}: {_quoted(value)}" for name, value in plain.items() if name != "excluded"
        ]
        sections = {"columns": columns, "excluded": self.excluded}
        for title, entries in sections.items():
            if not entries:
                continue
            lines.append(f"{title}:")
            for name, entry in entries.items():
                comment = f"  # {comments[name]}" if name in comments else ""
                lines.append(f"  {_quoted(name)}: {_quoted(entry)}{comment}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Dictionary:
        """Read what :meth:`to_plain` returns, or what somebody has written.

        Raises:
            ConfigurationError: it has an unknown option, or an option of another type.
        """
        options = dict(plain)
        columns = {}
        for name, column_plain in (options.pop("columns", None) or {}).items():
            columns[str(name).strip()] = _column_from_plain(str(name), column_plain or {})
        formats = {}
        for name, format_plain in (options.pop("read", None) or {}).items():
            formats[str(name)] = _record(FileFormat, format_plain, f"read: {name!r}")

        excluded = options.pop("excluded", None) or {}
        if isinstance(excluded, str):
            excluded = [excluded]
        if not isinstance(excluded, Mapping):
            excluded = dict.fromkeys(excluded, "")
        excluded = {str(name).strip(): str(reason or "") for name, reason in excluded.items()}
        options |= {"columns": columns, "read": formats, "excluded": excluded}
        dictionary: Dictionary = _record(cls, options, "the data dictionary")
        positive = dictionary.positive
        is_draft = bool(dictionary.class_counts)
        classes = dictionary.classes or ()
        if positive is None and len(classes) == 2 and not is_draft:
            positive = classes[-1]
        return dictionary.with_positive(positive)

    @classmethod
    def from_file(cls, path: str | Path) -> Dictionary:
        """Read a dictionary from a YAML file."""
        try:
            plain = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise ConfigurationError(
                f"{path} cannot be read as a data dictionary: {error}"
            ) from error
        if not isinstance(plain, Mapping):
            raise ConfigurationError(
                f"{path} is no data dictionary: expected target:, columns: ..."
            )
        return cls.from_plain(plain)

    def with_positive(self, positive: str | None) -> Dictionary:
        """Return the dictionary with the positive one of two classes last."""
        if positive is None or self.classes is None:
            return replace(self, positive=positive)
        classes = [name for name in self.classes if name != positive]
        return replace(self, positive=positive, classes=(*classes, positive))


_HEAD = (
    "# What the columns mean. Read each line, correct it, and let all sites have the same file.",
    "# Counts, classes, means and rare words tell something of the rows: delete what must not leave.",
)

if TYPE_CHECKING:
    DictionaryOptions: TypeAlias = Dictionary | Mapping[str, Any] | str | Path | None
else:
    #: What the command line can give: options, or the path of a file.
    DictionaryOptions = dict[str, Any] | str | None


def _changed_fields(record: Any) -> dict[str, Any]:
    """Return the fields of a record that have not their defaults. Mappings of records are left out."""
    changed = {}
    for option in fields(record):
        value = getattr(record, option.name)
        is_default = value == option.default or value == {}
        if option.name in ("columns", "read") or is_default:
            continue
        changed[option.name] = list(value) if isinstance(value, tuple) else value
    return changed


def _record(record_type: Any, options: Mapping[str, Any], title: str) -> Any:
    """Make a record of options. An unknown one is refused by name."""
    names = [option.name for option in fields(record_type)]
    for name in options:
        if name not in names:
            raise ConfigurationError(
                f"{title} has no option {name!r}.{nearest(str(name), names)} It has {', '.join(names)}."
            )
    try:
        return record_type(**{name: _immutable(value) for name, value in options.items()})
    except ConfigurationError as error:
        raise ConfigurationError(f"{title}: {error}") from error


def _immutable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _column_from_plain(name: str, plain: Mapping[str, Any]) -> Column:
    """Read a column, whose kind follows from its categories or scale if it is left out."""
    column: Column = _record(Column, plain, f"column {name!r}")
    if column.kind:
        return column
    if column.categories is not None:
        return replace(column, kind=CATEGORIES)
    if column.scale is not None:
        return replace(column, kind=NUMBERS)
    return column


def _quoted(plain: Any) -> str:
    """Write a value as JSON, which is YAML with all texts in quotation marks."""
    return json.dumps(plain, ensure_ascii=False)
