"""Columns of text as numbers: gaps, standardisation and one-hot codes, fitted to the training rows alone."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


def find_gaps(values: Sequence[str], gaps: Collection[str]) -> np.ndarray:
    """Which values are missing, bool ``[N]``; white space around a value does not count.

    Example:
        >>> find_gaps(["3", " ", "NA"], ["", "NA"])
        array([False,  True,  True])
    """
    return np.array([value.strip() in gaps for value in values], dtype=bool)


def as_numbers(values: Sequence[str], missing: np.ndarray) -> np.ndarray | None:
    """float64 ``[N]``, NaN where a value is missing; None if another one is no finite number or all are missing.

    Args:
        values: ``N`` of them.
        missing: bool ``[N]``.

    Example:
        >>> as_numbers(["3", "", "-1e3"], np.array([False, True, False]))
        array([    3.,    nan, -1000.])
        >>> as_numbers(["3", "high"], np.array([False, False])) is None
        True
    """
    numbers = np.full(len(values), np.nan)
    try:
        # Python reads 1_000 as a number, which nobody who writes a table means.
        numbers[~missing] = [float(v) if "_" not in v else np.nan for v, gap in zip(values, missing) if not gap]
    except ValueError:
        return None
    return numbers if np.isfinite(numbers[~missing]).all() and not missing.all() else None


def standardise(x: np.ndarray, fit: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Each group's columns less their mean, over their standard deviation; gaps become 0, which is the mean.

    With m the mean and s the standard deviation (dividing by the number, not one less) of the group's values in the
    rows that ``fit`` marks, a value x becomes (x - m) / s. A column without spread is only shifted. Where a group has
    no value to fit to, all of its values become 0.

    Args:
        x: float64 ``[N, D]``, NaN where there is a gap.
        fit: which rows the statistics are taken from, bool ``[N]``.
        groups: the group of each row ``[N]``; one for all pools the statistics.

    Returns:
        float64 ``[N, D]``, finite.

    Example:
        >>> x = np.array([[1.0], [3.0], [np.nan], [5.0]])
        >>> standardise(x, fit=np.array([True, True, True, False]), groups=np.zeros(4)).tolist()
        [[-1.0], [1.0], [0.0], [3.0]]
    """
    scaled = np.zeros_like(x)
    for group in np.unique(groups):
        rows = groups == group
        fitted = x[rows & fit]
        known = ~np.isnan(fitted)
        count = known.sum(0)
        mean = np.where(known, fitted, 0).sum(0) / np.maximum(count, 1)
        variance = np.where(known, (fitted - mean) ** 2, 0).sum(0) / np.maximum(count, 1)
        # Equal values differ from their mean by rounding, which is no spread.
        spread = np.where(variance > (1e-12 * np.abs(mean)) ** 2, np.sqrt(variance), 1.0)
        scaled[rows] = np.where(np.isnan(x[rows]) | (count == 0), 0, (x[rows] - mean) / spread)
    return scaled


def one_hot(values: Sequence[str], categories: Sequence[str]) -> np.ndarray:
    """float64 ``[N, K]``: 1 in the column of a value's category; a row of zeros where it is none of them.

    Example:
        >>> one_hot(["b", "a", "c"], ["a", "b"]).tolist()
        [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]
    """
    place = {category: column for column, category in enumerate(categories)}
    codes = np.zeros((len(values), len(categories)))
    for row, value in enumerate(values):
        if value in place:
            codes[row, place[value]] = 1
    return codes
