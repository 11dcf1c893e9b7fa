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
from typing import Any

import numpy as np
import yaml

from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest

#: Kinds of columns. There are dates, too: days since a start.
NUMBERS_KIND = "numbers"
WHOLE_NUMBERS_KIND = "whole numbers"
TRUTH_KIND = "truth values"
WORDS_KIND = "categories"
DAYS_KIND = "days since "
#: Usual codes of no and yes.
_PAIRS_OF_CODES = ((0, 1), (1, 2), (-1, 1))
#: Approximately the largest number of single precision.
LARGEST_NUMBER = 1e38
#: Bits of a double-precision number's mantissa.
MANTISSA_BITS = 53
#: Bits of a digit in exact sums of mantissas.
DIGIT_BITS = 18
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
            # The sum of (x - low)(x - high), which is 0 if all numbers are one of the two.
            products = self.squares - (low + high) * self.total + low * high * self.count
            if products == 0:
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

    kind: str
    missing: int
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
        _check_names(plain, {"kind", "missing", "moments", "categories"})
        moments = plain.get("moments")
        categories = plain.get("categories")
        has_moments = moments is not None
        has_categories = categories is not None
        if has_moments == has_categories:  # one of the two is expected
            raise ValueError("neither numbers nor words")
        return cls(
            kind=_text(plain["kind"]),
            missing=_count(plain["missing"]),
            moments=None if moments is None else Moments.from_plain(moments),
            categories=None if categories is None else _counts(categories),
        )


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
        _check_names(plain, {"settings", "columns", "classes", "target"})
        columns = {}
        for name, column in dict(plain["columns"]).items():
            columns[_text(name)] = ColumnSummary.from_plain(column)
        classes = plain.get("classes")
        target = plain.get("target")
        return cls(
            settings=dict(plain["settings"]),
            columns=columns,
            classes=None if classes is None else _counts(classes),
            target=None if target is None else Moments.from_plain(target),
        )


