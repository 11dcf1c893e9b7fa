"""Where a run writes."""

from __future__ import annotations

from pathlib import Path

import lightning as L
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


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
