"""Weight averages between two rounds, and checkpoint files that are written completely or not at all.

``WeightAveraging`` and ``EMAWeightAveraging`` update their average after every batch, which here is in the middle of a
client's training, and after the epoch, which is later than some checkpoints of that epoch. During a federated fit the
average is updated with the new global model instead, before any callback reads it, in each round in which Lightning
would have updated it at a step of the round or at its end. So the callback's arguments (``update_starting_at_step``,
``should_update``) keep their meaning, but a ``decay`` is applied once per round. Validation, checkpoints and the end of
training use the average as the callback defines it.
"""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from flsv._lightning.patches import Patch, PatchedAttributes, callbacks_of, do_nothing
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError

try:
    from lightning.pytorch.callbacks.weight_averaging import WeightAveraging as WeightAveraging
except ImportError:  # before Lightning 2.6

    class WeightAveraging(L.Callback):  # type: ignore[no-redef]  # stands in for the missing import
        """Placeholder for Lightning's class of this name, which is missing in older versions."""


def averaging_callback(callbacks: Iterable[L.Callback]) -> Any:
    """Return the callback that averages weights, or None."""
    for callback in callbacks:
        if isinstance(callback, WeightAveraging):
            return callback
    return None


@contextmanager
def averaged_weights(trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
    """Put averaged weights into the module, as before a validation, if a callback averages them."""
    callback = averaging_callback(callbacks_of(trainer))
    if callback is None:
        yield
        return
    callback.on_validation_epoch_start(trainer, module)
    try:
        yield
    finally:
        callback.on_validation_epoch_end(trainer, module)


#: Methods of the callback that are replaced during a fit. A subclass must not override them.
REPLACED_METHODS = ("on_train_batch_end", "on_train_epoch_end")


class RoundAverage:
    """Wrapper of a weight-averaging callback that updates the average at the ends of rounds."""

    def __init__(self, callbacks: Iterable[L.Callback] = ()) -> None:
        callback = averaging_callback(callbacks)
        self._callback = callback
        self._is_due = False
        self._step_at_start = 0
        self._is_swapped = False  # whether the module holds the average now
        self.last_state: dict[str, Tensor] | None = None
        self.patches: list[Patch] = []
        if callback is None:
            return

        # The callback's own methods, which the patches below replace.
        self._original_swap = callback._swap_models
        self._original_train_end = callback.on_train_end
        self._original_batch_end = callback.on_train_batch_end  # updates the average
        self.patches = [
            (callback, "on_train_batch_end", self._end_batch_of_callback),
            (callback, "on_train_epoch_end", do_nothing),
            (callback, "_swap_models", self._swap_models),
            (callback, "on_train_end", self._end_training_of_callback),
        ]
        rank_zero_info(
            f"flsv: {type(callback).__name__} averages global models, so its decay applies once per round."
        )

    def begin_round(self, trainer: L.Trainer) -> None:
        self._is_due = False
        self._step_at_start = trainer.global_step

    def end_batch(self, trainer: L.Trainer) -> None:
        """Record whether the callback would update its average after this batch."""
        callback = self._callback
        if callback is None or self._is_due:
            return
        if trainer.global_step > self._step_at_start:
            self._is_due = callback.should_update(step_idx=trainer.global_step - 1)

    def end_round(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Update the average if an update is due."""
        callback = self._callback
        if callback is None:
            return
        is_due = self._is_due or callback.should_update(epoch_idx=trainer.current_epoch)
        if not is_due:
            return

        # The callback would call should_update again.
        with PatchedAttributes([(callback, "should_update", lambda **_: True)]):
            # The callback updates only after its latest step, which may belong to another fit.
            callback.load_state_dict({"latest_update_step": -1})
            # The callback does not read outputs, batch and index.
            self._original_batch_end(trainer, module, outputs=None, batch=None, batch_idx=0)

    def restore(self, module: L.LightningModule) -> None:
        """Restore the module's global model if a failed validation has left the average in it."""
        if self._is_swapped:
            self._swap_models(module)

    @contextmanager
    def averaged_weights(self, trainer: L.Trainer, module: L.LightningModule) -> Iterator[None]:
        """Put the averaged weights into the module within the context, unless a validation has done so."""
        if self._is_swapped:
            yield
            return
        with averaged_weights(trainer, module):
            yield

    def put_last_model(self, checkpoint: dict[str, Any]) -> None:
        """Put the last global model into a checkpoint, since the module holds the average."""
        if self.last_state is None:
            return
        if "current_model_state" in checkpoint:  # "state_dict" is then the averaged model
            checkpoint["current_model_state"] = self.last_state
        else:
            checkpoint["state_dict"] = self.last_state

    def _end_batch_of_callback(self, trainer: L.Trainer, *_: Any) -> None:
        self.end_batch(trainer)

    def _swap_models(self, module: L.LightningModule) -> None:
        self._original_swap(module)
        self._is_swapped = not self._is_swapped

    def _end_training_of_callback(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.last_state = copy.deepcopy(module.state_dict())
        self._original_train_end(trainer, module)


Check = Callable[[dict[str, Any], Any], None]
#: Key in a checkpoint of the reason why it must not be written.
_REFUSAL_KEY = "flsv_refused"


class DurableCheckpointIO(TorchCheckpointIO):
    """Checkpoint plugin that writes files completely or not at all, and checks the checkpoints that it reads."""

    def __init__(self, check: Check | None = None) -> None:
        self.check = check

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None
    ) -> None:
        """Write a new file beside ``path``, flush it to the disk, and rename it to ``path``."""
        reason = checkpoint.get(_REFUSAL_KEY)
        if reason:
            rank_zero_warn(f"{path} is not saved: {reason}")
            return
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return

        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The checkpoint is serialized in memory first, since on a full disk torch.save raises a misleading error.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with replacing(target) as file:
            file.write(buffer.getbuffer())

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            _check_sums(path)
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        except FileNotFoundError:
            raise ConfigurationError(
                f"the checkpoint {path} does not exist. Name an existing file, or remove ckpt_path."
            ) from None
        except Exception as error:
            raise ConfigurationError(
                f"{path} cannot be read as a checkpoint: {_why(path, error)}"
            ) from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ConfigurationError(
                f"{path} is not a checkpoint of a Trainer, since it has no state_dict. Name a checkpoint."
            )
        if self.check is not None:
            self.check(checkpoint, path)
        return checkpoint


def install_checkpoint_io(trainer: L.Trainer, check: Check) -> None:
    """Replace Lightning's default checkpoint plugin by one that calls ``check`` on checkpoints that it reads. A plugin
    of the user is not replaced."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) in (TorchCheckpointIO, DurableCheckpointIO):
        strategy.checkpoint_io = DurableCheckpointIO(check)


def mark_as_refused(trainer: L.Trainer, checkpoint: dict[str, Any], failed_round: str) -> None:
    """Mark a checkpoint as invalid, since ``failed_round`` has failed. A warning is then shown instead of writing
    it."""
    reason = (
        f"{failed_round} has failed at the server, and metrics that have been updated by it would be updated twice in "
        "a resumed run. Resume from an earlier checkpoint."
    )
    if not isinstance(trainer.strategy.checkpoint_io, DurableCheckpointIO):
        raise ConfigurationError(f"no checkpoint is saved: {reason}")
    checkpoint[_REFUSAL_KEY] = reason


def _check_sums(path: Any) -> None:
    """Raise BadZipFile if a checksum in a file does not match. Torch does not check it."""
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        broken_member = archive.testzip()
    if broken_member:
        raise zipfile.BadZipFile(broken_member)


def _why(path: Any, error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
        return (
            "it holds objects that may run any code when they are loaded. If you trust its author, set "
            "weights_only=False."
        )
    return f"it is damaged or not a checkpoint ({type(error).__name__}). Name another file."
