"""What several test modules share, each file named by what it holds."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(fast: Collection[Any], rows: Iterable[Any]) -> list[Any]:
    """For ``pytest.mark.parametrize``: ``rows``, slow but for those in ``fast``, each of which must be one of them."""
    rows = list(rows)
    assert all(each in rows for each in fast), f"{fast} are not all in {rows}"
    return [
        row
        if row in fast
        else pytest.param(*(row if isinstance(row, tuple) else [row]), marks=pytest.mark.slow)
        for row in rows
    ]
