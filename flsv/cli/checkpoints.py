"""Callbacks that save checkpoints and predictions, and the search for ``--ckpt_path last`` and ``best``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
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


#: Function that reads a checkpoint.
Load = Callable[[Path], dict[str, Any]]


class BestCheckpoint(ModelCheckpoint):
    """Callback that saves ``best.ckpt`` after the round with the highest ``val_accuracy``, or lowest ``val_loss``."""

    def __init__(self) -> None:
        super().__init__(filename="best")

    @property
    def state_key(self) -> str:
        return "BestCheckpoint"  # Lightning's key contains the monitor, which is not known when a run is resumed

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._has_monitored_value(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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
        recorded_path = state_dict["best_model_path"]
        if not recorded_path:
            return

        best = _relocated(state_dict, state_dict["dirpath"], self._resumed_from)
        if not best.is_file():
            warnings.warn(
                f"{best} does not exist: best.ckpt is the best from here on.", stacklevel=2
            )
            return
        # A resumed run has a folder of its own, and the best checkpoint before it is still the best.
        score = state_dict["best_model_score"]
        relocated_state = {
            **state_dict,
            "dirpath": self.dirpath,
            "best_model_path": str(best),
            "kth_best_model_path": str(best),
            "best_k_models": {str(best): score},
        }
        super().load_state_dict(relocated_state)
        self.current_score = state_dict["current_score"]  # saved by Lightning, but not loaded


def default_checkpoints(callbacks: Sequence[L.Callback]) -> list[L.Callback]:
    """Return callbacks that save ``best.ckpt`` and ``last.ckpt``, unless a ``given`` callback saves checkpoints."""
    if any(isinstance(callback, Checkpoint) for callback in callbacks):
        return []
    return [BestCheckpoint(), ModelCheckpoint(filename="last", save_on_train_epoch_end=True)]


def find_checkpoint(
    kind: Literal["last", "best"],
    trainer: L.Trainer,
    weights_only: bool | None = None,
) -> Path:
    """Return the path of the newest run's last checkpoint (``"last"``), or of its best one (``"best"``)."""
    folders_of_callbacks = checkpoint_folders(trainer)
    paths: list[Path] = []
    for folder in [*_folders_of_runs(trainer), *folders_of_callbacks]:
        paths += folder.glob("*.ckpt")
    if not paths:
        searched_folders = [runs_folder(trainer), *folders_of_callbacks]
        places = " or ".join(str(folder.resolve()) for folder in searched_folders)
        raise ConfigurationError(
            f"--ckpt_path {kind}: no checkpoint below {places}. Name one, or leave ckpt_path out."
        )

    options: dict[str, Any] = {}
    if weights_only is not None:
        options["weights_only"] = weights_only

    def load(path: Path) -> dict[str, Any]:
        return DurableCheckpointIO().load_checkpoint(path, **options)

    newest = max(paths, key=_modified)
    last_path = _most_trained_of_run(newest, load)
    if kind == "last":
        return last_path
    return _best_of(load(last_path), last_path, load)


def _folders_of_runs(trainer: L.Trainer) -> list[Path]:
    """Return the folders ``checkpoints`` of earlier runs."""
    pattern = "*/checkpoints" if trainer.loggers else "checkpoints"
    return list(runs_folder(trainer).glob(pattern))


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns


def _most_trained_of_run(newest: Path, load: Load) -> Path:
    """Return the most trained one of the newest checkpoint and ``last*.ckpt`` beside it."""
    # Copying a folder changes the times of its files, so the progress that checkpoints record decides.
    candidates = {newest, *newest.parent.glob("last*.ckpt")}
    if len(candidates) == 1:
        return newest

    def progress(path: Path) -> tuple[int, int, int]:
        checkpoint = load(path)
        return checkpoint["epoch"], checkpoint["global_step"], _modified(path)

    return max(candidates, key=progress)


