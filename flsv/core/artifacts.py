"""Pictures and tables that a client makes of its own data, which never reach the server."""
# A simulation writes them below clients/<name>/ in the run's folder, where everybody who can read it, or its
# TensorBoard, sees them.

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flsv.core.local_data import LocalData
from flsv.utilities.arguments import plain_name
from flsv.utilities.display import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[], "Figure | str"]
"""Function that makes a picture, or a table as text."""

_MEMORY_KEY = "artifacts"
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


def keep_artifact(
    local: LocalData,
    name: str,
    draw: Draw,
) -> None:
    """Store ``draw``, which makes a picture or table, at the client. :func:`write_artifacts` calls it."""
    artifacts = local.memory.setdefault(_MEMORY_KEY, {})
    artifacts[plain_name(name, "picture")] = draw


def write_artifacts(
    local: LocalData,
    folder: Path,
    step: int | None = None,
) -> None:
    """Write the pictures and tables stored by :func:`keep_artifact` into the client's ``folder``."""
    artifacts: dict[str, Draw] = local.memory.get(_MEMORY_KEY, {})
    if not artifacts:
        return

    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    for name, draw in artifacts.items():
        # Checked again: other code of the client may have written to its memory.
        plain_name(name, "picture")
        picture_path = folder / f"{name}.png"
        with drawing(str(picture_path)):
            artifact = draw()
            if isinstance(artifact, str):  # a table
                (folder / f"{name}.csv").write_text(artifact)
            else:
                artifact.savefig(picture_path)
                figures[name] = artifact

    if step is not None and figures:
        _show_in_tensorboard(figures, folder, step)


def _show_in_tensorboard(
    figures: Mapping[str, Figure],
    folder: Path,
    step: int,
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    # The pictures have a folder of their own, since TensorBoard may read only the latest of several files in one.
    with SummaryWriter(folder / "pictures") as writer:
        for name, figure in figures.items():
            with drawing(name):
                writer.add_figure(name, figure, global_step=step)
