"""Pictures that a client draws of its own data, and tables, for its own eyes: no answer to the server holds them.

A simulation writes them below ``clients/`` in the run's folder, where everybody who can read that finds them, and a
TensorBoard that serves the folder shows them; see ``docs/trust.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from flsv.arguments import plain_name
from flsv.drawing import drawing
from flsv.participants import LocalData
from flsv.participants.cache import memory

_KEY = "artifacts"


def keep_artifact(local: LocalData, name: str, draw: Callable[[], Figure | str]) -> None:
    """Keep a picture or a table at the client, in place of an earlier one of this name.

    Args:
        local: the client's own data; this is called inside a question.
        name: of the file, without an ending; a plain one, see :func:`flsv.arguments.plain_name`.
        draw: draws it, when it is asked for; or writes a table, the text of a ``.csv`` file.

    Raises:
        ConfigurationError: a name that is no plain file name; it could lead out of the client's folder.
    """
    memory(local).setdefault(_KEY, {})[plain_name(name, "picture")] = draw


def write_artifacts(local: LocalData, folder: Path, step: int | None = None) -> None:
    """Asked of a client: write its pictures below a folder of its own, and tell nobody.

    Args:
        local: the client's own data.
        folder: the client's own; made if it is not there.
        step: a round, to write TensorBoard events beside the ``.png`` files; None: no events.

    Example:
        >>> import tempfile, torch
        >>> from flsv.participants import Client
        >>> count = torch.tensor([1, 1])
        >>> client = Client(0, LocalData("client 0", lambda split: [], count, count))
        >>> client.ask(keep_artifact, "empty", Figure)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     client.ask(write_artifacts, Path(folder))
        ...     [path.name for path in Path(folder).iterdir()]
        ['empty.png']
    """
    kept: dict[str, Callable[[], Figure | str]] = memory(local).get(_KEY, {})
    if not kept:
        return
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Figure] = {}
    for name, draw in kept.items():
        plain_name(name, "picture")  # again: a client may have put it into its memory by other ways
        with drawing(f"{folder / name}.png"):
            figure = draw()
            if isinstance(figure, str):
                (folder / f"{name}.csv").write_text(figure)
                continue
            figure.savefig(folder / f"{name}.png")
            figures[name] = figure
    if step is not None and figures:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder) as writer:
            for name, figure in figures.items():
                with drawing(name):
                    writer.add_figure(name, figure, global_step=step)