def _best_of(checkpoint: dict[str, Any], path: Path, load: Load) -> Path:
    """Return the best checkpoint of the run that saved ``checkpoint`` to ``path``."""
    callback_states = _callback_states(checkpoint)
    folders = {state["dirpath"] for state in callback_states}
    candidate_folders = list(filter(None, folders))
    reasons: dict[str, None] = {}  # an ordered set
    for state in callback_states:
        has_best = state["monitor"] and state["best_model_path"]
        if not has_best:
            continue
        for folder in candidate_folders:  # the best path may be below any of them
            best = _relocated(state, folder, path)
            if not best.is_file():
                reasons[f"{best} does not exist"] = None
            elif _is_same_best(load(best), checkpoint, state):
                return best
            else:
                reasons[f"{best} is of another run"] = None

    if reasons:
        raise ConfigurationError(
            f"--ckpt_path best: the best checkpoint of the run of {path} is not there: "
            f"{', and '.join(reasons)}. Name a checkpoint."
        )
    raise ConfigurationError(
        f"--ckpt_path best: the newest run, {path}, has no best checkpoint, which needs val_accuracy or "
        "val_loss to be logged, or a ModelCheckpoint with a monitor. Use last, or name a checkpoint."
    )


def _callback_states(checkpoint: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of the callbacks that save checkpoints."""
    states = checkpoint["callbacks"].values()
    return [state for state in states if isinstance(state, dict) and "best_model_path" in state]


def checkpoint_folders(trainer: L.Trainer) -> list[Path]:
    """Return the folders into which the trainer's callbacks save checkpoints."""
    return [
        Path(callback.dirpath)
        for callback in trainer.checkpoint_callbacks
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None
    ]


def _relocated(state: Mapping[str, Any], folder: str, checkpoint: Path) -> Path:
    """Return the best checkpoint's path, which was saved relative to ``folder``, where ``checkpoint`` lies now."""
    path_in_run = os.path.relpath(state["best_model_path"], folder)
    path = os.path.join(checkpoint.parent, path_in_run)
    return Path(os.path.normpath(path))


def _is_same_best(
    best_checkpoint: Mapping[str, Any],
    checkpoint: Mapping[str, Any],
    callback_state: Mapping[str, Any],
) -> bool:
    """Return whether both checkpoints are of one run and one best score."""
    scores = []
    for state_of_best in _callback_states(best_checkpoint):
        if state_of_best["monitor"] == callback_state["monitor"]:
            scores.append(state_of_best["best_model_score"])
    is_same_run = _federation_of(best_checkpoint) == _federation_of(checkpoint)
    return is_same_run and callback_state["best_model_score"] in scores


def _federation_of(checkpoint: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the seed and the identity of the federation that saved a checkpoint."""
    state = checkpoint["callbacks"].get("FederatedLoop", {})
    return state.get("seed"), state.get("identity")


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
        if not _are_rows_of_one_table(predictions):
            path = folder / "predictions.pt"
            with replacing(path) as file:
                torch.save(list(predictions), file)
            self.where = f"{display_path(path)} ({len(predictions)} batches, for torch.load)"
            return
        data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]  # set by Lightning's connectors
        outputs = torch.cat([batch.detach().cpu() for batch in predictions])
        frame = _columns_of_outputs(outputs, data)
        num_samples = len(frame)

        columns: dict[str, Any] = {"index": range(num_samples)}
        for name, texts in _row_names(trainer, data).items():
            columns[name] = list(texts)[:num_samples]
        path = folder / "predictions.csv"
        save_table(path, DataFrame(columns).join(frame))
        self.where = f"{display_path(path)} ({num_samples} samples)"


def _row_names(trainer: L.Trainer, data: FederatedDataModule) -> Mapping[str, Sequence[str]]:
    """Return the columns that name the predicted rows of a table, ``{column: texts}``, or no columns."""
    predicted_set: Any = getattr(trainer.predict_dataloaders, "dataset", None)
    for dataset in (predicted_set, data.test_set):
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
    columns: dict[str, Any] = {}
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
