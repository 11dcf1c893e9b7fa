"""Callbacks of users' own, as a configuration names them."""

from pathlib import Path

import lightning as L


class WithoutArguments(L.Callback):
    """Does nothing, and has no arguments."""


class WritesBesideItsLog(L.Callback):
    """Writes a file into the folder of its logger after each round."""

    def on_train_epoch_end(self, trainer, pl_module):
        folder = Path(trainer.log_dir, "own")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{trainer.current_epoch}.txt").write_text("")
