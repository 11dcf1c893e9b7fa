"""Checkpoints and averages that always stand between two rounds, and are written whole.

Lightning may save at any batch: every n steps, on an exception, on Ctrl-C. What such a checkpoint would hold, one
client's half-trained weights in the middle of an epoch, nobody can go on from. So a checkpoint saved within a round
holds the global model and is turned into that of the round's start, and one saved after aggregation but before
Lightning has closed the epoch (at the end of validation, for example) into that of the epoch's end.

``WeightAveraging`` and ``EMAWeightAveraging`` update their average after every batch, which here is in the middle of a
client's training, and after the epoch, which is later than some checkpoints of that epoch. For the length of a fit the
average is updated once a round, with the new global model and before anything sees it: whenever Lightning would have
updated it at one of the round's steps or at its end. So the callback's own numbers (``update_starting_at_step``,
``should_update``) mean what they say, while a ``decay`` counts rounds. Validation, checkpoints and the end of training
are the callback's own, and see the average.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from flsv._lightning.patches import callbacks_of
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError


class RoundBoundary:
    """Lightning's own progress at the last boundary between two rounds, remembered."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self.remember()

    def remember(self) -> None:
        """Remember Lightning's progress: the trainer now stands between two rounds."""
        self._loop = deepcopy(self._trainer.fit_loop.state_dict())
        self._counts = {"epoch": self._trainer.current_epoch, "global_step": self._trainer.global_step}

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Turn a checkpoint saved within a round into that of the round's start; :func:`global_weights` are in it."""
        checkpoint.update(self._counts)
        checkpoint["loops"]["fit_loop"] = deepcopy(self._loop)

    def close_epoch(self, checkpoint: dict[str, Any]) -> None:
        """Turn a checkpoint saved after aggregation into that of the epoch's end."""
        loop = checkpoint["loops"]["fit_loop"] = deepcopy(checkpoint["loops"]["fit_loop"])
        for part in ("total", "current"):
            epochs, batches = loop["epoch_progress"][part], loop["epoch_loop.batch_progress"][part]
            epochs["started"] = epochs["processed"] = epochs["ready"]
            batches["started"] = batches["processed"] = batches["completed"] = batches["ready"]


def global_weights(trainer: L.Trainer, within: Callable[[], dict[str, Tensor] | None]) -> tuple[Any, str, Any]:
    """Return the attribute to patch (:class:`flsv._lightning.patches.PatchedAttributes`) so that whatever saves the
    module saves the global model: other callbacks, in any order, and checkpoints of weights only, for which no callback
    is asked.

    Args:
        trainer: whose module it is.
        within: the global model's ``state_dict`` while the module is a client; else None.
    """
    plain = trainer.strategy.lightning_module_state_dict

    def weights() -> dict[str, Any]:
        found = within()
        return plain() if found is None else found

    return trainer.strategy, "lightning_module_state_dict", weights


_BatchNorm = nn.modules.batchnorm._BatchNorm


class FinetuningState:
    """The state of a trainer's finetuning callbacks at the last boundary between two rounds.

    ``BaseFinetuning`` and its kind change the optimizer and their own state when an epoch begins: a checkpoint saved
    within the round would hold that, and the resumed round would do it twice. And on resume Lightning freezes
    everything anew, but thaws nothing that had been finetuned before. So here is what stood at the round's beginning,
    and which parameters were trained.

    Args:
        trainer: with its optimizers set up; None, or one without such callbacks: nothing is done.
    """

    def __init__(self, trainer: L.Trainer | None = None) -> None:
        callbacks = [] if trainer is None else callbacks_of(trainer)
        self._trainer = trainer
        self._callbacks = [callback for callback in callbacks if isinstance(callback, BaseFinetuning)]
        self._trained: dict[str, list[str]] | None = None

    def begin_round(self) -> None:
        """Remember the callbacks' state before they begin the epoch."""
        if self._trainer is not None and self._callbacks:
            self._states = {callback.state_key: deepcopy(callback.state_dict()) for callback in self._callbacks}
            groups = [optimizer.state_dict()["param_groups"] for optimizer in self._trainer.optimizers]
            self._optimizers = [{"state": {}, "param_groups": deepcopy(each)} for each in groups]
            self._trained = _trained(self._trainer.lightning_module)

    def state(self, within_round: bool) -> dict[str, list[str]] | None:
        """Return the names of the trained parameters, to be saved; within a round, of those trained before it."""
        if self._trainer is None or not self._callbacks:
            return None
        return self._trained if within_round else _trained(self._trainer.lightning_module)

    def restore(self, module: L.LightningModule, state: dict[str, list[str]] | None) -> None:
        """Train what was trained when ``state`` was saved, and nothing else."""
        if state is None or not self._callbacks:
            return
        for name, parameter in module.named_parameters():
            parameter.requires_grad = name in state["parameters"]
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm):
                layer.track_running_stats = name in state["tracking"]

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Turn a checkpoint saved within a round into that of the round's start."""
        if self._callbacks:
            checkpoint["callbacks"].update(self._states)
            checkpoint["optimizer_states"] = self._optimizers


