"""Paths that can be pasted into a shell, and small tables for notebooks."""

from __future__ import annotations

import html
import shlex
from collections.abc import Sequence
from pathlib import Path

#: Rows of a table in a notebook.
MOST = 20

#: How the title of a performance begins by which the clients judge models.
CLIENTS = "clients' "


def display_path(path: Path) -> str:
    """Write a path as short as it can be said from the working folder, quoted where a shell needs that.

    Example:
        >>> display_path(Path("runs/my run"))
        "'runs/my run'"
    """
    try:
        path = path.resolve().relative_to(Path.cwd())
    except ValueError:
        path = path.resolve()
    return shlex.quote(str(path))


def html_table(title: str, head: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Write a title and a table as HTML, for ``_repr_html_``; of many rows only the first.

    Example:
        >>> html_table("a < b", ["client", "samples"], [["Boston", 3]])
        '<b>a &lt; b</b><table><tr><th>client</th><th>samples</th></tr><tr><td>Boston</td><td>3</td></tr></table>'
    """

    def row(cells: Sequence[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{html.escape(str(cell))}</{tag}>' for cell in cells)}</tr>"

    body = "".join(row(cells, "td") for cells in rows[:MOST])
    more = f"<p>and {len(rows) - MOST} more</p>" if len(rows) > MOST else ""
    return f"<b>{html.escape(title)}</b><table>{row(head, 'th')}{body}</table>{more}"
