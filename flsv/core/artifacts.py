"""Pictures and tables that a client makes of its own data, which never reach the server."""
# A simulation writes them below clients/<name>/ in the run's folder, where everybody who can read it, or its
# TensorBoard, sees them.

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flsv.core.local_data import LocalData
from flsv.utilities.arguments import plain_name
from flsv.utilities.charts import drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_KEY = "artifacts"
#: Names of a run's own folders and files, which no client's folder may have.
_OWN = re.compile(r"(?i)checkpoints|clients|.*\.(yaml|json|csv|png|html|ckpt|pt)")


def client_folders(names: Sequence[str]) -> list[str]:
    """Return a distinct folder name, valid on every file system, for each client name.

    Example:
        >>> client_folders(["0", "1"]), client_folders(["St. Mary's", "a/b", "A:B", ".."])
        (['0', '1'], ["St. Mary's", 'a_b', 'A_B_2', 'client_3'])
    """
    folders: list[str] = []
    taken: set[str] = set()
    for client, name in enumerate(names):
        # Replace path separators and characters that Windows refuses; no dot at either end.
        plain = (
            re.sub(r'[\x00-\x1f\x7f/\\:*?"<>|]+', "_", str(name)).strip(" .")[:60].strip(" .")
            or f"client_{client}"
        )
        unique = plain
        while unique.casefold() in taken or _OWN.fullmatch(unique):
            unique = f"{unique}_{client}"
        taken.add(unique.casefold())
        folders.append(unique)
    return folders


def keep_artifact(local: LocalData, name: str, draw: Callable[[], Figure | str]) -> None:
    """Store ``draw``, which makes a picture or table, at the client. :func:`write_artifacts` calls it."""
    local.memory.setdefault(_KEY, {})[plain_name(name, "picture")] = draw


def write_artifacts(local: LocalData, folder: Path, step: int | None = None) -> None:
    """Write the pictures and tables stored by :func:`keep_artifact` into the client's ``folder``."""
    kept: dict[str, Callable[[], Figure | str]] = local.memory.get(_KEY, {})
    if not kept:
        return
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    for name, draw in kept.items():
        plain_name(
            name, "picture"
        )  # checked again: other code of the client may have written to its memory
        with drawing(f"{folder / name}.png"):
            figure = draw()
            if isinstance(figure, str):
                (folder / f"{name}.csv").write_text(figure)
                continue
            figure.savefig(folder / f"{name}.png")
            figures[name] = figure
    if step is not None and figures:
        from torch.utils.tensorboard import SummaryWriter

        # A folder of its own: of several event files in one folder TensorBoard may read only the latest one.
        with SummaryWriter(folder / "pictures") as writer:
            for name, figure in figures.items():
                with drawing(name):
                    writer.add_figure(name, figure, global_step=step)
