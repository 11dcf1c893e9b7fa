"""Functions that format numbers, names and sentences for the report and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import filterfalse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import yaml

from flsv.utilities.display import CLIENTS_PREFIX
from flsv.utilities.plain_values import digest

if TYPE_CHECKING:
    from pandas import DataFrame, Series

NO_NUMBER = "\N{EN DASH}"
#: Gain below which payments differed much more from payments by many seeds in experiments.
SMALL_GAIN = 0.15
#: Classes of the metrics whose values were closest to those by retraining in the benchmark, the closest first.
NEAREST_TO_RETRAINING = ("ShadowShapley", "BlendedContribution")
#: The sentences of reports and terminals.
MESSAGES: Mapping[str, Any] = yaml.safe_load(
    (Path(__file__).parent / "messages.yaml").read_text(encoding="utf-8")
)


def format_number(value: float, digits: int = 3) -> str:
    """Format a number: integers without decimals, others with at least ``digits`` significant digits, NaN as a dash.

    Example:
        >>> [format_number(x) for x in (0.12345, 3.0, 1234.5678, -0.00001234, float("nan"))]
        ['0.123', '3', '1235', '-1.23e-05', '–']
    """
    if math.isnan(value):
        return NO_NUMBER
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == int(value) and abs(value) < 1e15:
        return str(int(value))
    if abs(value) < 1e-4:
        return f"{value:.{digits - 1}e}"
    return f"{value:.{_decimals(value, digits)}f}"


def _decimals(value: float, digits: int) -> int:
    """Return the number of decimals that shows ``digits`` significant ones."""
    power_of_ten = math.floor(math.log10(abs(value)))
    return max(0, digits - 1 - power_of_ten)


def format_numbers(
    values: Sequence[float],
    digits: int = 3,
) -> list[str]:
    """Format a column of numbers with equally many decimals, enough for ``digits`` significant digits of the largest.

    Example:
        >>> format_numbers([1.3123, -0.0772, float("nan"), 0.5])
        ['1.31', '-0.08', '–', '0.50']
        >>> format_numbers([0.25, -0.0003])
        ['0.250', '0.000']
        >>> format_numbers([12.0, 3.0])
        ['12', '3']
    """
    sizes = [abs(value) for value in values if math.isfinite(value)]
    largest = max(sizes, default=0.0)
    are_integers = all(size == int(size) for size in sizes)
    if largest < 1e-4 or are_integers:
        return [format_number(value, digits) for value in values]

    decimals = _decimals(largest, digits)
    texts = []
    for value in values:
        if math.isfinite(value):
            texts.append(f"{value:z.{decimals}f}")  # never "-0.00"
        else:
            texts.append(format_number(value))  # NaN or infinite
    return texts


def format_rows(
    numbers: DataFrame,
    digits: int = 3,
) -> list[list[str]]:
    """Format rows of numbers, with equally many decimals, see :func:`format_numbers`."""
    texts = format_numbers(numbers.to_numpy().ravel().tolist(), digits)
    return np.reshape(texts, numbers.shape).tolist()


def with_intervals(
    estimates: DataFrame,
    between: str = ", ",
) -> list[str]:
    """Format the column ``value`` with the interval from ``low`` to ``high`` in square brackets.

    Example:
        >>> from pandas import DataFrame
        >>> with_intervals(DataFrame({"value": [0.5, 1.0], "low": [0.25, None], "high": [0.75, None]}))
        ['0.50 [0.25, 0.75]', '1.00']
    """
    cells = []
    for value, low, high in format_rows(estimates[["value", "low", "high"]]):
        has_interval = NO_NUMBER not in (value, low, high)
        if has_interval:
            cells.append(f"{value} [{low}{between}{high}]")
        else:
            cells.append(value)
    return cells


def design_of(evidence: Mapping[str, Any]) -> str:
    """Return a name of the set of coalitions that were trained for values with this evidence, "" if none were.

    Example:
        >>> design_of({"trainings": "halves", "halvings": 2}), design_of({"source": "none"})
        ('halves (halvings: 2)', '')
    """
    design = evidence.get("trainings")
    if not design:
        coalitions = evidence.get("listed")
        return f"listed ({digest(coalitions).hex()[:6]})" if coalitions else ""
    halvings = evidence.get("halvings")
    return f"{design} (halvings: {halvings})" if halvings else design


def design_in_words(design: str) -> str:
    """Describe the coalitions of a design, as :func:`design_of` names it.

    Example:
        >>> design_in_words("singles"), design_in_words("listed (0c51a9)")
        ('each client alone', 'listed coalitions (0c51a9)')
    """
    name, _, details = design.partition(" ")
    return f"{MESSAGES['trainings'].get(name, '')} {details}".strip()


def ends_of(
    order: Sequence[int],
    limit: int,
) -> list[int]:
    """Return the elements of ``order`` if there are at most ``limit``, or else the first and the last ten."""
    if len(order) <= limit:
        return [*order]
    return [*order[:10], *order[-10:]]


def highest_first(values: Series) -> list[int]:
    """Return the clients by falling value, NaN last. Equal values keep their order."""
    return values.sort_values(ascending=False, kind="stable").index.tolist()


def nearest_to_retraining_first(classes: Mapping[str, str]) -> list[str]:
    """Sort metrics' names, given as ``{name: class}``, by :data:`NEAREST_TO_RETRAINING`.

    Example:
        >>> nearest_to_retraining_first({"sv": "CumulativeShapley", "value": "ShadowShapley"})
        ['value', 'sv']
    """

    def rank(name: str) -> int:
        class_name = classes[name]
        if class_name not in NEAREST_TO_RETRAINING:
            return len(NEAREST_TO_RETRAINING)
        return NEAREST_TO_RETRAINING.index(class_name)

    return sorted(classes, key=rank)


def shares_in(values: Sequence[float]) -> list[float]:
    """Convert values to shares: divide by the sum of the values above 0. Values below 0 become 0, NaN stays NaN.

    Example:
        >>> shares_in([3.0, 1.0, -2.0, float("nan")])
        [0.75, 0.25, 0.0, nan]
    """
    positive_values = np.maximum(values, 0.0)  # NaN stays NaN
    total = np.nansum(positive_values)
    if total > 0:
        return (positive_values / total).tolist()
    return [math.nan] * len(values)


def titled(measure: str) -> str:
    """Return a title for a performance measure, given as ``name`` or ``name of class``.

    Example:
        >>> titled("average_precision of yes")
        'average precision of yes'
    """
    name, separator, positive_class = measure.partition(" of ")
    title = MESSAGES["titles"].get(name, name)
    return f"{title}{separator}{positive_class}"


def performance(measure: str, value: float | None) -> str:
    """Format a model's performance by a measure: accuracies in percent, a negative loss as the positive loss.

    Example:
        >>> performance("balanced_accuracy", 0.0898), performance("negative_loss", -2.25)
        ('9.0 %', '2.25')
    """
    if value is None:
        return NO_NUMBER
    if measure.endswith("accuracy"):
        return percent(value)
    if measure == "negative_loss":
        return format_number(abs(value))
    return format_number(value)


def describe_change(game: Mapping[str, Any]) -> str:
    """Describe how a performance, an entry of ``paid_in`` in ``run.json``, changed over the run.

    Example:
        >>> describe_change({"by": "accuracy", "start": 0.1, "end": 0.9, "majority": 0.25})
        'accuracy on the validation set: from 10.0 % to 90.0 % (always predicting the most frequent class: 25.0 %)'
        >>> describe_change({"by": "negative_loss", "start": None, "end": -0.5})
        'loss on the validation set: from – to 0.500'
    """
    measure = game["by"]
    initial_text = performance(measure, game["start"])
    final_text = performance(measure, game["end"])
    title = titled(measure)
    if not measure.startswith(CLIENTS_PREFIX):  # otherwise it names their validation sets
        title += " on the validation set"

    sentence = f"{title}: from {initial_text} to {final_text}"
    accuracy_of_majority = game.get("majority")
    if accuracy_of_majority is not None:
        sentence += f" (always predicting the most frequent class: {percent(accuracy_of_majority)})"
    return sentence


def is_fraction(measure: str) -> bool:
    """Return whether a performance measure goes from 0 to 1."""
    name, _, _ = measure.removeprefix(CLIENTS_PREFIX).partition(" of ")
    is_title = name in MESSAGES["titles"] and name != "negative_loss"
    return name == "accuracy" or is_title


def is_small_gain(measure: str, values: Iterable[float]) -> bool:
    """Return whether values add up to less than 0.15, for a score that goes from 0 to 1.

    Example:
        >>> is_small_gain("accuracy", [0.1]), is_small_gain("negative_loss", [0.1])
        (True, False)
    """
    if not is_fraction(measure):
        return False
    return math.fsum(filterfalse(math.isnan, values)) < SMALL_GAIN


def unbroken(text: str) -> str:
    """Replace the blanks before ``%`` by no-break spaces, so that no line ends between a number and its unit."""
    return text.replace(" %", "\u00a0%")


def percent(fraction: float) -> str:
    """Format a fraction in percent.

    Example:
        >>> percent(0.1234), percent(float("nan"))
        ('12.3 %', '–')
    """
    return NO_NUMBER if math.isnan(fraction) else f"{100 * fraction:.1f} %"


def joined(
    names: Iterable[str],
    word: str = "and",
) -> str:
    """Join names with commas and, before the last, ``word``.

    Example:
        >>> joined(["Boston", "Lyon", "Osaka"]), joined(["Boston", "Lyon"], "or"), joined(["Boston"]), joined([])
        ('Boston, Lyon and Osaka', 'Boston or Lyon', 'Boston', '')
    """
    names = list(names)
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} {word} {names[-1]}"
