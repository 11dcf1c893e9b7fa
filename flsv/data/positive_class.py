"""The positive one of two classes, to which average precision, F1, recall and similar scores refer.

The positive class always has the number 1, so that every score of class 1, even a module's own, is a score of the
positive class. If flsv numbers the classes (words in a table or in arrays, folders of images), the class that the
argument ``pos_label`` names gets the number 1, by default the rarer class, since alphabetical order has no meaning.
If both names are numbers, the larger number is positive, and of truth values ``True``. Labels that are numbers and no
texts stay as they are. As in scikit-learn, the argument is called ``pos_label``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import yaml

from flsv.data.sources.notation import parsed
from flsv.utilities.errors import ConfigurationError, listed


def in_order(names: Collection[str]) -> tuple[str, ...]:
    """Return names of classes in the order of their numbers if all are numbers or truth values, else alphabetically.

    Example:
        >>> in_order(["10", "+2.5"]), in_order(["TRUE", "false"]), in_order(["10", "2", "unknown"])
        (('+2.5', '10'), ('false', 'TRUE'), ('10', '2', 'unknown'))
    """
    numbers = dict(zip(names, _numbers(names)))
    return tuple(sorted(names, key=lambda name: (numbers.get(name, 0.0), name)))


def _numbers(names: Collection[str]) -> list[float]:
    """Return names as numbers, truth values as 0 and 1; an empty list if a name is neither."""
    truths = {"false": "0", "true": "1"}
    numbers = parsed(truths.get(name.casefold(), name) for name in names)
    return [] if np.isnan(numbers).any() else numbers.tolist()


def positive_last(names: Sequence[str], counts: Sequence[int], pos_label: Any = None) -> tuple[str, ...]:
    """Return the names of the classes in the order of their numbers; the positive one of two classes is the second.

    Args:
        names: names of the M classes.
        counts: number of samples of each class.
        pos_label: the positive class; None: the larger of two numbers, ``True`` among truth values, else the rarer
            class, and of two equally frequent ones the second.

    Raises:
        ConfigurationError: there are not two classes, or none of them is ``pos_label``.

    Example:
        >>> positive_last(["ja", "nein"], [20, 80]), positive_last(["0", "1"], [20, 80])
        (('nein', 'ja'), ('0', '1'))
        >>> positive_last(["ja", "nein"], [20, 80], "nein"), positive_last(["a", "b", "c"], [1, 2, 3])
        (('ja', 'nein'), ('a', 'b', 'c'))
    """
    if pos_label is not None:
        positive = named_class(names, pos_label)
    elif not chosen_by_rarity(names, None):
        return in_order(names) if len(names) == 2 else tuple(names)
    else:
        positive = names[0] if counts[0] < counts[1] else names[1]
    return *(name for name in names if name != positive), positive


def named_class(names: Sequence[str], pos_label: Any) -> str:
    """Return the class name that ``pos_label`` means. The user may have given a number, or a truth value (YAML reads
    ``yes`` as one).

    Raises:
        ConfigurationError: there are not two classes, or none of them is ``pos_label``.

    Example:
        >>> named_class(["no", "yes"], True), named_class(["1", "2"], 2)
        ('yes', '2')
    """
    found = [name for name in names if pos_label == (name if isinstance(pos_label, str) else yaml.safe_load(name))]
    if len(names) != 2 or not found:
        raise ConfigurationError(
            f"pos_label={pos_label!r}: expected one of two classes. The data have {listed(names, 8, show=repr)}."
        )
    return found[0]


def chosen_by_rarity(names: Sequence[str], pos_label: Any) -> bool:
    """Return whether :func:`positive_last` chooses the positive class by the number of samples.

    Example:
        >>> chosen_by_rarity(("nein", "ja"), None), chosen_by_rarity(("nein", "ja"), "ja"), chosen_by_rarity("01", None)
        (True, False, False)
    """
    return pos_label is None and len(names) == 2 and not _numbers(names)


def check_positive(names: Sequence[str], pos_label: Any, missing: str | None) -> None:
    """Raise ConfigurationError unless there are two classes and class 1 is ``pos_label``.

    Args:
        names: names of the classes, by number.
        pos_label: the positive class that the user named.
        missing: the reason why the data have no classes; None if they have classes.
    """
    if missing is not None:
        raise ConfigurationError(f"pos_label={pos_label!r}: the data have no classes ({missing}).")
    positive = named_class(names, pos_label)
    if positive != names[1]:
        raise ConfigurationError(
            f"pos_label={pos_label!r}: in these data {positive!r} is class 0, and class 1 is positive. Labels that are "
            "numbers stay as they are: swap 0 and 1, or give the labels as words."
        )
