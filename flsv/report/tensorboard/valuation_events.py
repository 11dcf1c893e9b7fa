"""A valuation in TensorBoard: a run per client, the table and the pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor
from torch.utils.tensorboard import SummaryWriter

from flsv.drawing import client_labels, drawing
from flsv.participants.artifacts import client_folders
from flsv.report.tensorboard.event_files import EventFile
from flsv.report.tensorboard.tabs import cell, layout, layout_summary, markdown_table
from flsv.valuation import Valuation
from flsv.valuation.report import draw_contributions, histograms_of

#: What the names of a valuation's event files end with.
SUFFIX = ".value"


def write_events(folder: Path, columns: Mapping[str, Tensor], found: Valuation, names: Sequence[str] | None) -> None:
    """Write what a valuation found: its numbers once more as curves of one point, below ``clients/``.

    Args:
        folder: TensorBoard's run.
        columns: of the table, ``[n]`` each; NaN is left out.
        found: for the pictures.
        names: of the clients.
    """
    _clear(folder)
    clients = len(next(iter(columns.values())))
    labels = client_labels(clients, names)
    folders = client_folders(names or [str(i) for i in range(clients)])
    for client, place in enumerate(folders):
        _clear(folder / "clients" / place)
        file = EventFile(folder / "clients" / place, suffix=SUFFIX)
        numbers = {name: float(column[client]) for name, column in columns.items()}
        file.write(0, {f"value/{name}": x for name, x in numbers.items() if x == x})
        file.close()
    with SummaryWriter(str(folder), filename_suffix=SUFFIX) as writer:
        cells = {name: [*map(cell, column.tolist())] for name, column in columns.items()}
        writer.add_text("value", markdown_table({"client": labels, **cells}), 0)
        tags = {f"value/{name}": False for name in columns}
        writer._get_file_writer().add_summary(layout_summary(layout(tags, clients, 0, names, None, by_client=True)))
        for name, draw in (("contributions", draw_contributions), ("gradients", histograms_of)):
            with drawing(f"value/{name}"):
                writer.add_figure(f"value/{name}", draw(found, names), 0)


def _clear(folder: Path) -> None:
    """Whoever values again overwrites the CSV, so the events too; those of a fit in the same folder are left alone."""
    for file in folder.glob(f"events.out.tfevents.*{SUFFIX}"):
        file.unlink()
