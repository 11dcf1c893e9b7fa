"""What other packages of flsv need of Lightning that has no public name, and the public way that is missing."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.fabric.wrappers import _unwrap_objects
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.connectors.data_connector import _DataHookSelector
from torch import nn

#: Launcher that starts a script once for each rank. A strategy of one's own has no public one.
SubprocessLauncher = _SubprocessScriptLauncher


def trainer_of(module: nn.Module) -> Any:
    """Return a module's Trainer, or None. ``LightningModule.trainer`` raises an error without one."""
    return getattr(module, "_trainer", None)


def hook_of(module: L.LightningModule) -> str | None:
    """Return the name of the module's hook that Lightning is in. It has no public name."""
    return module._current_fx_name


def forget_compilation(attributes: dict[str, Any]) -> None:
    """Remove Lightning's note that a module is compiled from its attributes. It goes with the compiled module only."""
    if attributes.get("_compiler_ctx") is not None:
        attributes["_compiler_ctx"] = None


def unwrapped(module: nn.Module) -> Any:
    """Return the module in Fabric's wrapper. ``fabric.unwrap`` does not exist."""
    return _unwrap_objects(module)


def detach_fabric(module: L.LightningModule) -> None:
    """Keep what a module logs from the loggers of a Fabric, which cannot be taken from it in public."""
    module._fabric = None


def attach(module: L.LightningModule, trainer: L.Trainer) -> None:
    """Attach a Trainer that fits nothing to a module, as ``trainer.fit`` does for those that it fits."""
    unfitted: Any = trainer
    module._trainer = trainer
    unfitted._data_connector._datahook_selector = _DataHookSelector(module, None)