@dataclass(frozen=True)
class ColumnCode:
    """How a column becomes features: ``(number - mean) / scale``, or one for each of ``categories``.

    With ``gaps`` a further feature is 1 for rows without a value. In a data dictionary values lie in ``low`` to
    ``high``, in the unit ``unit``, and ``gap_marks`` are marks of missing values of this column.
    """

    name: str
    kind: str
    mean: float = 0.0
    scale: float = 1.0
    categories: tuple[str, ...] | None = None
    gaps: bool = False
    low: float = -math.inf
    high: float = math.inf
    unit: str = ""
    gap_marks: tuple[str, ...] = ()

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
        plain["gaps"] = list(self.gap_marks) or self.gaps
        return plain

    @classmethod
    def from_plain(
        cls, name: str, plain: Mapping[str, Any], default_gaps: bool = False
    ) -> ColumnCode:
        _check_names(plain, {"kind", "mean", "scale", "categories", "gaps", "low", "high", "unit"})
        categories = plain.get("categories")
        gaps = plain.get("gaps", default_gaps)
        gap_marks: tuple[str, ...] = ()
        if isinstance(gaps, list | tuple):
            gap_marks = tuple(map(str, gaps))
        usual_kind = NUMBERS_KIND if categories is None else WORDS_KIND
        code = cls(
            name=_text(name),
            kind=_text(plain.get("kind", usual_kind)),
            mean=float(plain.get("mean", 0.0)),
            scale=float(plain.get("scale", 1.0)),
            categories=None if categories is None else tuple(map(_text, categories)),
            gaps=bool(gaps),
            low=float(plain.get("low", -math.inf)),
            high=float(plain.get("high", math.inf)),
            unit=_text(plain.get("unit", "")),
            gap_marks=gap_marks,
        )
        if not code.low < code.high:
            raise ValueError(f"{name!r}: low {code.low} is not below high {code.high}")
        _check_scale(repr(name), code.mean, code.scale)
        is_known = code.kind in (NUMBERS_KIND, WHOLE_NUMBERS_KIND, TRUTH_KIND, WORDS_KIND)
        if not is_known and not code.kind.startswith(DAYS_KIND):
            raise ValueError(
                f"{name!r}: kind {code.kind!r} is not numbers, categories, whole numbers, truth values or days "
                "since ..."
            )
        should_have_categories = code.kind == WORDS_KIND
        if should_have_categories != (categories is not None):
            raise ValueError(f"{name!r}: only columns of kind 'categories' have categories")
        names = code.categories or ()
        if len(set(names)) < len(names):
            raise ValueError(f"{name!r}: a category twice")
        return code


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
    classes: tuple[str, ...] | None = None
    target_mean: float = 0.0
    target_scale: float = 1.0
    target: str | None = None
    excluded: Mapping[str, str] = field(default_factory=dict)
    tolerance: float = 0.0
    patient: str | None = None

    @property
    def is_dictionary(self) -> bool:
        """Return whether all cells have to fit."""
        return self.target is not None

    def gap_marks(self, name: str) -> tuple[str, ...]:
        """Return the marks of a missing value in the column ``name``."""
        for code in self.columns:
            if code.name == name:
                return code.gap_marks
        return ()

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
            _check_names(plain, _ENCODER_KEYS | _DICTIONARY_KEYS)
            target = plain.get("target")
            codes = []
            for name, code in dict(plain["columns"]).items():
                # In a dictionary a gap is allowed, and has an indicator, unless it says otherwise.
                codes.append(ColumnCode.from_plain(name, code, default_gaps=target is not None))
            classes = plain.get("classes")
            if target is None:
                _check_names(plain, _ENCODER_KEYS)
            elif classes is not None:
                classes = _positive_last(classes, plain.get("positive"))
            tolerance = float(plain.get("tolerance", 0.0))
            if not 0 <= tolerance < 1:
                raise ValueError(f"tolerance {tolerance} is no share of the cells, 0 to 1")
            target_mean = float(plain.get("target_mean", 0.0))
            target_scale = float(plain.get("target_scale", 1.0))
            _check_scale("target", target_mean, target_scale)
            reasons = dict(plain.get("excluded", {}))
            patient = plain.get("patient")
            if patient in dict(plain["columns"]):
                raise ValueError(f"patient: {patient!r} is among the columns, and no feature")
            return cls(
                columns=tuple(codes),
                classes=None if classes is None else tuple(map(_text, classes)),
                target_mean=target_mean,
                target_scale=target_scale,
                target=None if target is None else _text(target),
                excluded={_text(name): _text(reason) for name, reason in reasons.items()},
                tolerance=tolerance,
                patient=None if patient is None else _text(patient),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigurationError(
                f"encoder: {error!s:.200}. Expected what flsv data --write has written, or what encoder.json of a run "
                "at sites holds."
            ) from error


_ENCODER_KEYS = {"columns", "classes", "target_mean", "target_scale"}
_DICTIONARY_KEYS = {"target", "positive", "excluded", "tolerance", "patient"}


def _positive_last(classes: Sequence[str], positive: object) -> list[str]:
    """Return the classes with the positive one last, as class 1 of two."""
    if positive not in classes:
        raise ValueError(f"positive: {positive!r} is none of the classes {list(classes)}")
    negative_classes = [name for name in classes if name != positive]
    return [*negative_classes, _text(positive)]


def _check_scale(name: str, mean: float, scale: float) -> None:
    """Raise ValueError unless numbers can be standardized."""
    is_finite = math.isfinite(mean) and math.isfinite(scale)
    if not is_finite or scale <= 0:
        raise ValueError(f"{name}: mean {mean}, scale {scale}")


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
    counts = {}
    for word, count in dict(plain).items():
        counts[_text(word)] = _count(count)
    return counts


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.80} is no text: write it in quotation marks")
    return value


def _check_names(plain: Mapping[str, Any], names: set[str]) -> None:
    if not isinstance(plain, Mapping) or plain.keys() - names:
        raise ValueError(f"{sorted(plain)!r:.200}: expected {sorted(names)}")
