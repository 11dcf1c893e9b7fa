"""Pictures that a client draws of its own data, for its own eyes: they never cross to the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from flsv.local_data import LocalData
from flsv.local_memory import memory

_KEY = "artifacts"


def keep_artifact(local: LocalData, name: str, draw: Callable[[], Figure]) -> None:
    """Keep a picture at the client, in place of an earlier one of this name.

    Args:
        local: the client's own data; this is called inside a question.
        name: of the file, without an ending.
        draw: draws it, when it is asked for.
    """
    memory(local).setdefault(_KEY, {})[name] = draw


def write_artifacts(local: LocalData, folder: Path, step: int | None = None) -> None:
    """Asked of a client: write its pictures below a folder of its own, and tell nobody.

    Args:
        local: the client's own data.
        folder: the client's own; made if it is not there.
        step: a round, to write TensorBoard events beside the ``.png`` files; None: no events.

    Example:
        >>> import tempfile, torch
        >>> from flsv.local_data import Client
        >>> count = torch.tensor([1, 1])
        >>> client = Client(0, LocalData("client 0", lambda split: [], count, count))
        >>> client.ask(keep_artifact, "empty", Figure)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     client.ask(write_artifacts, Path(folder))
        ...     [path.name for path in Path(folder).iterdir()]
        ['empty.png']
    """
    kept: dict[str, Callable[[], Figure]] = memory(local).get(_KEY, {})
    if not kept:
        return
    folder.mkdir(parents=True, exist_ok=True)
    figures = {name: draw() for name, draw in kept.items()}
    for name, figure in figures.items():
        figure.savefig(folder / f"{name}.png")
    if step is not None:
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(folder) as writer:
            for name, figure in figures.items():
                writer.add_figure(name, figure, global_step=step)
