"""What is counted of code, and what makes it hard to read."""

import ast
from pathlib import Path

import count_code
import pytest
from count_code import digest_of, hard_to_read, tokens_by_line

SOURCE = '''"""Text."""

import ast  # why


def f(x):
    """More text."""
    return 1 if x and ast else 2
'''

PACKED = """
def total(values):
    found = sum(value if value > 0 else 0 for value in values if value is not None and value != 1)
    return found, [value * 2 for value in values if value], [value * 3 for value in values if value]
"""


@pytest.fixture
def packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(count_code, "ROOT", tmp_path)
    path = tmp_path / "flsv" / "packed.py"
    path.parent.mkdir()
    path.write_text(PACKED)
    return path


def test_docstrings_comments_and_blank_lines_are_no_code():
    assert tokens_by_line(SOURCE) == {3: 2, 6: 6, 8: 8}


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


def test_names_for_which_the_glossary_has_another_word_are_refused_also_in_exempt_code(
    packed_file,
):
    glossary = packed_file.parents[1] / count_code.GLOSSARY
    glossary.parent.mkdir(parents=True)
    glossary.write_text("`value` is a word. Refused: `found` (sum),\n`total`\n(sum).")

    words = count_code.words_of_glossary()

    assert words == {"found": "sum", "total": "sum"}

    problems = count_code.other_words(packed_file, words)

    assert [problem.split()[2:4] for problem in problems] == [
        ["flsv/packed.py:3", "found;"],
        ["flsv/packed.py:2", "total;"],
    ]
    assert problems[0].endswith(f"{count_code.GLOSSARY} says sum")


def test_a_leaf_of_contrib_is_neither_counted_nor_measured(packed_file):
    leaf = packed_file.parent / "contrib" / "packed.py"
    leaf.parent.mkdir()
    leaf.write_text(PACKED)

    assert count_code.is_leaf(leaf)
    assert not count_code.is_leaf(leaf.with_name("__init__.py"))
    assert count_code.checked_files() == [packed_file]
