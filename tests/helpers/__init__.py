"""What several test modules share, each file named by what it holds."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch

from flsv.utilities.errors import ConfigurationError


def refused(message: str):
    """Expect that what is done within is refused, with these words (a regular expression)."""
    return pytest.raises(ConfigurationError, match=message)


def warns(message: str):
    """Expect that what is done within warns its user, with these words (a regular expression)."""
    return pytest.warns(UserWarning, match=message)


def make_generator(seed=0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def slow_except(
    fast: Collection[Any],
    rows: Iterable[Any],
) -> list[Any]:
    """For ``pytest.mark.parametrize``: ``rows``, slow but for those in ``fast``, each of which must be one of them."""
    rows = list(rows)
    for row in fast:
        assert row in rows, f"{fast} are not all in {rows}"

    marked = []
    for row in rows:
        if row in fast:
            marked.append(row)
        else:
            arguments = row if isinstance(row, tuple) else [row]
            marked.append(pytest.param(*arguments, marks=pytest.mark.slow))

    return marked
