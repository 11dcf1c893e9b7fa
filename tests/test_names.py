"""What may be part of a path."""

from __future__ import annotations

from typing import Any

import pytest

from flsv.arguments import plain_name
from flsv.errors import ConfigurationError


@pytest.mark.parametrize("name", ["ours, renormalized", "cssv-2.1", "Größe", "x" * 100])
def test_plain(name: str) -> None:
    assert plain_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "..",
        "a/b",
        "a\\b",
        ".hidden",
        "a\0b",
        "a\n",
        "C:x",
        "x" * 101,
        3,
    ],
)
def test_not_plain(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="picture .*: expected a plain name"):
        plain_name(name, "picture")
