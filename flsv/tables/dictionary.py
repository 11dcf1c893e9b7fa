"""The data dictionary: what each column of a federation's tables means.

Tables are read by their data dictionary alone. An error names file, line and column of a field that does not fit it.
All sites have the same dictionary, so that they have the same features. ``inference`` infers what it does not say.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
import pandas as pd
import yaml

from flsv.data.column_texts import texts_of
from flsv.tables.table import (
    LARGEST_NUMBER,
    USUAL_GAPS,
    FileFormat,
    Table,
    dates_of,
    numbers_of,
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
#: Name for all columns that are not named.
REST = "*"
#: A text of a YAML file. Without quotation marks, no, 01067 and 1e9 are a truth value and numbers.
Text = Annotated[str, "Write texts in quotation marks."]
#: A column's numbers or words, with NaN for missing values, and which of its fields do not fit, bool ``[N]``.
ValuesOfColumn: TypeAlias = tuple[pd.Series, np.ndarray]
#: Spellings of truth values.
NUMBER_BY_TRUTH = {"true": 1.0, "True": 1.0, "TRUE": 1.0, "false": 0.0, "False": 0.0, "FALSE": 0.0}
_KINDS = (NUMBERS, WHOLE_NUMBERS, TRUTHS, CATEGORIES)
#: Largest number of fields that an error names.
_MAX_FIELDS = 10


def _is_kind(kind: str) -> bool:
    is_days = kind.startswith(DAYS) and len(kind) > len(DAYS)
    return is_days or kind in ("", *_KINDS)


def _are_distinct(words: Sequence[str] | None) -> bool:
    return words is None or len(set(words)) == len(words)


@cache
def _numbers_among(marks: tuple[str, ...]) -> np.ndarray:
    numbers = numbers_of(pd.Series(marks, dtype=object), FileFormat())
    return numbers[np.isfinite(numbers)]


@checked
@dataclass(frozen=True)
class Column:
    """A column's meaning, and its features: ``(number - mean) / scale``, or one feature for each category.

    A missing value becomes the mean, or no category. Unless ``gaps`` is False, a further feature is 1 where a value is
    missing.

    Args:
        kind: ``numbers``, ``whole numbers``, ``truth values``, ``categories``, ``days since 1970`` or ``days since
            <another column>``. Empty until it is inferred.
        mean: number that is subtracted. None until it is inferred.
        scale: number by which the difference is divided. None until it is inferred. 0 is inferred for a constant
            column.
        low: smallest number that fits. None: no bound.
        high: largest number that fits. None: no bound.
        unit: unit, which may follow each number.
        categories: the words of the column. None until they are inferred.
        other_words: whether the column may have further words, which become no category.
        gaps: texts that mean a missing value, besides empty fields. True: the usual ones. False: no value is missing.
        count: number of rows with a value, if the column was inferred.
        missing: number of rows without a value, if the column was inferred.

    Raises:
        ConfigurationError: an argument has another type, or arguments contradict each other.
    """

    rules: ClassVar[Rules] = (
        (lambda a: None in (a.low, a.high) or a.low <= a.high, "low={low} is above high={high}."),
        (
            lambda a: _is_kind(a.kind),
            'kind={kind!r}: expected "numbers", "whole numbers", "truth values", "categories", "days since 1970" or '
            '"days since <column>".',
        ),
        (
            lambda a: _are_distinct(a.categories),
            "categories={categories}: a category occurs twice.",
        ),
        (
            lambda a: a.categories is None or a.kind in ("", CATEGORIES),
            "kind={kind!r}: only a column of kind: categories has categories.",
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
        """Return whether the column can be encoded."""
        if not self.kind:
            return False
        if self.kind == CATEGORIES:
            return self.categories is not None
        return self.mean is not None and self.scale is not None

    @property
    def has_numbers(self) -> bool:
        """Return whether the column has numbers or whole numbers."""
        return self.kind in (NUMBERS, WHOLE_NUMBERS)

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest number that fit."""
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return low, high

    @property
    def description(self) -> str:
        """Values that fit, for messages."""
        if self.categories is not None:
            return f"one of {listed(self.categories, 8, repr)}"
        low, high = self.bounds
        return f"{self.kind} from {low:g} to {high:g} {self.unit}".strip()

    @property
    def read_as(self) -> str:
        """Kind of the column, or the number of its categories, for messages."""
        if self.categories is not None:
            return f"{len(self.categories)} categories"
        return self.kind

    def gap_marks(self, is_text_file: bool) -> tuple[str, ...]:
        """Return the texts that mean a missing value. The usual ones hold for text files: in a DataFrame, NA is a
        word.
        """
        if not isinstance(self.gaps, bool):
            return ("", *self.gaps)
        return USUAL_GAPS if is_text_file else ("",)

    def values(self, table: Table, name: str) -> ValuesOfColumn:
        """Return the numbers or words of the table's column ``name``, and which of its fields do not fit."""
        if self.kind == CATEGORIES:
            values, is_misfit = self._words(table, name)
        else:
            values, is_misfit = self._numbers(table, name)
        if self.gaps is False:
            is_misfit = is_misfit | values.isna().to_numpy()
        return values, is_misfit

    def _words(self, table: Table, name: str) -> ValuesOfColumn:
        words = table.words(name)
        gap_marks = self.gap_marks(table.is_text_file)
        marks = set(gap_marks)
        marks.update(texts_of(pd.Series(gap_marks, dtype=object)))
        marks.intersection_update(words.cat.categories)
        values = words.cat.remove_categories(marks)
        if self.other_words:
            return values, np.zeros(len(values), dtype=bool)
        is_misfit = values.notna() & ~values.isin(self.categories or ())
        return values, is_misfit.to_numpy()

    def _numbers(self, table: Table, name: str) -> ValuesOfColumn:
        numbers = self._all_numbers(table, name)
        gap_marks = self.gap_marks(table.is_text_file)
        is_gap = np.isin(numbers, _numbers_among(gap_marks))  # -99.0 for "-99"
        is_no_number = np.isnan(numbers)
        texts = texts_of(table.frame[name][is_no_number])
        is_gap[is_no_number] = texts.isna() | texts.isin(gap_marks)
        if self.kind.startswith(DAYS) and self.kind != DAYS_SINCE_1970:
            first_day_column = self.kind.removeprefix(DAYS)
            is_gap |= table.is_missing(first_day_column, gap_marks)

        low, high = self.bounds
        fits = (numbers >= low) & (numbers <= high)
        fits &= np.abs(numbers) <= LARGEST_NUMBER
        if self.kind == WHOLE_NUMBERS:
            fits &= numbers % 1 == 0
        known_numbers = np.where(is_gap, np.nan, numbers)
        return pd.Series(known_numbers), ~is_gap & ~fits

    def _all_numbers(self, table: Table, name: str) -> np.ndarray:
        if self.kind == TRUTHS:
            numbers = table.words(name).map(NUMBER_BY_TRUTH)
            return numbers.to_numpy(dtype=float, na_value=np.nan)
        if not self.kind.startswith(DAYS):
            return table.numbers(name, self.unit)

        start_dates: Any = pd.Timestamp("1970-01-01", tz="UTC")  # in seconds, up to the year 9999
        if self.kind != DAYS_SINCE_1970:
            start_name = self.kind.removeprefix(DAYS)
            table.check_has(start_name, f"kind of {name}")
            start_dates = dates_of(table.frame[start_name], table.file_format)
        durations = dates_of(table.frame[name], table.file_format) - start_dates
        days = durations / pd.Timedelta(days=1)
        return days.to_numpy(dtype=float)


