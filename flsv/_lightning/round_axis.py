"""The round as the x-axis of what Lightning logs once an epoch.

Lightning plots epoch-level values over the number of batches so far, unless a module logs a value named ``step``. That
name, however, is also what checkpoints are named by, so the round is handed to the loggers directly. What is logged per
batch stays over batches, and a module that logs its own ``step`` keeps it.
"""

from __future__ import annotations

from typing import Any

import lightning as L


def round_axis(trainer: L.Trainer) -> tuple[Any, str, Any]:
    """The attribute to patch, see :class:`flsv._lightning.patches.PatchedAttributes`."""
    connector = trainer._logger_connector
    log_metrics = connector.log_metrics

    def with_round(metrics: dict[str, Any], step: int | None = None) -> None:
        # Between two batches it is a bool.
        epoch_level = step is None and connector._first_loop_iter is None
        if not epoch_level or "step" in metrics:
            log_metrics(metrics, step=step)
            return
        log_metrics(metrics, step=trainer.current_epoch)
        if not metrics:  # Lightning saves nothing then, and a killed run would lose the round's own curves
            for logger in trainer.loggers:
                logger.save()

    return connector, "log_metrics", with_round
