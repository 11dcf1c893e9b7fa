"""The data dictionary that all sites sign: its draft, and the cells of a table that do not fit it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from flsv.data.sources.agreed import NUMBERS_KIND, WHOLE_NUMBERS_KIND, AgreedEncoder, ColumnCode
from flsv.data.sources.columns import ColumnCard
from flsv.data.sources.table import Table
from flsv.utilities.errors import ConfigurationError, listed

#: Largest number of cells that an error names.
_MAX_CELLS = 10
#: Quantiles between which most values of a column lie.
_QUANTILES = (0.01, 0.99)


def refuse_misfits(table: Table, cards: Sequence[ColumnCard], dictionary: AgreedEncoder) -> None:
    """Raise ConfigurationError if cells do not fit the dictionary. It names ten of them and the number of all."""
    codes = {code.name: code for code in dictionary.columns}
    lines: list[str] = []
    num_misfits = 0
    for card in cards:
        code = codes[card.name]
        for is_misfit, expected in _misfits(card.values, code, dictionary.tolerance):
            rows = np.flatnonzero(is_misfit)
            num_misfits += len(rows)
            for row in rows[:_MAX_CELLS].tolist():
                cell = _shown(card.values.iloc[row])
                line = table.where(row)
                lines.append(f"{line}: {cell} in {card.name!r}, expected {expected}")
    if not num_misfits:
        return

    summary = f"Cells that do not fit the data dictionary {dictionary.hash}: {num_misfits}"
    remedy = "Correct the cells, or let all sites sign another dictionary."
    raise ConfigurationError("\n".join([summary, *lines[:_MAX_CELLS], remedy]))


def _shown(cell: Any) -> str:
    if pd.isna(cell):
        return "a missing value"
    if isinstance(cell, str):
        return repr(cell)
    return str(cell)


def _misfits(values: pd.Series, code: ColumnCode, tolerance: float) -> list[tuple[np.ndarray, str]]:
    """Return masks of cells that do not fit, bool ``[N]`` each, and what was expected in their place."""
    is_missing = values.isna().to_numpy()
    misfits = []
    if not code.gaps:
        misfits.append((is_missing, "a value (gaps: false)"))

    if code.categories is not None:
        is_category = values.isin(code.categories).to_numpy()
        is_unknown = ~is_category & ~is_missing
        expected = f"one of {listed(code.categories, 8, repr)}"
        misfits.append((is_unknown, expected))
        return misfits

    numbers = values.to_numpy(dtype=np.float64)
    if code.kind == WHOLE_NUMBERS_KIND:
        is_fraction = ~is_missing & (numbers % 1 != 0)
        misfits.append((is_fraction, "a whole number"))
    is_outside = (numbers < code.low) | (numbers > code.high)
    if is_outside.sum() > tolerance * len(numbers):
        unit = f" {code.unit}" if code.unit else ""
        misfits.append((is_outside, f"{code.low:g} to {code.high:g}{unit}"))
    return misfits


def draft_dictionary(
    encoder: AgreedEncoder,
    cards: Sequence[ColumnCard],
    target: str,
    excluded: Sequence[str],
    comments: Mapping[str, Sequence[str]],
    patient: str | None = None,
) -> str:
    """Return the text of a dictionary in YAML, one line a column, with ranges that are wide and rounded.

    ``comments`` stand beside the columns.
    """
    lines = ["# Read each line, correct it, and let all sites sign the same file."]
    lines.append(f"target: {_quoted(target)}")
    if patient is not None:
        lines.append(f"patient: {_quoted(patient)}")
    if encoder.classes is not None:
        lines.append(f"classes: {_quoted(list(encoder.classes))}")
        lines.append(f"positive: {_quoted(encoder.classes[-1])}")
    else:
        lines.append(f"target_mean: {encoder.target_mean}")
        lines.append(f"target_scale: {encoder.target_scale}")
    lines.append("tolerance: 0.0  # share of a column's cells that may lie outside its range")

    values_by_name = {card.name: card.values for card in cards}
    lines.append("columns:")
    for code in encoder.columns:
        plain = code.to_plain()
        if code.categories is None:
            plain["low"], plain["high"] = wide_range(values_by_name[code.name])
            plain["unit"] = ""
            numbers = values_by_name[code.name].dropna()
            if code.kind == NUMBERS_KIND and (numbers % 1 == 0).all():
                plain["kind"] = WHOLE_NUMBERS_KIND
        comment = "; ".join(comments.get(code.name, ()))
        if comment:
            comment = f"  # {comment}"
        lines.append(f"  {_quoted(code.name)}: {_quoted(plain)}{comment}")

    reasons = dict.fromkeys(excluded, "why?")
    lines.append(f"excluded: {_quoted(reasons)}")
    return "\n".join(lines) + "\n"


def _quoted(plain: Any) -> str:
    """Write a value as JSON, which is YAML with all texts quoted: ``no`` and ``01067`` stay texts."""
    return json.dumps(plain, ensure_ascii=False)


def wide_range(values: pd.Series) -> tuple[float, float]:
    """Return rounded bounds that are far beyond nearly all values, and are no value of a single row.

    Example:
        >>> wide_range(pd.Series(range(20, 91)))
        (0.0, 160.0)
    """
    numbers = values.dropna().to_numpy(dtype=np.float64)
    lower, upper = np.quantile(numbers, _QUANTILES)
    width = upper - lower
    size = width or abs(upper) or 1.0
    step = 10.0 ** math.floor(math.log10(size))

    # A row may lie farther out. The bound is then the next step beyond it, which is not its value.
    smallest = numbers.min()
    low_step = math.ceil(min(lower - width, smallest) / step) - 1
    high_step = math.floor(max(upper + width, numbers.max()) / step) + 1
    if smallest >= 0:
        low_step = max(low_step, 0)

    low = float(f"{low_step * step:.12g}")  # 0.3, not 0.30000000000000004
    high = float(f"{high_step * step:.12g}")
    return low, high
