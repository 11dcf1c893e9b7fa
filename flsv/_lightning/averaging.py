"""Lets Lightning's ``WeightAveraging`` average the global models, once a round.

``WeightAveraging`` and ``EMAWeightAveraging`` update their average after every batch, which here is in the middle of a
client's training, and after the epoch, which is later than some checkpoints of that epoch. For the length of a fit the
average is updated once a round, with the new global model and before anything sees it: whenever Lightning would have
updated it at one of the round's steps or at its end. So the callback's own numbers (``update_starting_at_step``,
``should_update``) mean what they say, while a ``decay`` counts rounds. Validation, checkpoints and the end of training
are the callback's own, and see the average.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch import Tensor

try:
    from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
except ImportError:  # before Lightning 2.6

    class WeightAveraging(L.Callback):  # type: ignore[no-redef]
        """None is ever made."""


#: What is replaced for the length of a fit: a class that has its own could not be right.
REPLACED = ("on_train_batch_end", "on_train_epoch_end")


class RoundAverage:
    """A trainer's weight averaging callback, where it has one.

    Args:
        callbacks: the trainer's.
        rounds: its ``max_epochs``.

    Attributes:
        changes: attributes to patch, see :class:`flsv._lightning.patches.PatchedAttributes`.
        last: the module's ``state_dict`` before the average took its place at the end of training; None until then.
    """

    def __init__(self, callbacks: Iterable[L.Callback] = (), rounds: int | None = None) -> None:
        self._callback: Any = next((c for c in callbacks if isinstance(c, WeightAveraging)), None)
        callback = self._callback
        self._due = self._swapped = False
        self.last: dict[str, Tensor] | None = None
        self.changes: list[tuple[Any, str, Any]] = []
        if callback is not None:
            self._swap, self._end = callback._swap_models, callback.on_train_end
            self.changes = [(callback, name, _nothing) for name in REPLACED]
            self.changes += [(callback, "_swap_models", self._swap_models), (callback, "on_train_end", self._train_end)]
            _warn_of_the_first_model(callback, rounds)

    def begin_round(self) -> None:
        """Nothing is due yet."""
        self._due = False

    def end_batch(self, trainer: L.Trainer) -> None:
        """After every batch: an update that is due now is due at the round's end."""
        callback = self._callback
        if callback is not None and not self._due and trainer.global_step > callback._latest_update_step:
            self._due = callback.should_update(step_idx=trainer.global_step - 1)

    def end_round(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """The module holds the new global model."""
        callback = self._callback
        if callback is not None and (self._due or callback.should_update(epoch_idx=trainer.current_epoch)):
            callback._average_model.update_parameters(module)
            callback._latest_update_step = trainer.global_step
            callback._latest_update_epoch = trainer.current_epoch

    def give_back(self, module: L.LightningModule) -> None:
        """After an exception: one in the middle of validation has left the average in the module."""
        if self._swapped:
            self._swap_models(module)

    def place_last(self, checkpoint: dict[str, Any]) -> None:
        """A checkpoint saved after training: the module holds the average, and what can be resumed is the last global
        model. The callback may have put its average into the checkpoint already, or be about to."""
        if self.last is not None:
            checkpoint["current_model_state" if "current_model_state" in checkpoint else "state_dict"] = self.last

    def _swap_models(self, module: L.LightningModule) -> None:
        self._swap(module)
        self._swapped = not self._swapped

    def _train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.last = {name: value.clone() for name, value in module.state_dict().items()}
        self._end(trainer, module)


def _nothing(*_: Any) -> None:
    pass


def _warn_of_the_first_model(callback: Any, rounds: int | None) -> None:
    """A decay that is meant for thousands of batches never gets away from the first of a few rounds' models."""
    average, several = callback._kwargs.get("avg_fn"), callback._kwargs.get("multi_avg_fn")
    # torch's own can be tried out; a user's might count how often it is called.
    if getattr(average or several, "__module__", None) != "torch.optim.swa_utils" or not rounds or rounds < 2:
        return
    share, later = torch.ones(1), torch.zeros(1)
    for count in range(1, rounds):
        if average is not None:
            share = average(share, later, torch.tensor(count))
        else:
            several([share], [later], torch.tensor(count))
    if share > 0.5:
        warnings.warn(
            f"{type(callback).__name__} averages the global models, once a round: after {rounds} rounds the first "
            f"round's model still has {share.item():.0%} of the average. Its decay counts rounds here: lower it, such "
            "as decay=0.9.",
            stacklevel=2,
        )
