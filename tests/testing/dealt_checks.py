"""Which checks the fast tests run of which parts: those of federations are dealt out, the rest of them is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from flsv.testing.checks import PartCheck


def dealt(tables: Iterable[Sequence[list[PartCheck]]], shared: Sequence[str]) -> Any:
    """As :func:`flsv.testing.parametrize_with_checks`. A check of ``shared`` is slow for two of three parts, the next
    check for other ones: fast tests have every check for parts of each table, and some of them for every part."""
    checks, marks = [], []
    for table in tables:
        for place, of_part in enumerate(table):
            for check in of_part:
                name = check.check.__name__
                slow = name in shared and (place + shared.index(name)) % 3 != 0
                checks.append(check)
                marks.append([pytest.mark.slow] if slow else [])
    made = [pytest.param(check, marks=mark) for check, mark in zip(checks, marks)]
    return pytest.mark.parametrize("check", made, ids=str)
