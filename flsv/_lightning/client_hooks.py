"""A module's own hooks, which belong to the client that trains.

An epoch is the whole cohort to Lightning. But a module that counts its batches (a step after every fourth, the
generator in every fifth) counts those of the client, and what it does when a batch has ended (a target network follows)
it does to the client's model before that leaves. Callbacks get Lightning's own numbers: progress bars count the cohort.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden


class ClientHooks:
    """Installed on a trainer's module for the length of one fit.

    Args:
        trainer: with its module.
        batch_idx: the place of the current batch among the client's.
    """

    def __init__(self, trainer: L.Trainer, batch_idx: Callable[[], int]) -> None:
        self._module = module = trainer.lightning_module
        self._batch_idx = batch_idx
        self._end: Callable[[Any, Any, int], Any] | None = None
        loop: Any = trainer.fit_loop.epoch_loop
        build = loop._build_kwargs
        self._before: list[tuple[Any, str, Any]] = []
        # There is no public place to say which number training_step gets.
        self._install(loop, "_build_kwargs", lambda kwargs, batch, _: build(kwargs, batch, batch_idx()))
        for name in ("on_train_batch_start", "optimizer_step"):
            if is_overridden(name, module, L.LightningModule):
                self._install(module, name, partial(self._count, getattr(module, name)))
        if is_overridden("on_train_batch_end", module, L.LightningModule):
            self._end = module.on_train_batch_end
            # Lightning calls it after the callbacks', and so after the client has left.
            self._install(module, "on_train_batch_end", lambda *_: None)

    def end_batch(self, outputs: Any, batch: Any) -> None:
        """The module's ``on_train_batch_end``."""
        if self._end is not None:
            self._end(outputs, batch, self._batch_idx())

    def remove(self) -> None:
        """Give the module its own hooks back."""
        for owner, name, before in self._before:
            if before is None:
                # Not put back: a bound method left on a module would follow into its copies.
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before
        self._before = []

    def _count(self, hook: Callable[..., Any], first: Any, _: int, *rest: Any) -> Any:
        return hook(first, self._batch_idx(), *rest)

    def _install(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self._before.append((owner, name, owner.__dict__.get(name)))
        owner.__dict__[name] = function
