"""AgreedEncoder, by which a table becomes features, and the summaries of clients' tables from which it is made.

Sums are exact: a sum of floating-point numbers is a fraction. So the encoder does not depend on the order of rows and
clients, nor on whether the clients are in one process.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import yaml
from annotated_types import Ge, Lt

from flsv.utilities.declared import Positive, Rules, checked
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest

#: Kinds of columns. There are dates, too: days since a start.
NUMBERS_KIND = "numbers"
WHOLE_NUMBERS_KIND = "whole numbers"
TRUTH_KIND = "truth values"
WORDS_KIND = "categories"
DAYS_KIND = "days since "
_KINDS = (NUMBERS_KIND, WHOLE_NUMBERS_KIND, TRUTH_KIND, WORDS_KIND)
#: Usual codes of no and yes.
_PAIRS_OF_CODES = ((0, 1), (1, 2), (-1, 1))
#: Approximately the largest number of single precision.
LARGEST_NUMBER = 1e38
#: Bits of a double-precision number's mantissa.
MANTISSA_BITS = 53
#: Bits of a digit in exact sums of mantissas.
DIGIT_BITS = 18
#: A text of a dictionary. YAML takes no, 01067 and 1e9 for something else.
Text = Annotated[str, "Write texts in quotation marks."]
NumRows = Annotated[int, Ge(0)]
_FRACTION_PATTERN = re.compile(r"-?\d{1,1000}(/\d{1,1000})?")


@dataclass(frozen=True)
class Moments:
    """Number, sum and sum of squares of some numbers. Both sums are exact.

    Example:
        >>> both = Moments.of(np.array([1e16, 1.0])) + Moments.of(np.array([-1e16]))
        >>> both.count, float(both.total)
        (3, 1.0)
    """

    count: int = 0
    total: Fraction = Fraction(0)
    squares: Fraction = Fraction(0)

    @classmethod
    def of(cls, numbers: np.ndarray) -> Moments:
        """Return the moments of finite numbers, float64 ``[N]``."""
        # A number is mantissa * 2^(exponent - MANTISSA_BITS), and sums of whole mantissas are exact.
        fractions, exponents = np.frexp(numbers)
        mantissas = np.ldexp(fractions, MANTISSA_BITS).astype(np.int64)
        total = Fraction(0)
        squares = Fraction(0)
        for exponent in np.unique(exponents).tolist():
            unit = Fraction(2) ** (exponent - MANTISSA_BITS)
            sum_of_integers, sum_of_squares = _exact_sums(mantissas[exponents == exponent])
            total += sum_of_integers * unit
            squares += sum_of_squares * unit**2
        return cls(len(numbers), total, squares)

    def __add__(self, moments: Moments) -> Moments:
        return Moments(
            count=self.count + moments.count,
            total=self.total + moments.total,
            squares=self.squares + moments.squares,
        )

    @property
    def mean(self) -> float:
        """Mean, rounded once."""
        return float(self.total / self.count)

    @property
    def variance(self) -> Fraction:
        """Variance with the denominator N, exact."""
        mean = self.total / self.count
        return self.squares / self.count - mean**2

    @property
    def deviation(self) -> float:
        """Standard deviation, with the denominator N."""
        variance = self.variance
        if not variance:
            return 0.0
        # The variance itself may be too small for a float. Divided by 4^exponent it is near 1.
        num_bits = variance.numerator.bit_length() - variance.denominator.bit_length()
        exponent = num_bits // 2
        scaled_variance = variance / Fraction(4) ** exponent
        return math.ldexp(math.sqrt(scaled_variance), exponent)

    @property
    def scale(self) -> float:
        """Standard deviation, or 1 if the numbers are constant up to rounding, as in scikit-learn."""
        epsilon = Fraction(sys.float_info.epsilon)
        rounding_of_sums = self.count * epsilon * self.variance
        rounding_of_mean = (self.total * epsilon) ** 2
        is_constant = self.variance <= rounding_of_sums + rounding_of_mean
        if is_constant:
            return 1.0
        return self.deviation

    @property
    def codes(self) -> tuple[float, float] | None:
        """The usual codes of no and yes that all numbers are, or None."""
        for low, high in _PAIRS_OF_CODES:
            # The sum over all numbers x of (x - low)(x - high). It is 0 if each x is one of the two.
            sum_of_products = self.squares - (low + high) * self.total + low * high * self.count
            if sum_of_products == 0:
                return float(low), float(high)
        return None

    def to_plain(self) -> list[Any]:
        sums = [str(self.total), str(self.squares)]
        return [self.count, *sums]

    @classmethod
    def from_plain(cls, plain: Any) -> Moments:
        count, *texts_of_sums = plain
        total, squares = map(_fraction, texts_of_sums)
        moments = cls(_count(count), total, squares)
        is_too_large = squares > count * Fraction(LARGEST_NUMBER) ** 2
        is_impossible = squares * count < total**2  # by Cauchy and Schwarz
        if is_too_large or is_impossible:
            raise ValueError("sums that no numbers have")
        return moments


@checked
@dataclass(frozen=True)
class ColumnSummary:
    """What a client tells about a column of its table.

    Args:
        kind: kind of the column, such as ``"numbers"``, or "" if the client's table has no value in it.
        missing: number of training rows without a value, or 0 if they are fewer than ``Columns.min_rows``.
        moments: of the training rows' numbers, all 0 if they are fewer than ``min_rows``. None for words.
        categories: ``{word: number of training rows}``, for words that ``min_rows`` training rows have. None for
            numbers.
    """

    rules: ClassVar[Rules] = (
        (
            lambda a: (a.moments is None) != (a.categories is None),
            "expected the sums of numbers or the counts of words.",
        ),
    )

    kind: Text
    missing: NumRows
    moments: Moments | None = None
    categories: Mapping[str, int] | None = None

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"kind": self.kind, "missing": self.missing}
        if self.moments is not None:
            plain["moments"] = self.moments.to_plain()
        if self.categories is not None:
            plain["categories"] = dict(self.categories)
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ColumnSummary:
        options = dict(plain)
        if options.get("moments") is not None:
            options["moments"] = Moments.from_plain(options["moments"])
        if options.get("categories") is not None:
            options["categories"] = _counts(options["categories"])
        return cls(**options)


@dataclass(frozen=True)
class TableSummary:
    """All that a client tells about its table, so that all clients encode their tables alike.

    Args:
        settings: what the table was read by: target, positive class and options of columns.
        columns: a summary of each column that is a feature, by name.
        classes: ``{class: number of rows}``, for classes that ``min_rows`` rows have. None for regression.
        target: moments of a target that is standardized. None for any other.
    """

    settings: Mapping[str, Any]
    columns: Mapping[str, ColumnSummary]
    classes: Mapping[str, int] | None = None
    target: Moments | None = None

    def to_plain(self) -> dict[str, Any]:
        """Return the summary as values of JSON's types."""
        columns = {name: column.to_plain() for name, column in self.columns.items()}
        plain: dict[str, Any] = {"settings": dict(self.settings), "columns": columns}
        if self.classes is not None:
            plain["classes"] = dict(self.classes)
        if self.target is not None:
            plain["target"] = self.target.to_plain()
        return plain

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> TableSummary:
        """Read a summary that a client has sent. Any fault is a ValueError, KeyError or TypeError."""
        options = dict(plain)
        columns = {}
        for name, column in dict(options.pop("columns")).items():
            columns[name] = ColumnSummary.from_plain(column)
        if options.get("classes") is not None:
            options["classes"] = _counts(options["classes"])
        if options.get("target") is not None:
            options["target"] = Moments.from_plain(options["target"])
        settings = dict(options.pop("settings"))
        return cls(settings, columns, **options)


