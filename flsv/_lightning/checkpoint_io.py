"""Lightning's checkpoint files, written atomically and checked before they are used."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins import TorchCheckpointIO

from flsv._lightning.durable import replacing
from flsv.errors import ConfigurationError

Check = Callable[[dict[str, Any], Any], None]


class DurableCheckpointIO(TorchCheckpointIO):
    """Lightning's own checkpoint files, written so that an earlier one is never lost, and judged before they are used.

    Lightning writes into the system's temporary folder and moves the file, which between file systems is a copy: a kill
    or a full disk in between leaves half a checkpoint in the place of a whole one. Remote paths (``s3://...``) are
    Lightning's.

    Args:
        check: called with a checkpoint and its path when it was read; raises if it cannot be used.
    """

    def __init__(self, check: Check | None = None) -> None:
        self.check = check

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write beside the target, flush to the disk, move.

        Raises:
            OSError: naming the file; what was there is as it was.
        """
        if _is_remote(path) or storage_options is not None:
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
        """Read and check.

        Raises:
            ConfigurationError: there is no such file, it cannot be read, or it holds something else.
        """
        try:
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


def _is_remote(path: Any) -> bool:
    return "://" in str(path)


def _why(path: Any, error: Exception) -> str:
    if not _is_remote(path) and Path(path).is_file():
        if Path(path).stat().st_size == 0:
            return "the file is empty. Name another."
        if isinstance(error, pickle.UnpicklingError) and zipfile.is_zipfile(path):
            return (
                "it holds objects that may run code of their own when they are loaded. Where you trust whoever wrote "
                "it, say weights_only=False."
            )
    return f"it is damaged, or something else ({type(error).__name__}). Name another."
