"""Lightning's placeholder in TensorBoard's table of runs."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.loggers import TensorBoardLogger


def no_placeholder(trainer: L.Trainer) -> list[tuple[Any, str, Any]]:
    """Attributes to be set for the length of a fit: owner, name, value.

    Lightning hands a module's and a data module's hyper-parameters to TensorBoard as soon as a fit begins, all of
    them, with ``hp_metric = -1`` as the only result; and TensorBoard keeps the first table that it is given. Without
    the placeholder they go to ``hparams.yaml`` only.
    """
    return [(x, "_default_hp_metric", False) for x in trainer.loggers if isinstance(x, TensorBoardLogger)]
