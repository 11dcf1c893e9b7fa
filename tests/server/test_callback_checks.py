"""Where callbacks that change optimizers stand in the trainer's list."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback

from flsv.loop import FederatedLoop
from flsv.server.callback_checks import check_callbacks


class Other(Callback):
    pass


def test_those_that_change_optimizers_come_right_after_the_loop_in_their_own_order() -> None:
    loop, first, last = FederatedLoop(), Other(), Other()
    thaws, freezes = BackboneFinetuning(), BaseFinetuning()
    trainer: Any = L.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu", enable_progress_bar=False)
    rest = list(trainer.callbacks)
    trainer.callbacks = [thaws, first, freezes, loop, last, *rest]
    check_callbacks(trainer, loop)
    assert trainer.callbacks == [first, loop, thaws, freezes, last, *rest]
