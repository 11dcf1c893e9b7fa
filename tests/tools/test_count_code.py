"""What is counted of code, pages, tests and tools."""

from __future__ import annotations

import ast
from pathlib import Path

from count_code import BUDGETS, code_lines, complexity, surroundings

SOURCE = '''"""Text."""

import ast  # why


def f(x):
    """More text."""
    return 1 if x and ast else 2
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert code_lines(SOURCE) == 3
    assert complexity(ast.parse(SOURCE).body[-1]) == 3


def test_what_surrounds_a_package(tmp_path: Path) -> None:
    for name, text in {
        "README.md": "one two",
        "CHANGELOG.md": "three",
        "docs/guide.md": "four five six",
        "docs/results/page.md": "seven",
        "docs/benchmark.md": "eight",
        "tests/test_a.py": "a\n" * 5,
        "tests/more/test_b.py": "b\n",
        "tools/c.py": "c\n" * 3,
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = surroundings(tmp_path)
    assert list(found.values()) == [8, 5, 6, 3, 1]
    assert found.keys() < BUDGETS.keys()
