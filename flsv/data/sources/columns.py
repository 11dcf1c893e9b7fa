"""Options of a table's columns, and their kinds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

import pandas as pd
from annotated_types import Ge

from flsv.data.sources.agreed import DAYS_KIND, WORDS_KIND, AgreedEncoder, read_encoder_file
from flsv.data.sources.notation import TextFormat
from flsv.utilities.declared import Count, Rules, check_argument, checked
from flsv.utilities.errors import ColumnError, ConfigurationError

GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")


@checked
@dataclass
class Columns:
    """Options that turn the columns of a table into inputs and targets.

    The kind of a column is decided once for all tables. In a text file a column has numbers if all its values except
    missing ones are numbers, and none has a leading zero (``01234``). It has truth values, which become 0 or 1, if all
    are ``True`` or ``False``. Otherwise it has words. Columns of a Parquet file or a DataFrame keep their type, and
    missing values are ``None``, NaN and blank words.

    Columns of dates are refused unless ``dates`` converts them.

    Numbers are standardized, and a missing value becomes 0, the mean. Words are one-hot encoded, a missing or unknown
    one as zeros. Words that differ in case, white space or a full stop only are refused. A column with a missing value
    in a training row adds a feature that is 1 for rows without a value. Rows without a target are left out, with a
    warning.

    Means, deviations and categories are fitted on all clients' training rows together. On several machines each site
    tells counts and exact sums (:class:`~flsv.data.sources.agreed.TableSummary`): features are those of one process,
    to the bit.

    A number to predict stays as in the table. With ``standardize_target`` squared errors are shares of its variance.

    Args:
        task: ``"classification"`` if the target's values are classes, or ``"regression"``.
        features: columns to predict from. None: all columns except the target and the group, even identifiers.
        exclude: columns to leave out. Some tables may lack them.
        categorical: columns whose numbers are names of categories.
        gaps: marks of a missing value besides blanks. None: :data:`GAPS` in a text file, no marks in a DataFrame. A
            dictionary ``{column: marks}`` adds marks for some columns. Numbers match in every notation: ``-99`` also
            matches ``-99.0``.
        standardize_target: whether to subtract the mean of a regression's target and divide by its standard deviation.
        max_categories: largest number of categories of a column. A column with more is refused.
        decimal: decimal mark of numbers in a file. With ``","``, ``"12,5"`` is a number and ``"12.5"`` is none.
        thousands: thousands separator of numbers in a file: with ``"."``, ``"1.234,5"`` is 1234.5. None: numbers have
            none, and a column whose points may separate thousands is refused.
        encoding: encoding of the text files that are not in UTF-8, such as ``cp1252`` of Windows in Western Europe.
        dates: ``{column: start}`` for columns of dates, which become days since 1970 if ``start`` is ``"days"``, else
            since the date in the column ``start``: ``{"left": "came"}`` gives the length of a stay.
        date_format: formats of dates, as for ``strftime``, such as ``"%d.%m.%Y"``, besides ISO 8601 (``2024-03-31``).
        classes: names of all classes. None: all labels in the tables, which then have to share labels. Any other label
            is refused.
        min_rows: smallest number of a client's rows of which the client tells something. Categories, classes, numbers
            or missing values of fewer rows count as if the client had none. A class that no client tells is refused,
            unless ``classes`` names it.
        read: ``{client: options}``, how some clients' text files are written: ``sep``, ``decimal``, ``thousands``,
            ``encoding``.
        encoder: an encoder that was agreed on beforehand, as ``encoder.json`` of an earlier run has it, or its file.
            Then nothing is fitted, and no site tells anything about its table. If it names the ``target`` it is a data
            dictionary, as ``flsv data --write`` drafts it: cells that do not fit are refused.

    Raises:
        ConfigurationError: arguments are out of range or contradict each other.
    """

    rules: ClassVar[Rules] = (
        (
            lambda a: not a.standardize_target or a.task == "regression",
            "standardize_target is for task: regression; classes have no mean.",
        ),
    )

    task: Literal["classification", "regression"] = "classification"
    features: list[str] | None = None
    exclude: list[str] | None = None
    categorical: list[str] | None = None
    gaps: list[str] | dict[str, list[str]] | None = None
    standardize_target: bool = False
    max_categories: Annotated[int, Ge(2)] = 50
    decimal: Literal[".", ","] = "."
    thousands: Literal[".", ",", " ", "'"] | None = None
    encoding: str | None = None
    dates: dict[str, str] | None = None
    date_format: list[str] | str | None = None
    classes: list[str] | None = None
    min_rows: Count = 1
    read: dict[str, dict[str, str]] | None = None
    encoder: dict[str, Any] | str | None = None

    def format_of(self, client: str) -> TextFormat:
        """Return how a client's text files are written."""
        return self._formats.get(client, self._formats[""])

    @property
    def texts(self) -> set[str]:
        """Columns of a text file that are read as texts, even if all their values are numbers."""
        dates = self.dates or {}
        names = {*dates, *dates.values()}
        names.update(self.categorical or ())
        names.update(self.exclude or ())
        return names

    def missing(self, name: str, typed: bool = False) -> set[str]:
        """Return the texts that mark a missing value in the column ``name``.

        With ``typed`` the column is from a DataFrame or Parquet file.
        """
        default_marks = () if typed else GAPS
        marks_of_column: set[str] = set()
        if self.agreed is not None:
            for code in self.agreed.columns:
                if code.name == name:
                    marks_of_column.update(code.gap_marks)
        if isinstance(self.gaps, dict):
            return {"", *default_marks, *marks_of_column, *self.gaps.get(name, ())}
        marks = default_marks if self.gaps is None else self.gaps
        return {"", *marks, *marks_of_column}

    def __post_init__(self) -> None:
        # Columns of a DataFrame may be called by numbers.
        self.features = _texts(self.features)
        self.exclude = _texts(self.exclude)
        self.categorical = _texts(self.categorical)
        self.date_format = _texts(self.date_format)
        self.classes = _texts(self.classes)
        dates = self.dates or {}
        self.dates = {str(name).strip(): origin.strip() for name, origin in dates.items()}
        if isinstance(self.gaps, Mapping):
            self.gaps = {
                str(name).strip(): _texts(marks) or [] for name, marks in self.gaps.items()
            }
        else:
            self.gaps = _texts(self.gaps)

        usual_format = {name: getattr(self, name) for name in ("decimal", "thousands", "encoding")}
        self._formats = {"": TextFormat(**usual_format)}
        for client, options in (self.read or {}).items():
            if options.keys() - {field.name for field in fields(TextFormat)}:
                raise ConfigurationError(
                    f"read: {client!r} has {sorted(options)}. Expected sep, decimal, thousands, encoding."
                )
            changed_format: dict[str, Any] = {**usual_format, **options}
            self._formats[client] = TextFormat(**changed_format)

        self.agreed: AgreedEncoder | None = None
        if isinstance(self.encoder, str):
            self.encoder = read_encoder_file(self.encoder)
        if self.encoder is not None:
            self.agreed = AgreedEncoder.from_plain(self.encoder)
            has_classes = self.agreed.classes is not None
            if has_classes != (self.task == "classification"):
                raise ConfigurationError(
                    f"Columns(task={self.task!r}): its encoder has classes {self.agreed.classes}."
                )
            if self.agreed.is_dictionary:
                self._read_by(self.agreed)

    def _read_by(self, dictionary: AgreedEncoder) -> None:
        """Read columns by the kinds in a data dictionary: numbers as names of categories, and dates."""
        codes = dictionary.columns
        self.categorical = [code.name for code in codes if code.kind == WORDS_KIND]
        dates = {}
        for code in codes:
            if code.kind.startswith(DAYS_KIND):
                start_name = code.kind.removeprefix(DAYS_KIND)
                dates[code.name] = DAYS_SINCE_1970 if start_name == "1970" else start_name
        self.dates = dates

    def kept_together(self, together: str | None) -> str | None:
        """Return the column of ``Splits.together``, which a data dictionary's patient is, too."""
        patient = None if self.agreed is None else self.agreed.patient
        if patient not in (None, together) and together is not None:
            raise ConfigurationError(
                f"splits.together is {together!r}, and the data dictionary has patient: {patient!r}."
            )
        return patient or together

    def __repr__(self) -> str:
        """Show all options but newer ones that have their defaults: runs are resumed only with the same text."""
        hidden_at_default = ("min_rows", "read", "encoder")
        shown = []
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name not in hidden_at_default or value != option.default:
                shown.append(f"{option.name}={value!r}")
        return f"Columns({', '.join(shown)})"

    def check_roles(self, target: str, group: str | None) -> None:
        """Raise ConfigurationError if the column ``target`` or ``group`` has another role as well."""
        feature_names: list[str] = []
        for names in (self.features, self.categorical, self.dates):
            feature_names += names or ()
        if target == group or target in feature_names:
            name_of_two_roles = target
        elif group in feature_names:
            name_of_two_roles = group
        else:
            return
        raise ConfigurationError(
            f"Columns: {name_of_two_roles!r} is the target or the group, and cannot have another role."
        )

    def with_remedies(self, problems: Iterable[ColumnError]) -> dict[str, Any]:
        """Return the options that differ from their defaults, with changes that may solve ``problems``."""
        options: dict[str, Any] = {}
        for option in fields(self):
            value = getattr(self, option.name)
            default = getattr(Columns, option.name)
            is_set = value not in (None, {}) and value != default
            if is_set:
                options[option.name] = value

        for problem in problems:
            for name, remedy in problem.remedy.items():
                if isinstance(remedy, list):
                    merged = [*options.get(name, ()), *remedy]
                    options[name] = list(dict.fromkeys(merged))
                elif isinstance(remedy, dict):
                    options[name] = {**options.get(name, {}), **remedy}
                else:
                    options[name] = remedy
        return options


