"""texts_of: the values of a column as texts, as names of classes, clients and parts are compared."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

_FRACTION = re.compile(r"-?\d+\.(?!0$)\d+")
_WHOLE = re.compile(r"^(-?\d+)\.0$")


def texts_of(column: pd.Series) -> pd.Series:
    """Return a column as a categorical of texts, with NaN for None and NaN.

    Whole numbers are written without a decimal point unless the column has fractions: pandas turns 7 into 7.0 in a
    column with missing values, but in a column of versions 7.0 stands beside 7.5.
    """
    value_of_row, distinct_values = pd.factorize(column)  # -1 for a missing value
    texts = _texts(distinct_values)

    # Two values, such as "a" and "a ", may have one text.
    text_of_value, distinct_texts = pd.factorize(np.array(texts, dtype=object))
    # The last code, -1, is that of missing values, whose index is -1.
    codes = np.append(text_of_value, -1)
    words = pd.Categorical.from_codes(
        codes[value_of_row],
        categories=distinct_texts,
    )
    return pd.Series(words, index=column.index)


def _texts(values: Iterable[object]) -> list[str]:
    texts = [str(value).strip() for value in values]
    have_fractions = any(map(_FRACTION.fullmatch, texts))
    if have_fractions:
        return texts
    return [_WHOLE.sub(r"\1", text) for text in texts]
