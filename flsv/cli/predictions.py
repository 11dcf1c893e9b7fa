"""``flsv predict`` writes what it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from flsv._lightning.durable import replacing
from flsv.cli.command import shown
from flsv.csv_files import save_csv
from flsv.report.folder import run_folder


class WritePredictions(BasePredictionWriter):
    """``predictions.csv`` in the run's folder: a row per sample, in the order of the data.

    Of classes: ``index``, ``prediction`` (the likeliest class) and a column per class, what ``predict_step`` gave for
    it; the names are the data module's. Of numbers: ``index`` and ``prediction``, or ``output_0`` and so on. Anything
    else, such as texts or images, goes to ``predictions.pt`` as ``predict_step`` gave it, batch by batch
    (``torch.load``). Of several processes each writes a file of its own, with its rank in the name.

    Attributes:
        said: where the file is, and what is in it; after the prediction.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")
        self.said = "nothing was predicted"

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        loaders = [list(predictions)] if _one_loader(trainer) else [list(part) for part in predictions]
        batches = [batch for part in loaders for batch in part]
        if not batches:
            return
        several = trainer.world_size > 1
        if not several and not trainer.is_global_zero:
            return
        suffix = f"_{trainer.global_rank}" if several else ""
        folder = run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        table = _table(batches)
        if table is None:
            path = folder / f"predictions{suffix}.pt"
            with replacing(path) as file:
                torch.save(list(predictions), file)
            self.said = f"{shown(path)} ({len(batches)} batches, for torch.load)"
            return
        given = [] if _one_loader(trainer) is False else [i for part in batch_indices for b in part for i in b]
        indices = given if several and len(given) == len(table) else list(range(len(table)))
        path = folder / f"predictions{suffix}.csv"
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        names = _class_names(data, table)
        _write(path, indices, table, names)
        self.said = f"{shown(path)} ({len(table)} samples)"


def _one_loader(trainer: L.Trainer) -> bool:
    return not isinstance(trainer.predict_dataloaders, list | tuple) or len(trainer.predict_dataloaders) == 1


def _table(batches: Sequence[Any]) -> Tensor | None:
    """``[N]`` or ``[N, M]`` of batches that are such tensors; else None."""
    if not all(isinstance(batch, Tensor) and batch.ndim in (1, 2) for batch in batches):
        return None
    if len({batch.shape[1:] for batch in batches}) != 1:
        return None
    table = torch.cat([batch.detach().cpu() for batch in batches])
    return table[:, 0] if table.ndim == 2 and table.shape[1] == 1 else table


def _class_names(data: Any, table: Tensor) -> list[str] | None:
    """Names of the columns where they are classes."""
    if table.ndim != 2 or not table.is_floating_point() or getattr(data, "no_classes", None) is not None:
        return None
    if table.shape[1] != getattr(data, "num_classes", None):
        return None
    names = [str(name) for name in data.class_names or range(table.shape[1])]
    return names if len(set(names)) == len(names) else [f"{name} ({j})" for j, name in enumerate(names)]


def _write(path: Path, indices: Sequence[int], table: Tensor, names: list[str] | None) -> None:
    rows = ([index, *row] for index, row in zip(indices, _rows(table, names)))
    save_csv(path, [["index", *_head(table, names)], *rows])


def _head(table: Tensor, names: list[str] | None) -> list[str]:
    if table.ndim == 1:
        return ["prediction"]
    return ["prediction", *names] if names else [f"output_{j}" for j in range(table.shape[1])]


def _rows(table: Tensor, names: list[str] | None) -> Iterator[list[Any]]:
    for row in table:
        values = [row.item()] if row.ndim == 0 else row.tolist()
        likeliest = [names[int(row.argmax())] if row.isfinite().all() else ""] if names else []
        yield [*likeliest, *(f"{value:.6g}" if isinstance(value, float) else value for value in values)]
