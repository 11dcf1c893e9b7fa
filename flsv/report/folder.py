"""The folder that a run writes to."""

from __future__ import annotations

import os
from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def leaves_files(trainer: L.Trainer) -> bool:
    """Whether a run may write into :func:`run_folder`. Not in a ``fast_dev_run``, which leaves no trace; nor where that
    is the working folder for want of another: neither a logger nor a ``default_root_dir`` is given.

    Example:
        >>> quiet = {"logger": False, "accelerator": "cpu", "enable_checkpointing": False}
        >>> leaves_files(L.Trainer(**quiet)), leaves_files(L.Trainer(default_root_dir="runs", **quiet))
        (False, True)
    """
    # What is given may be ".", but what Lightning takes in its place is a whole path.
    somewhere = bool(trainer.loggers) or trainer.default_root_dir != os.getcwd()
    return somewhere and not trainer.fast_dev_run  # type: ignore[attr-defined]


def run_folder(trainer: L.Trainer) -> Path:
    """The folder of this run's files: the one that Lightning's ``ModelCheckpoint`` puts its ``checkpoints`` into.

    ``trainer.log_dir`` is that too for TensorBoard and CSV loggers; of other loggers (MLflow, Weights & Biases) it is
    the folder of all their runs.
    """
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        return Path(logger.log_dir)
    version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
    return runs_folder(trainer) / version


def runs_folder(trainer: L.Trainer) -> Path:
    """The folder of the first logger's runs; without a logger, the root folder."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    return Path(logger.save_dir or trainer.default_root_dir) / str(logger.name)