#: Conditions on a dictionary, each with the message of the error if it does not hold.
_RULES: Rules = (
    (
        lambda a: not a.standardize_target or a.task == "regression",
        "standardize_target=True needs task: regression, since classes have no mean.",
    ),
    (
        lambda a: a.classes is None or a.task == "classification",
        "task: regression has no classes, but classes={classes} are given.",
    ),
    (lambda a: _are_distinct(a.classes), "classes={classes}: a class occurs twice."),
    (
        lambda a: a.target not in a.columns,
        "the target {target!r} is among the columns, which become features.",
    ),
    (
        lambda a: a.columns.keys().isdisjoint(a.excluded),
        "a column is both among the columns and among the excluded ones.",
    ),
    (
        lambda a: a.positive is None or a.classes is None or a.positive in a.classes,
        "positive={positive!r} is not one of classes={classes}.",
    ),
)


@checked
@dataclass(frozen=True)
class Dictionary:
    """The meaning of the columns of a federation's tables, by name.

    A dictionary is complete if it has the classes, and the mean and scale or the categories of each column. In one
    process, flsv infers what is missing from the training rows of all clients.

    Args:
        target: the column to predict.
        task: whether the values of the target are classes, or numbers.
        columns: each column that becomes features.
        classes: classes of the target, the positive one of two last.
        positive: the positive one of two classes. None: the larger number or ``True``.
        class_counts: number of rows of each class, if the dictionary was inferred.
        standardize_target: whether numbers to predict are standardized.
        target_mean: number that is subtracted from a number to predict.
        target_scale: number by which the difference is divided.
        excluded: columns that are not used, each with the reason. A reason that begins with a question mark is a
            question, which somebody has to answer. ``"*"``: all columns that are not named.
        read: how tables are written, by the client's or the file's name, such as ``{"Lyon": {"decimal": ",", "rename":
            {"geschlecht": "sex"}, "recode": {"sex": {"1": "f", "2": "m"}}}}``. ``"*"``: all others.

    Raises:
        ConfigurationError: an argument has another type, or arguments contradict each other.
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
    read: Mapping[str, FileFormat] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for holds, message in _RULES:
            if not holds(self):
                raise ConfigurationError(f"the data dictionary: {message.format(**vars(self))}")

    @property
    def questions(self) -> list[str]:
        """Questions that somebody has to answer, each with its column."""
        questions = []
        for name, reason in self.excluded.items():
            if reason.startswith("?"):
                questions.append(f"{name}: {reason[1:].strip()}")
        return questions

    @property
    def is_complete(self) -> bool:
        """Return whether tables can be read by the dictionary, if it has no questions."""
        has_target = len(self.classes or ()) > 1 or self.task == "regression"
        are_complete = all(column.is_complete for column in self.columns.values())
        return has_target and bool(self.columns) and are_complete

    @property
    def missing_parts(self) -> str:
        """Return what is missing, and how to add it, "" if nothing is missing."""
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
            f"{listed(missing_parts, 20)} are missing. flsv data --write infers these. Sites write what they know into "
            "their own dictionaries, run flsv data --write again, and merge again"
        )

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

    def values(self, table: Table) -> dict[str, pd.Series]:
        """Return the values of all columns.

        Raises:
            ConfigurationError: fields do not fit. The message names up to ten of them.
        """
        self._check_readable(table)
        values = {}
        examples: list[str] = []
        unfit_columns = []
        num_misfits = 0
        for name, column in self.columns.items():
            values[name], is_misfit = column.values(table, name)
            if is_misfit.any():
                rows = np.flatnonzero(is_misfit)
                num_misfits += len(rows)
                unfit_columns.append(f"{name!r} ({column.description})")
                num_more_examples = _MAX_FIELDS - len(examples)
                for row in rows[:num_more_examples].tolist():
                    examples.append(_describe_misfit(table, row, name, column))

        if num_misfits:
            title = f"Fields that do not fit the data dictionary {self.hash}: {num_misfits}"
            remedy = "Correct the fields, or the dictionary that all sites share, such as the files' formats (read)."
            raise ConfigurationError(
                "\n".join([title, *examples, remedy]),
                without_data=self.message_without_values(unfit_columns),
            )
        return values

    def message_without_values(self, unfit_columns: Sequence[str]) -> str:
        """Return an error message for the server, which names columns that do not fit, but no value of a table."""
        columns = listed(unfit_columns)
        return f"its table does not fit the data dictionary {self.hash} in {columns}; the site's own log says more"

    def _check_readable(self, table: Table) -> None:
        if self.questions:
            raise ConfigurationError(
                "The data dictionary has questions that nobody has answered:\n  "
                + "\n  ".join(self.questions)
            )
        if self.missing_parts:
            raise ConfigurationError(f"The data dictionary is not complete: {self.missing_parts}.")
        for name in (self.target, *self.columns):
            table.check_has(name, "the data dictionary")

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
                codes = words.cat.codes.to_numpy(dtype=np.int64)  # -1 for no category
                rows = np.flatnonzero(codes >= 0)
                first_position = position_by_name[f"{name}={column.categories[0]}"]
                features[rows, first_position + codes[rows]] = 1.0
            if column.gaps is not False:
                features[:, position_by_name[f"{name} missing"]] = is_missing
        return features

    def targets(self, table: Table) -> np.ndarray:
        """Return each row's class, int64 ``[N]``, or the number to predict, float32 ``[N]``."""
        if self.task == "regression":
            numbers = table.numbers(self.target)
            is_misfit = ~(np.abs(numbers) <= LARGEST_NUMBER)  # also for NaN
            self._check_targets(table, is_misfit, "a number in the file's format (read)")
            standardized = (numbers - self.target_mean) / self.target_scale
            return standardized.astype(np.float32)

        classes = self.classes or ()
        words = table.words(self.target, "target").cat.set_categories(classes)
        numbers_of_classes = words.cat.codes.to_numpy(dtype=np.int64)  # -1 for another word
        expected = f"one of {len(classes)} classes: {listed(classes, 20)}"
        self._check_targets(table, numbers_of_classes < 0, expected)
        return numbers_of_classes

    def _check_targets(self, table: Table, is_misfit: np.ndarray, expected: str) -> None:
        if not is_misfit.any():
            return
        row = int(np.argmax(is_misfit))
        value = str(table.frame[self.target].iloc[row])
        raise ConfigurationError(
            f"{table.where([row])}: {value!r} in the target {self.target!r}, expected {expected}.",
            without_data=self.message_without_values([f"{self.target!r} ({expected})"]),
        )

    @property
    def hash(self) -> str:
        """Fingerprint that server and sites compare, 12 hexadecimal digits."""
        return digest(self.to_plain()).hex()[:12]

    def to_plain(self) -> dict[str, Any]:
        """Return the dictionary as values of YAML's types, without arguments that have their defaults."""
        plain = _changed_options(self)
        for name, dataclass_type in (("read", FileFormat), ("columns", Column)):
            records: Mapping[str, Any] = getattr(self, name)
            if records or dataclass_type is Column:
                plain[name] = {key: _changed_options(record) for key, record in records.items()}
        return plain

    def to_text(self) -> str:
        """Return the dictionary in YAML, with one line for each column and all texts in quotation marks."""
        lines = list(_HEAD)
        plain = self.to_plain()
        columns = plain.pop("columns")
        lines += [
            f"{name}: {_quoted(value)}" for name, value in plain.items() if name != "excluded"
        ]
        sections = {"columns": columns, "excluded": self.excluded}
        for title, section in sections.items():
            if not section:
                continue
            lines.append(f"{title}:")
            for name, value in section.items():
                lines.append(f"  {_quoted(name)}: {_quoted(value)}")
        return "\n".join(lines) + "\n"

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Dictionary:
        """Make a dictionary of values of YAML's types, as :meth:`to_plain` returns.

        Raises:
            ConfigurationError: there is an unknown option, or an option has another type.
        """
        options = dict(plain)
        plain_columns = options.pop("columns", None) or {}
        columns = {}
        for name, plain_column in plain_columns.items():
            columns[str(name).strip()] = _column_from_plain(str(name), plain_column or {})
        plain_formats = options.pop("read", None) or {}
        formats = {}
        for name, plain_format in plain_formats.items():
            formats[str(name)] = _dataclass_from(FileFormat, plain_format, f"read: {name!r}")
        excluded = _reasons_by_name(options.pop("excluded", None) or {})
        options |= {"columns": columns, "read": formats, "excluded": excluded}
        dictionary: Dictionary = _dataclass_from(cls, options, "the data dictionary")

        # The user has chosen the order of the classes unless the dictionary was inferred.
        is_inferred = bool(dictionary.class_counts)
        classes = dictionary.classes or ()
        if dictionary.positive is None and len(classes) == 2 and not is_inferred:
            return dictionary.with_positive(classes[-1])
        return dictionary.with_positive(dictionary.positive)

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
                f"{path} is not a data dictionary: expected a YAML mapping with target:, columns: and others."
            )
        return cls.from_plain(plain)

    def with_positive(self, positive: str | None) -> Dictionary:
        """Return the dictionary with the positive one of two classes last."""
        if positive is None or self.classes is None:
            return replace(self, positive=positive)
        classes = [name for name in self.classes if name != positive]
        return replace(self, positive=positive, classes=(*classes, positive))


