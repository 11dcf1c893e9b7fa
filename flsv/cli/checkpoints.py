"""Callbacks that save checkpoints and predictions, and the search for ``--ckpt_path last`` and ``best``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint, ModelCheckpoint
from pandas import DataFrame
from torch import Tensor

from flsv._lightning.round_boundary import DurableCheckpointIO
from flsv.data import FederatedDataModule
from flsv.results.folder import run_folder, runs_folder
from flsv.utilities.atomic_files import replacing
from flsv.utilities.csv_files import save_table
from flsv.utilities.display import display_path
from flsv.utilities.errors import ConfigurationError

#: Logged values that select the best model, in this order of preference, and the direction that is better.
MONITORS: dict[str, Literal["max", "min"]] = {"val_accuracy": "max", "val_loss": "min"}


class BestCheckpoint(ModelCheckpoint):
    """Callback that saves ``best.ckpt`` after the round with the highest ``val_accuracy``, or lowest ``val_loss``."""

    def __init__(self) -> None:
        super().__init__(filename="best")

    @property
    def state_key(self) -> str:
        return "BestCheckpoint"  # Lightning's key contains the monitor, which is not known when a run is resumed

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._judges(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._judges(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def _judges(self, trainer: L.Trainer) -> bool:
        """Return whether the monitored value is logged. The first call chooses which value is monitored."""
        if self.monitor is None:
            self.monitor = next(
                (name for name in MONITORS if name in trainer.callback_metrics), None
            )
            self.mode = MONITORS.get(str(self.monitor), "min")
        return self.monitor in trainer.callback_metrics

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor = state_dict["monitor"]
        self.mode = MONITORS.get(str(self.monitor), "min")
        best = state_dict["best_model_path"]
        if best and Path(best).is_file():
            # A resumed run has a folder of its own, and the best checkpoint before it is still the best.
            super().load_state_dict({**state_dict, "dirpath": self.dirpath})
            self.current_score = state_dict[
                "current_score"
            ]  # Lightning saves this value but does not load it
        elif best:
            warnings.warn(
                f"{best} no longer exists: best.ckpt is the best from here on.", stacklevel=2
            )


def default_checkpoints(given: Sequence[L.Callback]) -> list[L.Callback]:
    """Return callbacks that save ``best.ckpt`` and ``last.ckpt``, unless a ``given`` callback saves checkpoints."""
    if any(isinstance(callback, Checkpoint) for callback in given):
        return []
    return [BestCheckpoint(), ModelCheckpoint(filename="last", save_on_train_epoch_end=True)]


def find_checkpoint(
    word: Literal["last", "best"], trainer: L.Trainer, weights_only: bool | None = None
) -> Path:
    """Return the path of the newest checkpoint (``"last"``), or of its run's best one (``"best"``)."""
    runs = runs_folder(trainer)
    patterns = [(runs, "*/checkpoints/*.ckpt" if trainer.loggers else "checkpoints/*.ckpt")]
    patterns += [(folder, "*.ckpt") for folder in checkpoint_folders(trainer)]
    found = [path for folder, pattern in patterns for path in folder.glob(pattern)]
    if not found:
        where = " or ".join(str(folder.resolve()) for folder, _ in patterns)
        raise ConfigurationError(
            f"--ckpt_path {word}: no checkpoint below {where}. Name one, or leave ckpt_path out."
        )
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    if word == "last":
        return newest
    options = {} if weights_only is None else {"weights_only": weights_only}
    best = next(_best_paths(DurableCheckpointIO().load_checkpoint(newest, **options), newest), None)
    if best is None:
        raise ConfigurationError(
            f"--ckpt_path best: the newest run, {newest.parent}, has no best checkpoint, which needs val_accuracy or "
            "val_loss to be logged, or a ModelCheckpoint with a monitor. Use last, or name a checkpoint."
        )
    return best


def checkpoint_folders(trainer: L.Trainer) -> list[Path]:
    """Return the folders into which the trainer's callbacks save checkpoints."""
    own = (
        each.dirpath for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)
    )
    return [Path(folder) for folder in own if folder is not None]


def _best_paths(checkpoint: dict[str, Any], path: Path) -> Iterator[Path]:
    """Yield the existing files of the best checkpoint: at the path that ``checkpoint`` records, and beside ``path``."""
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, dict) and state.get("monitor") and state.get("best_model_path"):
            best = Path(state["best_model_path"])
            yield from (each for each in (best, path.with_name(best.name)) if each.is_file())


class WritePredictions(BasePredictionWriter):
    """Callback that writes ``predictions.csv`` into the run's folder, with one row per sample.

    For classes the columns are ``index``, ``prediction`` (the likeliest class) and one column per class with the output
    of ``predict_step``. For numbers they are ``index`` and ``prediction``, or ``output_0``, ``output_1``, ... Rows of a
    table also have their ``line``, their ``client`` and the columns that were excluded from training, such as ids. Any
    other output, such as texts or images, is written to ``predictions.pt`` batch by batch (for ``torch.load``).

    Attributes:
        where: text with the file and its number of rows, set by the prediction.
        folder: the folder to write into. None: the trainer's run folder.

    Raises:
        ConfigurationError: before the prediction: several processes run, and each would predict only a part.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")
        self.where = "nothing was predicted"
        self.folder: Path | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if trainer.world_size > 1:
            raise ConfigurationError(
                "predictions are written by one process: set --trainer.devices 1."
            )

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
            self.where = f"{display_path(path)} ({len(predictions)} batches, for torch.load)"
            return
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        frame = _predicted(torch.cat([batch.detach().cpu() for batch in predictions]), data)
        sets: list[Any] = [getattr(trainer.predict_dataloaders, "dataset", None), data.test_set]
        names: dict[str, Sequence[str]] = next(
            (each.row_names for each in sets if hasattr(each, "row_names")), {}
        )
        rows = {name: list(values)[: len(frame)] for name, values in names.items()}
        path = folder / "predictions.csv"
        save_table(path, DataFrame({"index": range(len(frame)), **rows}).join(frame))
        self.where = f"{display_path(path)} ({len(frame)} samples)"


def _predicted(table: Tensor, data: FederatedDataModule) -> DataFrame:
    """Convert the outputs of ``predict_step``, one row per sample, to the columns of ``predictions.csv``."""
    if table.ndim == 1 or table.shape[1] == 1:
        return DataFrame({"prediction": _cells(table.flatten())})
    classes = (
        table.is_floating_point() and data.no_classes is None and table.shape[1] == data.num_classes
    )
    if not classes:
        return DataFrame({f"output_{j}": _cells(column) for j, column in enumerate(table.T)})
    names = [str(name) for name in data.class_names or range(table.shape[1])]
    likeliest = [names[int(row.argmax())] if row.isfinite().all() else "" for row in table]
    return DataFrame({"prediction": likeliest, **dict(zip(names, map(_cells, table.T)))})


def _cells(column: Tensor) -> list[Any]:
    return [f"{value:.6g}" if isinstance(value, float) else value for value in column.tolist()]
