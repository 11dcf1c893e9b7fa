"""What tables of papers share."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch

# Studies import the package benchmark, which is beside their folder.
sys.path.append(str(Path(__file__).parents[1]))


def be_quiet() -> None:
    """For a process that measures: one thread, and no word of Lightning's."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")


def quiet_trainer(
    folder: str,
    rounds: int,
    callbacks: Sequence[L.Callback],
    accelerator: str = "cpu",
    **arguments: Any,
) -> L.Trainer:
    """A trainer that neither prints, saves nor validates."""
    options = {
        "logger": False,
        "enable_checkpointing": False,
        "limit_val_batches": 0,
        "devices": 1,
        **arguments,
    }
    return L.Trainer(
        max_epochs=rounds,
        accelerator=accelerator,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        **options,
    )


def grid(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its head first."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])