_HEAD = (
    "# What the columns mean. Read each line, correct it, and give all sites the same file.",
    "# Counts, classes, means and rare words reveal something about the rows: delete what must not leave the site.",
)


def _describe_misfit(table: Table, row: int, name: str, column: Column) -> str:
    value = table.frame[name].iloc[row]
    description = "a missing value" if pd.isna(value) else repr(value)
    return f"{table.where([row])}: {description} in {name!r}, expected {column.description}"


def _reasons_by_name(excluded: Any) -> dict[str, str]:
    """Return why each column is excluded, by a mapping, a list of names or a single name."""
    if isinstance(excluded, str):
        excluded = [excluded]
    if not isinstance(excluded, Mapping):
        excluded = dict.fromkeys(excluded, "")
    return {str(name).strip(): str(reason or "") for name, reason in excluded.items()}


def _changed_options(record: Any) -> dict[str, Any]:
    """Return the options of a dataclass that differ from their defaults, without mappings of dataclasses."""
    changed = {}
    for option in fields(record):
        value = getattr(record, option.name)
        is_default = value == option.default or value == {}
        if option.name in ("columns", "read") or is_default:
            continue
        changed[option.name] = list(value) if isinstance(value, tuple) else value
    return changed


def _dataclass_from(dataclass_type: Any, options: Mapping[str, Any], title: str) -> Any:
    """Make a dataclass of options. Raise ConfigurationError for an unknown option."""
    names = [option.name for option in fields(dataclass_type)]
    for name in options:
        if name not in names:
            raise ConfigurationError(
                f"{title} has no option {name!r}.{nearest(str(name), names)} It has {', '.join(names)}."
            )
    try:
        return dataclass_type(**{name: _immutable(value) for name, value in options.items()})
    except ConfigurationError as error:
        raise ConfigurationError(f"{title}: {error}") from error


def _immutable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _column_from_plain(name: str, plain: Mapping[str, Any]) -> Column:
    """Make a column. If its kind is missing, it follows from the categories or the scale."""
    column: Column = _dataclass_from(Column, plain, f"column {name!r}")
    if column.kind:
        return column
    if column.categories is not None:
        return replace(column, kind=CATEGORIES)
    if column.scale is not None:
        return replace(column, kind=NUMBERS)
    return column


def _quoted(plain: Any) -> str:
    """Return a value as JSON, which is YAML with all texts in quotation marks."""
    return json.dumps(plain, ensure_ascii=False)
