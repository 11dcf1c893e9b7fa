"""Paths as they are printed."""

from __future__ import annotations

import shlex
from pathlib import Path


def shown(path: Path) -> str:
    """A path as short as it can be said from here, quoted where a shell needs that.

    Example:
        >>> shown(Path("runs/my run"))
        "'runs/my run'"
    """
    try:
        path = path.resolve().relative_to(Path.cwd())
    except ValueError:
        path = path.resolve()
    return shlex.quote(str(path))