@checked
@dataclass(frozen=True)
class ColumnCode:
    """How a column becomes features: ``(number - mean) / scale``, or one for each of ``categories``.

    With ``gaps`` a further feature is 1 for rows without a value. ``gaps`` may be marks of missing values of this
    column. In a data dictionary values lie in ``low`` to ``high``, in the unit ``unit``.
    """

    rules: ClassVar[Rules] = (
        (lambda a: a.low < a.high, "low is not below high."),
        (
            lambda a: a.kind in _KINDS or a.kind.startswith(DAYS_KIND),
            "kind is not numbers, categories, whole numbers, truth values or days since ...",
        ),
        (
            lambda a: (a.kind == WORDS_KIND) == (a.categories is not None),
            "only columns of kind 'categories' have categories.",
        ),
        (
            lambda a: len({*(a.categories or ())}) == len(a.categories or ()),
            "a category is there twice.",
        ),
    )

    name: Text
    kind: Text
    mean: float = 0.0
    scale: Positive = 1.0
    categories: tuple[Text, ...] | None = None
    gaps: bool | tuple[str, ...] = False
    low: float = -math.inf
    high: float = math.inf
    unit: Text = ""

    def __post_init__(self) -> None:
        _make_floats(self, ("mean", "scale", "low", "high"))
        _make_tuple(self, "categories")

    @property
    def gap_marks(self) -> tuple[str, ...]:
        """Marks of a missing value in this column."""
        return self.gaps if isinstance(self.gaps, tuple) else ()

    @property
    def kind_as_read(self) -> str:
        """Kind of the column in a table that fits."""
        return NUMBERS_KIND if self.kind == WHOLE_NUMBERS_KIND else self.kind

    def to_plain(self) -> dict[str, Any]:
        plain: dict[str, Any] = {"kind": self.kind}
        if self.categories is None:
            plain |= {"mean": self.mean, "scale": self.scale}
        else:
            plain["categories"] = list(self.categories)
        if math.isfinite(self.low):
            plain["low"] = self.low
        if math.isfinite(self.high):
            plain["high"] = self.high
        if self.unit:
            plain["unit"] = self.unit
        plain["gaps"] = list(self.gap_marks) or bool(self.gaps)
        return plain

    @classmethod
    def from_plain(
        cls, name: str, plain: Mapping[str, Any], default_gaps: bool = False
    ) -> ColumnCode:
        options = dict(plain)
        is_number = options.get("categories") is None
        options.setdefault("kind", NUMBERS_KIND if is_number else WORDS_KIND)
        gaps = options.setdefault("gaps", default_gaps)
        if isinstance(gaps, list | tuple):
            options["gaps"] = tuple(map(str, gaps))
        try:
            return cls(name, **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name!r}: {error}") from error


