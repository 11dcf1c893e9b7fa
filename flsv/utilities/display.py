"""Functions that format paths for a shell and tables for notebooks."""

from __future__ import annotations

import html
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

#: Largest number of rows that a table in a notebook shows.
MAX_ROWS = 20

#: Confidence level of the intervals in the reports.
LEVEL = 0.9
#: The promise of these intervals, in the words that all reports use.
BRACKETS = "The brackets hold the mean over many seeds in about 9 of 10 cases."
#: Beginning of a performance's title if the clients judge the models.
CLIENTS = "clients' "


def display_path(path: Path) -> str:
    """Return a path relative to the working folder if possible, quoted for a shell.

    Example:
        >>> display_path(Path("runs/my run"))
        "'runs/my run'"
    """
    try:
        path = path.resolve().relative_to(Path.cwd())
    except ValueError:
        path = path.resolve()
    return shlex.quote(str(path))


def plain(text: str) -> str:
    """Remove Sphinx roles and double backticks from a docstring.

    Example:
        >>> plain("``--tests``: see :func:`~flsv.functional.wasserstein`")
        '--tests: see flsv.functional.wasserstein'
    """
    without_roles = re.sub(r":\w+:`~?([^`]*)`", r"\1", text)
    return without_roles.replace("``", "")


def html_table(
    title: str,
    head: Sequence[object],
    rows: Sequence[Sequence[object]],
) -> str:
    """Format a title and a table as HTML, with at most 20 rows.

    Example:
        >>> html_table("a < b", ["client", "samples"], [["Boston", 3]])
        '<b>a &lt; b</b><table><tr><th>client</th><th>samples</th></tr><tr><td>Boston</td><td>3</td></tr></table>'
    """

    def row_of(cells: Sequence[object], tag: str) -> str:
        tagged = [f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells]
        return f"<tr>{''.join(tagged)}</tr>"

    table_rows = [row_of(head, "th")]
    for cells in rows[:MAX_ROWS]:
        table_rows.append(row_of(cells, "td"))
    table = f"<b>{html.escape(title)}</b><table>{''.join(table_rows)}</table>"
    if len(rows) > MAX_ROWS:
        table += f"<p>and {len(rows) - MAX_ROWS} more</p>"
    return table
