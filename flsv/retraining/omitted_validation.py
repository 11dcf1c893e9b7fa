"""OmittedValidation: leaves out Lightning's own validations in a coalition's fit, as far as nothing sees them.

The coalition's model is scored in the valued rounds by flsv itself.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import lightning as L
from lightning.pytorch.trainer.connectors.logger_connector import _LoggerConnector

from flsv._lightning.patches import PatchedAttributes, callbacks_of
from flsv.core.parameter_space import ParameterSpace
from flsv.games.lent_module import changes_noted
from flsv.retraining.readings import Reading, package_of, reader_name
from flsv.utilities.supervisor import answer

#: Packages whose hooks and reads are known not to depend on a validation, unless a scheduler does.
_KNOWN = ("lightning", "pytorch_lightning", "flsv")
#: Packages whose modules' hooks are known.
_KNOWN_MODULES = ("flsv", "lightning", "pytorch_lightning", "torch", "builtins")
_PREFIXES = ("on_validation_", "on_sanity_check_")
_WHY = "which coalitions lack if they do not validate"


class OmittedValidation:
    """Omission of the validations of a Trainer's fit.

    They are run if a hook of the module, a callback or a scheduler sees them. Whoever reads a logged value ends the
    process with its name.
    """

    def __init__(self) -> None:
        self._patches: PatchedAttributes | None = None

    def begin(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Leave out validations from now on, unless a hook of the module or a callback sees them."""
        if has_validation_hook(trainer, module):
            return
        unfitted: Any = trainer
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        connector: Any = trainer._logger_connector
        self._patches = PatchedAttributes(
            [
                (unfitted, "num_sanity_val_steps", 0),
                (epoch_loop, "_should_check_val_fx", _never),
                (connector, "__class__", _TellingConnector),
            ]
        )

    def end_if_scheduled(self, trainer: L.Trainer) -> None:
        """Run validations again if a scheduler steps by a logged value. It is called before the first round."""
        is_scheduled = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        if is_scheduled and self._patches is not None:
            self._patches.restore()
            self._patches = None


def observe_first_validation(trainer: L.Trainer, space: ParameterSpace, changes: list[str]) -> None:
    """Add to ``changes`` the names of what a fit's next validation changes, since later training may read it."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    run = loop.run

    def observed_run() -> Any:
        stop_observing(trainer)
        with changes_noted(trainer.lightning_module, space) as noted:
            outputs = run()
        changes.extend(noted)
        return outputs

    loop.run = observed_run


def stop_observing(trainer: L.Trainer) -> None:
    """Undo :func:`observe_first_validation`."""
    loop: Any = trainer.fit_loop.epoch_loop.val_loop
    vars(loop).pop("run", None)


def has_validation_hook(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Return whether the module or a callback has a hook of validation that is not of flsv or an idle one."""
    if _overrides(module, L.LightningModule, _KNOWN_MODULES):
        return True
    for callback in callbacks_of(trainer):
        is_stand_in = "stand_in" in vars(type(callback))
        if not is_stand_in and _overrides(callback, L.Callback, ("flsv", "builtins")):
            return True
    return False


def _overrides(owner: Any, base: type, idle_packages: tuple[str, ...]) -> bool:
    """Return whether an object or its classes, except those of some packages, define a hook of validation."""
    attributes = set(vars(owner))
    for kind in type(owner).__mro__:
        package = kind.__module__.partition(".")[0]
        if kind is not base and package not in idle_packages:
            attributes.update(vars(kind))
    return any(name.startswith(_PREFIXES) for name in attributes)


def _never(*_: Any) -> bool:
    return False


class _TellingConnector(_LoggerConnector):
    """Holder of logged values that ends this process with the name of who reads them."""

    @property
    def callback_metrics(self) -> Any:
        _tell(sys._getframe(1), "callback_metrics")
        return super().callback_metrics

    @property
    def logged_metrics(self) -> Any:
        _tell(sys._getframe(1), "logged_metrics")
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> Any:
        _tell(sys._getframe(1), "progress_bar_metrics")
        return super().progress_bar_metrics


def _tell(frame: FrameType, name: str) -> None:
    """Answer with the reader's name, unless Lightning or flsv reads."""
    is_property = frame.f_code.co_name == name and frame.f_back is not None
    reading_frame: Any = frame.f_back if is_property else frame
    if package_of(reading_frame) not in _KNOWN:
        reading = Reading(reader_name(), f"trainer.{name}", _WHY, needs_validation=True)
        answer(reading)
