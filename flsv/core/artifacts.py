"""Folders of clients, and tables that a client computes from its own data, which are never sent to the server."""
# A simulation writes them below clients/<name>/ in the run's folder, which other users may be able to read.

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
#: Path separators, and characters that Windows does not allow.
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
    """Return a name that is valid on every file system, empty if no character of ``name`` is."""
    # Dots and blanks are removed at both ends, also after a long name is truncated.
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
        # The name is checked again, since other code of the client may have written to its memory.
        plain_name(name, "table")
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.csv"
        path.write_text(make_table())
