"""What is counted of code, and what makes it hard to read."""

import ast

import count_code
import pytest
from count_code import digest_of, hard_to_read

PACKED = """
def total(values):
    found = sum(value if value > 0 else 0 for value in values if value is not None and value != 1)
    return found, [value * 2 for value in values if value], [value * 3 for value in values if value]
"""


@pytest.fixture
def packed_file(tmp_path, monkeypatch):
    monkeypatch.setattr(count_code, "ROOT", tmp_path)
    path = tmp_path / "flsv" / "packed.py"
    path.parent.mkdir()
    path.write_text(PACKED)
    return path


def test_packed_function_is_named_with_its_vague_name_and_its_long_lines(packed_file):
    problems = hard_to_read(packed_file, exempt=set())

    assert len(problems) == 2
    assert "flsv/packed.py:3 found" in problems[0]
    assert "[3, 4]" in problems[1]


def test_function_written_before_the_limits_is_exempt_until_it_changes(packed_file):
    (function,) = ast.parse(PACKED).body
    exempt = {digest_of(function)}

    assert hard_to_read(packed_file, exempt) == []

    packed_file.write_text(PACKED.replace("value * 2", "value * 4"))
    assert len(hard_to_read(packed_file, exempt)) == 2
