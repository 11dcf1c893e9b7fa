"""What is counted of code, pages, tests and tools."""

from count_code import code_lines

SOURCE = '''"""Text."""

import ast  # why


def f(x):
    """More text."""
    return 1 if x and ast else 2
'''


def test_docstrings_comments_and_blank_lines_are_no_code() -> None:
    assert code_lines(SOURCE) == 3
