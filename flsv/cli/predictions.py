"""What ``flsv predict`` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter
from pandas import DataFrame
from torch import Tensor

from flsv._lightning.durable import replacing
from flsv.csv_files import save_table
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.report.folder import run_folder
from flsv.showing import shown


class WritePredictions(BasePredictionWriter):
    """``predictions.csv`` in the folder of the run whose checkpoint predicts: a row per sample, in the data's order.

    Of classes: ``index``, ``prediction`` (the likeliest class) and a column per class, what ``predict_step`` gave for
    it; the names are the data module's. Of numbers: ``index`` and ``prediction``, or ``output_0`` and so on. Rows of a
    table have their ``line``, whose they are (``client``) and the columns that were excluded, such as ids. Anything
    else, such as texts or images, goes to ``predictions.pt`` as ``predict_step`` gave it, batch by batch
    (``torch.load``).

    Attributes:
        where: the file, and what is in it; after the prediction.
        folder: where it is to be; None: the trainer's.

    Raises:
        ConfigurationError: before the prediction, several processes: each would have a part of it.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")
        self.where = "nothing was predicted"
        self.folder: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.world_size > 1:
            raise ConfigurationError("predictions are written by one process: say --trainer.devices 1.")

    def write_on_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        predictions: Sequence[Any],
        batch_indices: Sequence[Any],
    ) -> None:
        folder = self.folder or run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = all(isinstance(batch, Tensor) and batch.ndim in (1, 2) for batch in predictions)
        if not (tensors and len({batch.shape[1:] for batch in predictions}) == 1):
            path = folder / "predictions.pt"
            with replacing(path) as file:
                torch.save(list(predictions), file)
            self.where = f"{shown(path)} ({len(predictions)} batches, for torch.load)"
            return
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
        frame = _predicted(torch.cat([batch.detach().cpu() for batch in predictions]), data)
        sets: list[Any] = [getattr(trainer.predict_dataloaders, "dataset", None), data.test_set]
        names: dict[str, Sequence[str]] = next((each.row_names for each in sets if hasattr(each, "row_names")), {})
        rows = {name: list(values)[: len(frame)] for name, values in names.items()}
        path = folder / "predictions.csv"
        save_table(path, DataFrame({"index": range(len(frame)), **rows}).join(frame))
        self.where = f"{shown(path)} ({len(frame)} samples)"


def _predicted(table: Tensor, data: FederatedDataModule) -> DataFrame:
    """Numbers; or the likeliest class and a column per class; or a column per output."""
    if table.ndim == 1 or table.shape[1] == 1:
        return DataFrame({"prediction": _cells(table.flatten())})
    classes = table.is_floating_point() and data.no_classes is None and table.shape[1] == data.num_classes
    if not classes:
        return DataFrame({f"output_{j}": _cells(column) for j, column in enumerate(table.T)})
    names = [str(name) for name in data.class_names or range(table.shape[1])]
    likeliest = [names[int(row.argmax())] if row.isfinite().all() else "" for row in table]
    return DataFrame({"prediction": likeliest, **dict(zip(names, map(_cells, table.T)))})


def _cells(column: Tensor) -> list[Any]:
    return [f"{value:.6g}" if isinstance(value, float) else value for value in column.tolist()]
