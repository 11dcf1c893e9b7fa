"""Options of optimizers and schedulers, which a run goes on with when it is resumed."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
from torch import Tensor

from flsv.errors import ConfigurationError


def optimizer_options(trainer: L.Trainer) -> dict[str, Any]:
    """What ``configure_optimizers`` has given: the kinds of optimizers and schedulers, and as text the options of each
    parameter group and of each scheduler. To be saved."""
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    kinds = [f"{type(each).__name__} ({len(each.param_groups)} groups)" for each in trainer.optimizers]
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    options = [*groups, *(scheduler.state_dict() for scheduler in schedulers)]
    return {
        "kinds": ", ".join(kinds + [type(scheduler).__name__ for scheduler in schedulers]),
        "options": [{n: _text(value) for n, value in each.items() if n != "params"} for each in options],
    }


def check_options(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Compare two of :func:`optimizer_options`, of the run's start and of its resumption: Lightning restores an
    optimizer with all its options, so that others would change nothing.

    Raises:
        ConfigurationError: they differ.
    """
    differ = {"": f"{now['kinds']} and was {before['kinds']}"} if now["kinds"] != before["kinds"] else {}
    for was, given in zip(before["options"], now["options"]):
        # Names that only one of them has are another version's of torch.
        differ |= {n: f"{n} is {given[n]} and was {was[n]}" for n in was if n in given and was[n] != given[n]}
    if differ:
        raise ConfigurationError(
            f"configure_optimizers: {', '.join(differ.values())}. A resumed run goes on with the optimizers that it "
            "was started with, options and all: give these, or begin a new run from the weights of this one."
        )


def _text(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)
