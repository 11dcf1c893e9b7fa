"""Private functions and attributes of Lightning that other packages of flsv need, since public ones do not exist."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.fabric.wrappers import _unwrap_objects
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from torch import nn

#: Launcher that starts a script once for each rank. Lightning has no public launcher for user-defined strategies.
SubprocessLauncher = _SubprocessScriptLauncher


def trainer_of(module: nn.Module) -> Any:
    """Return a module's Trainer, or None. ``LightningModule.trainer`` raises an error without one."""
    return getattr(module, "_trainer", None)


def set_root(trainer: L.Trainer, folder: str) -> None:
    """Let a Trainer write into another folder. Its ``default_root_dir`` cannot be set."""
    trainer._default_root_dir = folder  # type: ignore[attr-defined]  # a connector of Lightning sets it


def hook_of(module: L.LightningModule) -> str | None:
    """Return the name of the module's hook that Lightning runs now. There is no public attribute for it."""
    return module._current_fx_name


def forget_compilation(attributes: dict[str, Any]) -> None:
    """Remove the mark of a compiled module from a copy's attributes, which belongs to the compiled module only."""
    if attributes.get("_compiler_ctx") is not None:
        attributes["_compiler_ctx"] = None


def unwrapped(module: nn.Module) -> Any:
    """Return the module in Fabric's wrapper. There is no public ``fabric.unwrap``."""
    return _unwrap_objects(module)


def detach_fabric(module: L.LightningModule) -> None:
    """Detach a module from its Fabric, so that its logs do not reach the Fabric's loggers."""
    module._fabric = None


def attach(module: L.LightningModule, trainer: Any) -> None:
    """Attach a Trainer that is not used for a fit to a module, as ``trainer.fit`` does."""
    module._trainer = trainer
    trainer._data_connector._datahook_selector = _DataHookSelector(module, None)
