"""``--ckpt_path last`` and ``best``: what ``flsv fit`` saves by default, where the four subcommands find it, and what
``flsv predict`` writes."""

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
from flsv.utilities.display import shown
from flsv.utilities.errors import ConfigurationError

#: What the best model is judged by, in this order, and which way is better.
MONITORS: dict[str, Literal["max", "min"]] = {"val_accuracy": "max", "val_loss": "min"}


class BestCheckpoint(ModelCheckpoint):
    """Callback that saves ``best.ckpt``: the round with the highest ``val_accuracy``, else the lowest ``val_loss``."""

    def __init__(self) -> None:
        super().__init__(filename="best")

    @property
    def state_key(self) -> str:
        return "BestCheckpoint"  # Lightning's has the monitor in it, which is not known when a run is resumed

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._judges(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._judges(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def _judges(self, trainer: L.Trainer) -> bool:
        """Return whether there is a score to judge rounds by, which is known after the first validation."""
        if self.monitor is None:
            self.monitor = next((name for name in MONITORS if name in trainer.callback_metrics), None)
            self.mode = MONITORS.get(str(self.monitor), "min")
        return self.monitor in trainer.callback_metrics

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.monitor = state_dict["monitor"]
        self.mode = MONITORS.get(str(self.monitor), "min")
        best = state_dict["best_model_path"]
        if best and Path(best).is_file():
            # A resumed run has a folder of its own, and what was best before it still is.
            super().load_state_dict({**state_dict, "dirpath": self.dirpath})
            self.current_score = state_dict["current_score"]  # Lightning saves it, and does not load it
        elif best:
            warnings.warn(f"{best} no longer exists: best.ckpt is the best from here on.", stacklevel=2)


def default_checkpoints(given: Sequence[L.Callback]) -> list[L.Callback]:
    """Make the callbacks that save ``best.ckpt`` and ``last.ckpt``; none where those ``given`` save checkpoints."""
    if any(isinstance(callback, Checkpoint) for callback in given):
        return []
    return [BestCheckpoint(), ModelCheckpoint(filename="last", save_on_train_epoch_end=True)]


def find_checkpoint(word: Literal["last", "best"], trainer: L.Trainer, weights_only: bool | None = None) -> Path:
    """Find the newest checkpoint, or the best of the run that it is of.

    Looked for where this trainer's runs lie: in the folders of its first logger (``checkpoints`` below the root folder
    without a logger), and where a ``ModelCheckpoint`` of its own writes.

    Args:
        word: ``"last"`` or ``"best"``.
        trainer: the command's trainer.
        weights_only: as in ``torch.load``.

    Raises:
        ConfigurationError: there is none; the newest cannot be read, which says what was the best.
    """
    runs = runs_folder(trainer)
    patterns = [(runs, "*/checkpoints/*.ckpt" if trainer.loggers else "checkpoints/*.ckpt")]
    patterns += [(Path(own.dirpath), "*.ckpt") for own in _model_checkpoints(trainer) if own.dirpath is not None]
    found = [path for folder, pattern in patterns for path in folder.glob(pattern)]
    if not found:
        where = " or ".join(str(folder.resolve()) for folder, _ in patterns)
        raise ConfigurationError(f"--ckpt_path {word}: no checkpoint below {where}. Name one, or leave ckpt_path out.")
    newest = max(found, key=lambda path: path.stat().st_mtime_ns)
    if word == "last":
        return newest
    options = {} if weights_only is None else {"weights_only": weights_only}
    best = next(_best_paths(DurableCheckpointIO().load_checkpoint(newest, **options), newest), None)
    if best is None:
        raise ConfigurationError(
            f"--ckpt_path best: the newest run, {newest.parent}, has no best checkpoint, which needs val_accuracy or "
            "val_loss to be logged, or a ModelCheckpoint with a monitor. Say last, or name a checkpoint."
        )
    return best


def has_saved(trainer: L.Trainer) -> bool:
    """Return whether there is a checkpoint where this trainer saves its own, for ``--ckpt_path last``."""
    return any(each.dirpath and any(Path(each.dirpath).glob("*.ckpt")) for each in _model_checkpoints(trainer))


def _model_checkpoints(trainer: L.Trainer) -> list[ModelCheckpoint]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]


def _best_paths(checkpoint: dict[str, Any], path: Path) -> Iterator[Path]:
    """Yield where the best checkpoint of a checkpoint's run may be: where it lay, and beside ``path`` if it moved."""
    for state in checkpoint.get("callbacks", {}).values():
        if isinstance(state, dict) and state.get("monitor") and state.get("best_model_path"):
            best = Path(state["best_model_path"])
            yield from (each for each in (best, path.with_name(best.name)) if each.is_file())


class WritePredictions(BasePredictionWriter):
    """Callback that writes ``predictions.csv`` into the folder of the checkpoint's run: a row per sample, in their
    order.

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
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        frame = _predicted(torch.cat([batch.detach().cpu() for batch in predictions]), data)
        sets: list[Any] = [getattr(trainer.predict_dataloaders, "dataset", None), data.test_set]
        names: dict[str, Sequence[str]] = next((each.row_names for each in sets if hasattr(each, "row_names")), {})
        rows = {name: list(values)[: len(frame)] for name, values in names.items()}
        path = folder / "predictions.csv"
        save_table(path, DataFrame({"index": range(len(frame)), **rows}).join(frame))
        self.where = f"{shown(path)} ({len(frame)} samples)"


def _predicted(table: Tensor, data: FederatedDataModule) -> DataFrame:
    """Return a column per output; of classes, the likeliest and a column for each."""
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
