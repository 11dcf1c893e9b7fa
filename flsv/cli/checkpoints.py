"""Callbacks that save checkpoints and predictions, and the search for ``--ckpt_path last`` and ``best``."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Checkpoint, ModelCheckpoint
from pandas import DataFrame
from torch import Tensor

from flsv._lightning.data_source import data_of
from flsv.data import FederatedDataModule
from flsv.results.folder import run_folder, runs_folder
from flsv.utilities.atomic_files import replacing
from flsv.utilities.csv_files import save_table
from flsv.utilities.display import display_path
from flsv.utilities.errors import ConfigurationError

#: Logged values that select the best model, in this order of preference, and the direction that is better.
MONITORS: dict[str, Literal["max", "min"]] = {"val_accuracy": "max", "val_loss": "min"}
BEST_FILE = "best.ckpt"


class BestCheckpoint(ModelCheckpoint):
    """Callback that saves ``best.ckpt`` after the round with the highest ``val_accuracy``, or lowest ``val_loss``.

    A resumed run has a folder of its own, into which the best checkpoint before it is copied.
    """

    # Lightning's key contains the monitor, which is not known when a run is resumed.
    state_key = "BestCheckpoint"

    def __init__(self) -> None:
        super().__init__(filename=Path(BEST_FILE).stem)
        self._earlier_best: Path | None = None

    def on_validation_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
    ) -> None:
        if self._has_monitored_value(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
    ) -> None:
        if self._has_monitored_value(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def _has_monitored_value(self, trainer: L.Trainer) -> bool:
        """Return whether the monitored value is logged. The first call chooses which value is monitored."""
        if self.monitor is None:
            self._choose_monitor(trainer)
        return self.monitor in trainer.callback_metrics

    def _choose_monitor(self, trainer: L.Trainer) -> None:
        for name, mode in MONITORS.items():
            if name in trainer.callback_metrics:
                self.monitor = name
                self.mode = mode
                return
        self.mode = "min"

    def on_load_checkpoint(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        checkpoint: dict[str, Any],
    ) -> None:
        self._resumed_from = Path(str(trainer.ckpt_path))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor = state_dict["monitor"]
        self.mode = MONITORS.get(str(self.monitor), "min")
        if not state_dict["best_model_path"]:
            return
        earlier_best = self._resumed_from.with_name(BEST_FILE)
        if not earlier_best.is_file():
            warnings.warn(
                f"{earlier_best} does not exist, so best.ckpt will be the best model of the rounds from now on.",
                stacklevel=2,
            )
            return

        super().load_state_dict(self._relocated(state_dict))
        self.current_score = state_dict["current_score"]  # saved by Lightning, but not loaded
        self._earlier_best = earlier_best

    def _relocated(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of a callback that saves its best model into this one's folder."""
        best = os.path.join(str(self.dirpath), BEST_FILE)
        return {
            **state_dict,
            "dirpath": self.dirpath,
            "best_model_path": best,
            "kth_best_model_path": best,
            "best_k_models": {best: state_dict["best_model_score"]},
        }

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._earlier_best is None or not trainer.is_global_zero:
            return
        best = Path(self.best_model_path)
        if best.exists() and best.samefile(self._earlier_best):
            return
        best.parent.mkdir(parents=True, exist_ok=True)
        with self._earlier_best.open("rb") as earlier_file, replacing(best) as file:
            shutil.copyfileobj(earlier_file, file)


def default_checkpoints(callbacks: Sequence[L.Callback]) -> list[L.Callback]:
    """Return callbacks that save ``best.ckpt`` and ``last.ckpt``, or none if one of ``callbacks`` saves checkpoints."""
    if any(isinstance(callback, Checkpoint) for callback in callbacks):
        return []
    return [BestCheckpoint(), ModelCheckpoint(filename="last", save_on_train_epoch_end=True)]


def find_checkpoint(kind: Literal["last", "best"], trainer: L.Trainer) -> Path:
    """Return the path of the newest run's last checkpoint (``"last"``), or of ``best.ckpt`` beside it (``"best"``)."""
    last_path = _last_checkpoint(kind, trainer)
    if kind == "last":
        return last_path

    best_path = last_path.with_name(BEST_FILE)
    if not best_path.is_file():
        raise ConfigurationError(
            f"--ckpt_path best: there is no {best_path}, which a fit saves if val_accuracy or val_loss is logged and "
            "no callback of yours saves checkpoints. Use --ckpt_path last, or the path of a checkpoint."
        )
    return best_path


