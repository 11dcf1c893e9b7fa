"""What the runs behind the tables share."""

from __future__ import annotations

import importlib
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flsv import FederatedLoop
from flsv.charts import PALETTE


def be_quiet() -> None:
    """For a worker process: one thread, and no word of Lightning's."""
    torch.set_num_threads(1)
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
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


class Timed(FederatedLoop):
    """Processor seconds from the end of a round to that of the next."""

    def on_train_start(self, *hook: Any) -> None:
        super().on_train_start(*hook)
        self.seconds: list[float] = []
        self.start = time.process_time()

    def on_train_epoch_end(self, *hook: Any) -> None:
        super().on_train_epoch_end(*hook)
        now = time.process_time()
        self.seconds.append(now - self.start)
        self.start = now


def round_times(loop: Timed, module: L.LightningModule, data: L.LightningDataModule, rounds: int) -> list[float]:
    """Of so many rounds after a first one that does not count; Lightning validates where there is a validation set."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            max_epochs=rounds + 1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
            callbacks=[loop],
        )
        trainer.fit(module, data)
    return loop.seconds[1:]


def build(spec: dict[str, Any], **more: Any) -> Any:
    """The object that a configuration file's ``class_path`` and ``init_args`` mean; ``more`` overrides arguments."""
    module, _, name = spec["class_path"].rpartition(".")
    return getattr(importlib.import_module(module), name)(**{**spec["init_args"], **more})


def grid(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its head first."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Mean and standard deviation; NaN is left out, and "-" stands for nothing."""
    known = [value for value in values if value == value]
    if not known:
        return "-"
    deviation = statistics.stdev(known) if len(known) > 1 else 0.0
    return f"{statistics.mean(known):.{digits}f} ± {deviation:.{digits}f}"


def panels(figure: Figure, rows: int, columns: int, **more: Any) -> list[Axes]:
    """A figure's panels, row by row, whose lines and bars have colors that the color-blind can tell apart."""
    axes = list(figure.subplots(rows, columns, squeeze=False, **more).flat)
    for ax in axes:
        ax.set_prop_cycle(color=PALETTE)
    return axes
