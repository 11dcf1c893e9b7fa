"""The last line of a command: where the results are, and how to open them."""

from __future__ import annotations

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger

from flsv.cli.paths import shown
from flsv.report.folder import run_folder, runs_folder


def say_where(trainer: L.Trainer) -> None:
    """Print where a fit's files are, as they can be pasted into a shell."""
    folder = shown(run_folder(trainer))
    print(f"Results: {folder} (contributions.csv, checkpoints)")
    if any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers):
        print(f"Charts:  tensorboard --logdir {shown(runs_folder(trainer))}")
    print(f"Report:  flsv report {folder}")