def _trained(module: L.LightningModule) -> dict[str, list[str]]:
    return {
        "parameters": [name for name, parameter in module.named_parameters() if parameter.requires_grad],
        "tracking": [
            name
            for name, layer in module.named_modules()
            if isinstance(layer, _BatchNorm) and layer.track_running_stats
        ],
    }


try:
    from lightning.pytorch.callbacks.weight_averaging import WeightAveraging
except ImportError:  # before Lightning 2.6

    class WeightAveraging(L.Callback):  # type: ignore[no-redef]  # stands in for the missing import
        """None is ever made."""


#: What is replaced for the length of a fit: a class that has its own could not be right.
REPLACED = ("on_train_batch_end", "on_train_epoch_end")


class RoundAverage:
    """The weight averaging callback of a trainer, where it has one.

    Args:
        callbacks: the trainer's.

    Attributes:
        changes: attributes to patch, see :class:`flsv._lightning.patches.PatchedAttributes`.
        last: the module's ``state_dict`` before the average took its place at the end of training; None until then.
    """

    def __init__(self, callbacks: Iterable[L.Callback] = ()) -> None:
        self._callback: Any = next((c for c in callbacks if isinstance(c, WeightAveraging)), None)
        callback = self._callback
        self._due = self._swapped = False
        self.last: dict[str, Tensor] | None = None
        self.changes: list[tuple[Any, str, Any]] = []
        if callback is not None:
            self._swap, self._end = callback._swap_models, callback.on_train_end
            self.changes = [(callback, name, _nothing) for name in REPLACED]
            self.changes += [(callback, "_swap_models", self._swap_models), (callback, "on_train_end", self._train_end)]
            rank_zero_info(f"flsv: {type(callback).__name__} averages global models: a decay of it counts rounds.")

    def begin_round(self) -> None:
        """Forget updates of the average that were due in the round before."""
        self._due = False

    def end_batch(self, trainer: L.Trainer) -> None:
        """Note after a batch whether the callback would update its average now: then it does so at the round's end."""
        callback = self._callback
        if callback is not None and not self._due and trainer.global_step > callback._latest_update_step:
            self._due = callback.should_update(step_idx=trainer.global_step - 1)

    def end_round(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Update the average, if that is due; the module holds the new global model."""
        callback = self._callback
        if callback is not None and (self._due or callback.should_update(epoch_idx=trainer.current_epoch)):
            callback._average_model.update_parameters(module)
            callback._latest_update_step = trainer.global_step
            callback._latest_update_epoch = trainer.current_epoch

    def restore(self, module: L.LightningModule) -> None:
        """Put the model back where an exception in the midst of validation has left the average."""
        if self._swapped:
            self._swap_models(module)

    def place_last(self, checkpoint: dict[str, Any]) -> None:
        """Make a checkpoint that is saved after training one to resume from: the module holds the average, and the
        checkpoint gets the last global model. The callback may have put its average there already, or be about to."""
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


Check = Callable[[dict[str, Any], Any], None]


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's own checkpoint files, written so that an earlier one is never lost, and checked before they are used.

    Lightning writes into the system's temporary folder and moves the file, which between file systems is a copy: a kill
    or a full disk in between leaves half a checkpoint in the place of a whole one. Remote paths (``s3://...``) are
    Lightning's.

    Args:
        check: called with a checkpoint and its path when it was read; raises if it cannot be used.
    """

    def __init__(self, check: Check | None = None) -> None:
        self.check = check

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write beside the target, flush to the disk, then move the file into its place.

        Raises:
            OSError: naming the file; what was there is as it was.
        """
        if "://" in str(path) or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        # In memory first: torch.save into a full file hides the disk's error behind its own.
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        with replacing(target) as file:
            file.write(buffer.getbuffer())

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read a checkpoint and check it.

        Raises:
            ConfigurationError: there is no such file, it cannot be read, or it holds something else.
        """
        try:
            _check_sums(path)
            checkpoint = super().load_checkpoint(path, *args, **kwargs)
        except FileNotFoundError:
            raise ConfigurationError(
                f"there is no checkpoint {path}. Name one that is there, or leave ckpt_path out."
            ) from None
        except Exception as error:
            raise ConfigurationError(f"{path} cannot be read as a checkpoint: {_why(path, error)}") from error
        if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
            raise ConfigurationError(f"{path} is no checkpoint of a Trainer: it has no state_dict. Name one that is.")
        if self.check is not None:
            self.check(checkpoint, path)
        return checkpoint


def install(trainer: L.Trainer, check: Check) -> None:
    """Use :class:`DurableCheckpointIO` in place of Lightning's default; a plugin of the user's own stays."""
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) in (TorchCheckpointIO, DurableCheckpointIO):
        strategy.checkpoint_io = DurableCheckpointIO(check)


def _check_sums(path: Any) -> None:
    """Raise where a byte is not what was written: torch reads weights without a look at their checksums."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if broken := archive.testzip():
                raise zipfile.BadZipFile(broken)


def _why(path: Any, error: Exception) -> str:
    if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
        return (
            "it holds objects that may run code of their own when they are loaded. Where you trust whoever wrote it, "
            "say weights_only=False."
        )
    return f"it is damaged, or something else ({type(error).__name__}). Name another."
