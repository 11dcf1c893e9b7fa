"""OptimizerOptions: options of optimizers that the user changes when a run is resumed."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from torch import Tensor

from flsv.training.group_options import options_of
from flsv.utilities.errors import ConfigurationError


class OptimizerOptions:
    """Options that ``configure_optimizers`` has set, before a checkpoint is restored."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._optimizers = trainer.optimizers
        self._options = [group for groups in options_of(trainer.optimizers) for group in groups]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedulers = [type(scheduler).__name__ for scheduler in schedulers]
        optimizers = [f"{type(each).__name__} ({len(each.param_groups)} groups)" for each in trainer.optimizers]
        self.configured_options: dict[str, Any] = {
            "kinds": ", ".join(optimizers + self._schedulers),
            "options": [_texts(options) for options in self._options + [each.state_dict() for each in schedulers]],
        }

    def check(self, before: dict[str, Any]) -> None:
        """Check that the options that have changed since the run's start can be applied."""
        if before["kinds"] != self.configured_options["kinds"]:
            raise ConfigurationError(
                f"the run was started with {before['kinds']} and is resumed with {self.configured_options['kinds']}: "
                "an optimizer's state is of no use to another. Resume with the same; its options, such as the learning "
                "rate, may change."
            )
        differ: dict[str, None] = {}
        for was, now in zip(before["options"], self.configured_options["options"]):
            # An option that only one of the two dictionaries has comes from another version of torch.
            names = [name for name in was if name in now and was[name] != now[name]]
            differ |= dict.fromkeys(f"{name} is {now[name]} and was {was[name]}" for name in names)
        if differ and self._schedulers:
            raise ConfigurationError(
                f"{', '.join(differ)}: with {self._schedulers[0]}, the learning rate follows from what has happened so "
                "far and cannot be changed on resume. Resume with what the run was started with."
            )

    def apply(self, before: dict[str, Any]) -> None:
        """Apply the options that have changed since the run's start."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, options, texts in zip(groups, self._options, before["options"]):
            group.update({k: v for k, v in options.items() if k in texts and _text(v) != texts[k]})


def _text(value: Any) -> str:
    """Return an option's value as text, without memory addresses."""
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in options.items()}
