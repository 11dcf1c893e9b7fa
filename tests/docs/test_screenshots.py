"""Screenshots are small, and on a page."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["report", "tensorboard", "notebook"])
def test_a_screenshot_is_small_and_shown(name: str) -> None:
    picture = DOCS / "images" / f"{name}.png"
    content = picture.read_bytes()
    assert len(content) <= 150_000
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 900
    assert height >= 800
    assert f"(../images/{name}.png)" in (DOCS / "howto" / "look.md").read_text(encoding="utf-8")
