"""pFedSV's cells on CIFAR-100, each for a round, where its images are not at hand: on random ones of its format.

    python tools/pfedsv_stand_in.py [--kept FILE] [--out FILE.md]

Shows that these columns of ``tables/pfedsv.yaml --full`` start and end, and estimates their hours as ``--full --short``
does: the sizes, the classes and the network are CIFAR-100's. Accuracies on noise mean nothing, and are not printed.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import table_presets
from run_table import TABLES, preset_of
from table_cells import Results
from table_runs import Cell
from torchvision.datasets import CIFAR100

CLASSES = 100
PRESET = preset_of(TABLES / "pfedsv.yaml")


def write(folder: Path, images: dict[str, int]) -> None:
    """Random images as CIFAR-100's files have them, every class equally often.

    Args:
        folder: of the data sets; the files go into a folder of their own below it.
        images: how many, by file: ``train`` and ``test``.
    """
    draw, place = np.random.default_rng(0), folder / CIFAR100.base_folder
    place.mkdir(parents=True)
    for name, count in images.items():
        labels = draw.permutation(np.arange(count) % CLASSES).tolist()
        pixels = draw.integers(0, 256, (count, 3 * 32 * 32), dtype=np.uint8)
        (place / name).write_bytes(pickle.dumps({"data": pixels, "fine_labels": labels}))
    names = [f"class {number}" for number in range(CLASSES)]
    (place / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))


@contextmanager
def instead(images: dict[str, int]) -> Iterator[Path]:
    """A folder of data sets with such a CIFAR-100, which torchvision takes for the real one."""
    with tempfile.TemporaryDirectory() as root, patch("torchvision.datasets.cifar.check_integrity", return_value=True):
        write(Path(root), images)
        yield Path(root)


def cells(full: bool, seeds: Sequence[int]) -> list[Cell]:
    """Those of CIFAR-100, under another name in what is kept."""
    found = [cell for cell in PRESET.cells(full, seeds) if "CIFAR-100" in cell.column]
    return [replace(cell, column=f"{cell.column}, random images") for cell in found]


def report(results: Results, cells: Sequence[Cell]) -> str:
    ended = Counter(cell.column for cell in cells if cell.key in results)
    return "\n".join(f"- {column}: {count} cells started and ended" for column, count in ended.items())


if __name__ == "__main__":
    preset = table_presets.Preset("pfedsv_stand_in", cells, report, PRESET.short)
    with instead({"train": 50_000, "test": 10_000}) as root:
        table_presets.main(preset, __doc__, ["--full", "--short", *sys.argv[1:], "--root", str(root)])