@checked
@dataclass(frozen=True)
class AgreedEncoder:
    """How all clients' tables become features and targets.

    Args:
        columns: how each column becomes features.
        classes: names of the classes, in the order of their numbers. None for regression.
        target_mean: what is subtracted from a target that is a number.
        target_scale: by what it is divided then.
        target: the column to predict. With it this is a data dictionary: cells that do not fit are refused.
        excluded: columns that are left out, each with the reason.
        patient: column whose rows stay together when some are held out, and no feature.
        tolerance: share of a column's cells that may lie outside its range.

    Example:
        >>> columns = {"age": {"mean": 62.0, "scale": 14.0}}
        >>> encoder = AgreedEncoder.from_plain({"columns": columns, "classes": ["no", "yes"]})
        >>> [(column.name, column.kind, column.mean, column.scale) for column in encoder.columns]
        [('age', 'numbers', 62.0, 14.0)]
    """

    columns: tuple[ColumnCode, ...]
    classes: tuple[Text, ...] | None = None
    target_mean: float = 0.0
    target_scale: Positive = 1.0
    target: Text | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    tolerance: Annotated[float, Ge(0), Lt(1), "It is a share of the cells."] = 0.0
    patient: Text | None = None

    def __post_init__(self) -> None:
        _make_floats(self, ("target_mean", "target_scale", "tolerance"))
        _make_tuple(self, "classes")

    @property
    def is_dictionary(self) -> bool:
        """Return whether all cells have to fit."""
        return self.target is not None

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the features: numbers, then each category of each column, then marks of missing values."""
        number_names = []
        category_names = []
        gap_names = []
        for code in self.columns:
            if code.categories is None:
                number_names.append(code.name)
            else:
                category_names += [f"{code.name}={category}" for category in code.categories]
            if code.gaps:
                gap_names.append(f"{code.name} missing")
        return (*number_names, *category_names, *gap_names)

    @property
    def hash(self) -> str:
        """Return a fingerprint, 12 hexadecimal digits."""
        content = digest([self.to_plain(), self.feature_names])
        return content.hex()[:12]

    def to_plain(self) -> dict[str, Any]:
        """Return the encoder as values of JSON's types, as ``Columns(encoder=...)`` takes them."""
        columns = {code.name: code.to_plain() for code in self.columns}
        plain: dict[str, Any] = {
            "columns": columns,
            "classes": None if self.classes is None else list(self.classes),
            "target_mean": self.target_mean,
            "target_scale": self.target_scale,
        }
        if self.target is None:
            return plain
        if self.classes is not None:
            plain["positive"] = self.classes[-1]
        if self.patient is not None:
            plain["patient"] = self.patient
        return plain | {
            "target": self.target,
            "excluded": dict(self.excluded),
            "tolerance": self.tolerance,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> AgreedEncoder:
        """Read what :meth:`to_plain` returns. Raise ConfigurationError for anything else."""
        try:
            options = dict(plain)
            is_dictionary = options.get("target") is not None
            if not is_dictionary and options.keys() & _DICTIONARY_KEYS:
                raise ValueError("a data dictionary names its target")
            columns = dict(options.pop("columns"))
            if options.get("patient") in columns:
                raise ValueError("the patient is among the columns, and no feature")
            codes = []
            for name, code in columns.items():
                # In a dictionary a gap is allowed, and has an indicator, unless it says otherwise.
                codes.append(ColumnCode.from_plain(name, code, default_gaps=is_dictionary))
            positive = options.pop("positive", None)
            if is_dictionary and options.get("classes") is not None:
                options["classes"] = _positive_last(options["classes"], positive)
            return cls(tuple(codes), **options)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"encoder: {error!s:.200}. Expected what flsv data --write has written, or what encoder.json of a run "
                "at sites holds."
            ) from error


