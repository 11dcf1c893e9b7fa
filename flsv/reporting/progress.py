"""The round and the client being trained, on Lightning's own progress bar."""

from __future__ import annotations

from typing import Any

import lightning as L


class ProgressText:
    """Adds ``round`` and ``client`` to what the trainer's progress bar shows, whichever bar it is.

    Installed for the length of one fit; ``text`` is what is shown.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self.text: dict[str, str] = {}
        self._bar = trainer.progress_bar_callback
        if self._bar is not None:
            get_metrics = self._bar.get_metrics

            def with_text(trainer: L.Trainer, module: L.LightningModule) -> dict[str, Any]:
                shown = {k: v for k, v in get_metrics(trainer, module).items() if k != "v_num"}
                return {**(self.text if trainer.training else {}), **shown}

            self._bar.get_metrics = with_text  # type: ignore[method-assign, assignment]

    def remove(self) -> None:
        """Give the bar its own text back."""
        if self._bar is not None:
            self._bar.__dict__.pop("get_metrics", None)