def _last_checkpoint(kind: str, trainer: L.Trainer) -> Path:
    """Return the last checkpoint of the newest run. The option ``kind`` of --ckpt_path is named in the error."""
    folders_of_callbacks = checkpoint_folders(trainer)
    paths: list[Path] = []
    for folder in [*_folders_of_runs(trainer), *folders_of_callbacks]:
        paths += folder.glob("*.ckpt")
    if not paths:
        searched_folders = [runs_folder(trainer), *folders_of_callbacks]
        places = " or ".join(str(folder.resolve()) for folder in searched_folders)
        raise ConfigurationError(
            f"--ckpt_path {kind}: there is no checkpoint below {places}. Give the path of one, or remove ckpt_path."
        )

    newest = max(paths, key=modified)
    # Copying a folder changes the times of its files, so the names decide.
    last_checkpoints = newest.parent.glob("last*.ckpt")
    return max(last_checkpoints, key=modified, default=newest)


def _folders_of_runs(trainer: L.Trainer) -> list[Path]:
    pattern = "*/checkpoints" if trainer.loggers else "checkpoints"
    return list(runs_folder(trainer).glob(pattern))


def modified(path: Path) -> int:
    """Return when a file was changed."""
    return path.stat().st_mtime_ns


def checkpoint_folders(trainer: L.Trainer) -> list[Path]:
    """Return the folders into which the trainer's callbacks save checkpoints."""
    return [
        Path(callback.dirpath)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
    ]


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
                "Predictions can only be written by one process. Set --trainer.devices 1."
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
        if not _are_rows_of_one_table(predictions):
            self._write_batches(folder / "predictions.pt", predictions)
            return
        data: FederatedDataModule = data_of(trainer)
        outputs = torch.cat([batch.detach().cpu() for batch in predictions])
        predictions_of_rows = _columns_of_outputs(outputs, data)
        num_samples = len(predictions_of_rows)

        names_of_rows: dict[str, Any] = {"index": range(num_samples)}
        for column, texts in _row_names(trainer, data).items():
            names_of_rows[column] = list(texts)[:num_samples]
        path = folder / "predictions.csv"
        save_table(path, DataFrame(names_of_rows).join(predictions_of_rows))
        self.where = f"{display_path(path)} ({num_samples} samples)"

    def _write_batches(self, path: Path, predictions: Sequence[Any]) -> None:
        with replacing(path) as file:
            torch.save(list(predictions), file)
        self.where = f"{display_path(path)} ({len(predictions)} batches, for torch.load)"


def _row_names(trainer: L.Trainer, data: FederatedDataModule) -> Mapping[str, Sequence[str]]:
    """Return the columns that name the predicted rows of a table, ``{column: texts}``, or no columns."""
    predicted_set = getattr(trainer.predict_dataloaders, "dataset", None)
    datasets: tuple[Any, ...] = (predicted_set, data.division.source.test)
    for dataset in datasets:
        if hasattr(dataset, "row_names"):
            return dataset.row_names
    return {}


def _are_rows_of_one_table(batches: Sequence[Any]) -> bool:
    shapes = set()
    for batch in batches:
        if not isinstance(batch, Tensor) or batch.ndim not in (1, 2):
            return False
        shapes.add(batch.shape[1:])
    return len(shapes) == 1


def _columns_of_outputs(outputs: Tensor, data: FederatedDataModule) -> DataFrame:
    """Convert the outputs of ``predict_step``, one row per sample, to the columns of ``predictions.csv``."""
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        return DataFrame({"prediction": _cells(outputs.flatten())})
    num_columns = outputs.shape[1]
    has_classes = data.no_classes is None and num_columns == data.num_classes
    columns = {}
    if outputs.is_floating_point() and has_classes:
        names = [str(name) for name in data.class_names or range(num_columns)]
        columns["prediction"] = _likeliest_classes(outputs, names)
    else:
        names = [f"output_{position}" for position in range(num_columns)]
    for name, column in zip(names, outputs.T):
        columns[name] = _cells(column)
    return DataFrame(columns)


def _likeliest_classes(outputs: Tensor, names: Sequence[str]) -> list[str]:
    """Return the name of each row's likeliest class, or "" if an output is not finite."""
    predictions = []
    for row in outputs:
        if row.isfinite().all():
            likeliest_class = int(row.argmax())
            predictions.append(names[likeliest_class])
        else:
            predictions.append("")
    return predictions


def _cells(column: Tensor) -> list[Any]:
    return [f"{value:.6g}" if isinstance(value, float) else value for value in column.tolist()]