_DICTIONARY_KEYS = {"target", "positive", "excluded", "tolerance", "patient"}


def _positive_last(classes: Sequence[str], positive: Any) -> list[str]:
    """Return the classes with the positive one last, as class 1 of two."""
    if positive not in classes:
        raise ValueError(f"positive: {positive!r} is none of the classes {list(classes)}")
    negative_classes = [name for name in classes if name != positive]
    return [*negative_classes, positive]


def _make_floats(record: Any, names: Sequence[str]) -> None:
    """Convert numbers of a frozen record, which hashes and comparisons take as floats."""
    for name in names:
        object.__setattr__(record, name, float(getattr(record, name)))


def _make_tuple(record: Any, name: str) -> None:
    entries = getattr(record, name)
    if entries is not None:
        object.__setattr__(record, name, tuple(entries))


def _exact_sums(integers: np.ndarray) -> tuple[int, int]:
    """Return the sum and the sum of squares of fewer than 2^27 integers below 2^53, int64 ``[N]``."""
    # Split into digits of 18 bits, so that no sum of products of two digits exceeds 64 bits.
    mask = (1 << DIGIT_BITS) - 1
    digits = [integers & mask, (integers >> DIGIT_BITS) & mask, integers >> 2 * DIGIT_BITS]
    total = 0
    squares = 0
    for position, digit in enumerate(digits):
        total += int(digit.sum()) << position * DIGIT_BITS
        for other_position, other_digit in enumerate(digits):
            shift = (position + other_position) * DIGIT_BITS
            squares += int(digit @ other_digit) << shift
    return total, squares


def read_encoder_file(path: str) -> dict[str, Any]:
    """Read the file of a data dictionary or of an encoder, YAML or JSON."""
    file = Path(path)
    try:
        plain = yaml.safe_load(file.read_text(encoding="utf-8"))
        return dict(plain)
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"encoder: {file.absolute()} cannot be read: {error!s:.300}. Give the file that flsv data --write has "
            "written, or a run's encoder.json."
        ) from error


def _fraction(text: Any) -> Fraction:
    if not isinstance(text, str) or not _FRACTION_PATTERN.fullmatch(text):
        raise ValueError(f"{text!r:.80} is no sum")
    return Fraction(text)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r:.80} is no number of rows")
    return value


def _counts(plain: Mapping[str, Any]) -> dict[str, int]:
    return {word: _count(count) for word, count in dict(plain).items()}
