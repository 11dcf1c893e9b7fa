"""Options of optimizers that change between a run and its resumption."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from torch import Tensor

from flsv.training.group_options import options_of
from flsv.utilities.errors import ConfigurationError


class OptimizerOptions:
    """Options of ``configure_optimizers`` before Lightning restores a checkpoint, so that changed options have effect.

    Lightning restores an optimizer with all its options: a learning rate given on resume would change nothing. This
    class compares the options that ``configure_optimizers`` sets now with those that it set when the run was started,
    and applies the options that differ. All others stay as restored.

    Args:
        trainer: the trainer, with its optimizers set up.

    Attributes:
        configured_options: classes of optimizers and schedulers, and the options of every parameter group and then of
            every scheduler, as text, for the checkpoint.
    """

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
        """Check that what differs from ``before``, the ``asked`` of the run's start, can be used.

        Raises:
            ConfigurationError: classes or numbers of optimizers, groups or schedulers differ, or options differ and
                there is a scheduler.
        """
        if before["kinds"] != self.configured_options["kinds"]:
            raise ConfigurationError(
                f"the run was started with {before['kinds']} and is resumed with {self.configured_options['kinds']}: "
                "an optimizer's state is of no use to another. Resume with the same; its options, such as the learning "
                "rate, may change."
            )
        differ: dict[str, None] = {}
        for was, now in zip(before["options"], self.configured_options["options"]):
            # Options that only one of the two has come from another version of torch.
            names = [name for name in was if name in now and was[name] != now[name]]
            differ |= dict.fromkeys(f"{name} is {now[name]} and was {was[name]}" for name in names)
        if differ and self._schedulers:
            raise ConfigurationError(
                f"{', '.join(differ)}: with {self._schedulers[0]}, the learning rate follows from what has happened so "
                "far and cannot be changed on resume. Resume with what the run was started with."
            )

    def apply(self, before: dict[str, Any]) -> None:
        """Use what differs from ``before``, after Lightning has restored the optimizers."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, options, texts in zip(groups, self._options, before["options"]):
            group.update({k: v for k, v in options.items() if k in texts and _text(v) != texts[k]})


def _text(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in options.items()}
