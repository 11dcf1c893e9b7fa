"""Lists a client's suspicious samples, for that client only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from flsv.csv_files import save_csv
from flsv.participants import LocalData
from flsv.valuation.questions import SampleValues

FLAGGED = "flagged.csv"


def write_flagged(local: LocalData, folder: Path, indices: Tensor, class_names: Sequence[str] | None = None) -> None:
    """A question to a client that has judged its samples: write the flagged ones to its own folder. Nothing crosses.

    Columns: ``index`` of the sample in the data set, its ``label`` as the client has it (the class's name, where there
    are names), ``score`` (the calibrated gradient in squared feature units, the higher the more harmful; empty for a
    sample that is not finite) and ``why``. The most suspicious come first. A client that flags none has a file
    with the header alone; one that has judged nothing has no file.

    Args:
        local: the client's own data.
        folder: the client's own; made if it is not there.
        indices: int64 ``[m]``, of its training samples in the data set, in the order in which it reads them.
        class_names: M names.
    """
    found: SampleValues | None = local.memory.get(SampleValues)
    if found is None or len(found.why) != len(found.gradients):
        return
    y = local.samples()[1].tolist()
    rows: list[tuple[object, ...]] = [("index", "label", "score", "why")]
    for place in found.gradients.argsort(descending=True, stable=True).tolist():
        if found.flagged[place]:
            score = found.gradients[place].item()
            label = y[place] if class_names is None else class_names[y[place]]
            known = f"{score:.6g}" if score < float("inf") else ""
            rows.append((int(indices[place]), label, known, found.why[place]))
    folder.mkdir(parents=True, exist_ok=True)
    save_csv(folder / FLAGGED, rows)
