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


def test_expressions_in_an_f_string_count_and_its_text_is_one_token():
    counts = count_code.tokens_by_line('message = f"{len(names)} of {total}"\n')

    assert counts == {1: 3 + len(["len", "(", "names", ")"]) + len(["total"])}


ROWS = """
@pytest.mark.parametrize("number", [1, 2])
def test_numbers(number):
    assert number
"""


def test_row_that_is_added_to_a_test_is_no_new_code():
    (test,) = ast.parse(ROWS).body
    (longer_test,) = ast.parse(ROWS.replace("[1, 2]", "[1, 2, 3]")).body

    assert digest_of(test) == digest_of(longer_test)


def test_count_within_the_margin_is_no_problem():
    assert count_code.beyond("tokens", count=1_010, stood=1_000) == []
    assert count_code.beyond("tokens", count=1_011, stood=1_000) == [
        "more than 1,010 tokens: 1,011"
    ]
