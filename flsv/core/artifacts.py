"""Folders of clients, and tables that a client makes of its own data, which never reach the server."""
# A simulation writes them below clients/<name>/ in the run's folder, where everybody who can read it sees them.

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from flsv.core.local_data import LocalData
from flsv.utilities.arguments import plain_name

MakeTable = Callable[[], str]
"""Function that makes a table as text."""

_MEMORY_KEY = "tables"
#: Names of a run's own folders and files, which no client's folder may have.
_RESERVED_NAMES = re.compile(r"(?i)checkpoints|clients|.*\.(yaml|json|csv|png|html|ckpt|pt)")
#: Path separators, and characters that Windows refuses.
_REFUSED_CHARACTERS = re.compile(r'[\x00-\x1f\x7f/\\:*?"<>|]+')
#: The longest name of a client's folder.
_MAX_NAME_LENGTH = 60


def client_folders(names: Sequence[str]) -> list[str]:
    """Return a distinct folder name, valid on every file system, for each client name.

    Example:
        >>> client_folders(["0", "1"]), client_folders(["St. Mary's", "a/b", "A:B", ".."])
        (['0', '1'], ["St. Mary's", 'a_b', 'A_B_2', 'client_3'])
    """
    folders: list[str] = []
    names_in_use: set[str] = set()
    for client, name in enumerate(names):
        folder = _valid_name(name) or f"client_{client}"
        while folder.casefold() in names_in_use or _RESERVED_NAMES.fullmatch(folder):
            folder = f"{folder}_{client}"
        names_in_use.add(folder.casefold())
        folders.append(folder)
    return folders


def _valid_name(name: str) -> str:
    """Return a name that every file system takes, empty where nothing of ``name`` remains."""
    # No dot or blank stands at either end, nor where a long name is cut.
    valid = _REFUSED_CHARACTERS.sub("_", str(name)).strip(" .")
    return valid[:_MAX_NAME_LENGTH].strip(" .")


def keep_table(
    local: LocalData,
    name: str,
    make_table: MakeTable,
) -> None:
    """Store the function that makes a table as text at the client. :func:`write_tables` calls it."""
    tables = local.memory.setdefault(_MEMORY_KEY, {})
    tables[plain_name(name, "table")] = make_table


def write_tables(local: LocalData, folder: Path) -> None:
    """Write the tables stored by :func:`keep_table` into the client's ``folder``."""
    tables: dict[str, MakeTable] = local.memory.get(_MEMORY_KEY, {})
    for name, make_table in tables.items():
        # Checked again: other code of the client may have written to its memory.
        plain_name(name, "table")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.csv"
        path.write_text(make_table())