def _texts(texts: Any) -> list[str] | None:
    if texts is None:
        return None
    if isinstance(texts, str):
        texts = [texts]
    return [str(text).strip() for text in texts]


if TYPE_CHECKING:
    GivenColumns: TypeAlias = Columns | Mapping[str, Any] | None
else:
    GivenColumns = Columns | None  # which the command line takes apart into options


def as_columns(options: GivenColumns) -> Columns:
    """Convert options in a dictionary to ``Columns``. None gives the defaults."""
    if isinstance(options, Mapping):
        columns = Columns(**options)
    else:
        columns = options or Columns()
    return check_argument("columns", "columns", columns, Columns)


@dataclass(frozen=True)
class ColumnCard:
    """Record of a table's column: its kind and its values.

    Args:
        name: the column's name.
        kind: its kind, such as ``"numbers"`` or ``"categories"``.
        values: numbers or words, ``[N]``, NaN for missing values: of all rows while a table is read, of the training
            samples in :class:`SourceData`, indexed by their lines in the file, or their numbers in a DataFrame.
        categories: the different words of the training rows, sorted, or None.
    """

    name: str
    kind: str
    values: pd.Series
    categories: Sequence[str] | None = None

    @property
    def became(self) -> str:
        """Features that the column becomes, as text such as ``"3 categories"`` or ``"0 or 1"``."""
        if self.categories is not None:
            return f"{len(self.categories)} categories"
        return {"numbers": "a number", "truth values": "0 or 1"}.get(self.kind, self.kind)


#: Word of the option ``dates``: days since 1970.
DAYS_SINCE_1970 = "days"
#: Largest number of problems that a message lists.
_MAX_LISTED_PROBLEMS = 30


def raise_problems(problems: Sequence[ColumnError], columns: Columns) -> None:
    """Raise one ConfigurationError that lists ``problems``, if there are any, and options that may help."""
    if not problems:
        return
    lines = list(map(str, problems[:_MAX_LISTED_PROBLEMS]))
    if len(problems) > _MAX_LISTED_PROBLEMS:
        lines.append(f"and {len(problems) - _MAX_LISTED_PROBLEMS} more")
    if columns.agreed is not None and columns.agreed.is_dictionary:
        lines.append("Correct the tables, or let all sites sign another data dictionary.")
        raise ConfigurationError("\n".join(lines))
    lines.append("These options may help (in Python columns={...}):")
    options = json.dumps(columns.with_remedies(problems), ensure_ascii=False)
    lines.append(f"  columns: {options}")
    raise ConfigurationError("\n".join(lines))
