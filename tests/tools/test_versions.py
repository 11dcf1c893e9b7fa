"""The constraints of `make lowest` are pyproject.toml's."""

from __future__ import annotations

import re

from release import PYPROJECT, TOOLS, lowest


def test_every_requirement_of_the_package_is_there() -> None:
    text = PYPROJECT.read_text()
    listed = text.split("\ndependencies = [")[1].split("\n]")[0]
    names = re.findall(r'^ +"([\w.-]+)', listed, flags=re.MULTILINE)
    assert len(names) > 10
    found = lowest(text)
    assert set(names) < set(found)
    assert {"peft", "dp-accounting"} < set(found)
    assert not set(TOOLS) & set(found)


def test_of_a_requirement_with_several_bounds() -> None:
    text = 'dependencies = [\n    "a[x]>=2.4,!=2.6",\n    "b>=13",  # c>=1\n]\nlora = ["d-e>=0.11,<2"]'
    assert lowest(text) == {"a": "2.4", "b": "13", "d-e": "0.11"}
