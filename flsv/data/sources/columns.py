"""Which columns of a table are used, and how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from annotated_types import Ge

from flsv.arguments import check_kind
from flsv.declared import Rules, checked
from flsv.errors import ColumnError, ConfigurationError

GAPS = ("", "NA", "N/A", "NaN", "nan", "null", ".", "?")


@checked
@dataclass
class Columns:
    """How the columns of a table become inputs and targets.

    What a column holds is decided once, over the tables of all clients and of the server together. A file's column is
    of numbers if all that is in it are, gaps aside, and none begins with a zero that a number would lose (``01234``);
    of truth values, which are one number, 0 or 1, if all are ``True`` or ``False``; else of words. Columns of a Parquet
    file or a DataFrame are what they are there: words stay words, whatever they look like, pandas' categories stay
    categories, and a gap is what is one there (``None``, NaN) or a blank word. What was taken for what is logged.

    ``dates`` says what becomes of a column of dates, which are refused otherwise: days since 1970, days since another
    column's date (a stay from ``{"left": "came"}``). What cannot be used is said of all columns at once, with the
    options that would do.

    Numbers are standardized, and a gap becomes 0, the mean. Other columns are one-hot; a gap, or a category that no
    training row has, is a row of zeros. A column with a gap among the training rows gets another one, 1 where the gap
    is. Rows without a target are left out, with a warning.

    Only training rows tell means, deviations and categories, those of all clients together: everybody's rows influence
    everybody's features a little, and in a federation of several machines the clients would have to send, for each
    column, how many values they have, their sum and their sum of squares. All agree beforehand on the columns, the
    categories' names (the union of what the clients' training rows have), the classes' names (the union over all rows)
    and which columns have gaps.

    A number to predict is as in the table, or, with ``standardize_target``, less the mean and over the deviation of all
    training rows': squared errors are shares of its variance
    then. Otherwise a network starts far from the mean, and what everybody's training gains first, is the mean.

    Args:
        task: ``"classification"``, the target's values are classes, or ``"regression"``.
        features: columns to predict from; None: all others, with identifiers and what came after the target.
        exclude: columns to leave out of these; not every client's table needs to have them.
        categorical: columns whose numbers are names of categories.
        gaps: what a missing value looks like, besides white space around it; None for :data:`GAPS` in a file of text,
            and nothing more in a DataFrame. Of a dictionary, what it looks like in these columns besides.
        standardize_target: for regression.
        max_categories: how many categories a column may have; more are taken for a mistake.
        delimiter: one character between values of a file.
        dates: for a column of dates ``"days"``, or the column of dates from which days are counted.
        date_format: how dates are written, as of ``strftime``; None: ISO 8601, ``2024-03-31``.

    Raises:
        ConfigurationError: arguments out of range or that contradict each other.
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
    delimiter: str = ","
    dates: dict[str, str] | None = None
    date_format: str | None = None

    def missing(self, name: str, typed: bool = False) -> set[str]:
        """What stands for a gap in a column; ``typed``: of an object with columns, which has gaps of its own."""
        usual = () if typed else GAPS
        if isinstance(self.gaps, dict):
            return {"", *usual, *self.gaps.get(name, ())}
        return {"", *(usual if self.gaps is None else self.gaps)}

    def __post_init__(self) -> None:
        # Columns of a DataFrame may be called by numbers.
        for argument in ("features", "exclude", "categorical"):
            setattr(self, argument, _texts(argument, getattr(self, argument)))
        if isinstance(self.gaps, Mapping):
            self.gaps = {str(name).strip(): _texts("gaps", marks) or [] for name, marks in self.gaps.items()}
        else:
            self.gaps = _texts("gaps", self.gaps)
        self.dates = {str(name).strip(): how.strip() for name, how in (self.dates or {}).items()}

    def check_roles(self, target: str, group: str | None) -> None:
        """Raise ConfigurationError where a column has two roles."""
        used = [*(self.features or ()), *(self.categorical or ()), *(self.dates or ())]
        twice = next((name for name in (target, group) if name in used or target == group), None)
        if twice is not None:
            raise ConfigurationError(f"Columns: {twice!r} is the target or the group, and cannot be anything else.")

    def remedied(self, problems: Iterable[ColumnError]) -> dict[str, Any]:
        """The options that differ from their defaults, and those with which columns can be used that could not."""
        options = {each.name: getattr(self, each.name) for each in fields(self)}
        options = {name: value for name, value in options.items() if value and value != getattr(Columns, name)}
        for problem in problems:
            for name, value in problem.remedy.items():
                held = options.get(name, type(value)())
                options[name] = [*held, *value] if isinstance(value, list) else {**held, **value}
        return options


def _texts(argument: str, given: Any) -> list[str] | None:
    if isinstance(given, str) or not isinstance(given, Iterable | None):
        raise ConfigurationError(f"Columns({argument}={given!r}): expected a list.")
    return None if given is None else [str(each).strip() for each in given]


if TYPE_CHECKING:
    GivenColumns: TypeAlias = Columns | Mapping[str, Any] | None
else:
    GivenColumns = Columns | None  # what the command line makes: an option for each of theirs


def columns_of(given: GivenColumns) -> Columns:
    """What was given, or the options of it."""
    found = Columns(**given) if isinstance(given, Mapping) else given or Columns()
    check_kind("columns", "columns", found, Columns, "flsv.data.Columns(...) or its options")
    return found
