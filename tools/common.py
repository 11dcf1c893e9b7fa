"""What the runs behind the tables share."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch


def be_quiet() -> None:
    """For a worker process: one thread, and no word of Lightning's."""
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def quiet_trainer(
    folder: str, rounds: int, callbacks: Sequence[L.Callback], accelerator: str = "cpu", **arguments: Any
) -> L.Trainer:
    """A trainer that trains for so many rounds, and neither says, saves nor validates anything."""
    return L.Trainer(
        max_epochs=rounds,
        accelerator=accelerator,
        devices=1,
        callbacks=list(callbacks),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=folder,
        **arguments,
    )
