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
from flsv.csv_files import save_csv
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
        loaders: Any = trainer.predict_dataloaders
        several = isinstance(loaders, list | tuple) and len(loaders) > 1
        batches = [batch for part in predictions for batch in part] if several else list(predictions)
        if not batches:
            return
        folder = self.folder or run_folder(trainer)
        folder.mkdir(parents=True, exist_ok=True)
        if not _is_table(batches):
            path = folder / "predictions.pt"
            with replacing(path) as file:
                torch.save(list(predictions), file)
            self.where = f"{shown(path)} ({len(batches)} batches, for torch.load)"
            return
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        table = torch.cat([batch.detach().cpu() for batch in batches])
        frame = _predicted(table, data)
        sets: list[Any] = [getattr(loaders[0] if isinstance(loaders, list | tuple) else loaders, "dataset", None)]
        sets.append(getattr(data, "test_set", None))
        names: dict[str, Sequence[str]] = next((each.row_names for each in sets if hasattr(each, "row_names")), {})
        known = {name: list(values) for name, values in names.items() if len(values) == len(table)}
        frame = DataFrame({"index": range(len(table)), **known}).join(frame)
        path = folder / "predictions.csv"
        save_csv(path, [list(frame), *frame.itertuples(index=False, name=None)])
        self.where = f"{shown(path)} ({len(table)} samples)"


def _is_table(batches: Sequence[Any]) -> bool:
    """Whether these are numbers or rows of numbers, all of one length."""
    tensors = all(isinstance(batch, Tensor) and batch.ndim in (1, 2) for batch in batches)
    return tensors and len({batch.shape[1:] for batch in batches}) == 1


def _predicted(table: Tensor, data: Any) -> DataFrame:
    """Numbers; or the likeliest class and a column per class; or a column per output."""
    if table.ndim == 1 or table.shape[1] == 1:
        return DataFrame({"prediction": _cells(table.flatten())})
    classes = table.is_floating_point() and getattr(data, "no_classes", None) is None
    if not classes or table.shape[1] != getattr(data, "num_classes", None):
        return DataFrame({f"output_{j}": _cells(column) for j, column in enumerate(table.T)})
    names = [str(name) for name in data.class_names or range(table.shape[1])]
    names = names if len(set(names)) == len(names) else [f"{name} ({j})" for j, name in enumerate(names)]
    likeliest = [names[int(row.argmax())] if row.isfinite().all() else "" for row in table]
    return DataFrame({"prediction": likeliest, **dict(zip(names, map(_cells, table.T)))})


def _cells(column: Tensor) -> list[Any]:
    return [f"{value:.6g}" if isinstance(value, float) else value for value in column.tolist()]
