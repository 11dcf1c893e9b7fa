"""Optimizers' options that were changed on purpose when a run is resumed.

Lightning restores an optimizer with all its options and a scheduler with all its settings, so that a learning rate
given on resume would have no effect. Here what ``configure_optimizers`` gives now is compared with what it gave when
the run was started. Where nothing differs, everything goes on as restored. An option that differs is used; with a
scheduler that steps once a round, the schedule is that of a run that had been started with the new options, at the
round that is resumed.
"""

from __future__ import annotations

import re
import warnings
from copy import deepcopy
from typing import Any

import lightning as L
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from flsv.errors import ConfigurationError


class OptimizerOptions:
    """What ``configure_optimizers`` gave, looked at before Lightning restores a checkpoint.

    Args:
        trainer: with its optimizers set up.

    Attributes:
        asked: per optimizer and parameter group, its options as text; then the schedulers'. To be saved.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._trainer = trainer
        self._groups = [[_options(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        self._fresh = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]
        self.asked: dict[str, Any] = {
            "optimizers": [
                {"class": type(optimizer).__name__, "groups": [_texts(group) for group in groups]}
                for optimizer, groups in zip(trainer.optimizers, self._groups)
            ],
            "schedulers": [
                {"class": type(config.scheduler).__name__, **_texts(state)}
                for config, state in zip(trainer.lr_scheduler_configs, self._fresh)
            ],
        }

    def check(self, before: dict[str, Any]) -> None:
        """Whether what differs from ``before``, the ``asked`` of the run's start, can be used.

        Raises:
            ConfigurationError: another class or number of optimizers, groups or schedulers; other options together with
                a scheduler that steps per batch or watches a value.
        """
        was, now = _kinds(before), _kinds(self.asked)
        if was != now:
            raise ConfigurationError(
                f"the run was started with {was} and is resumed with {now}: an optimizer's state is of no use to "
                "another. Resume with the same; its options, such as the learning rate, may change."
            )
        differ = _differences(before, self.asked)
        stuck = [
            type(config.scheduler).__name__
            for config in self._trainer.lr_scheduler_configs
            if config.interval == "step"
            or isinstance(config.scheduler, ReduceLROnPlateau)
            or not self._trainer.lightning_module.automatic_optimization
        ]
        if differ and stuck:
            raise ConfigurationError(
                f"{', '.join(differ)}: with {stuck[0]}, the learning rate follows from what has happened so far and "
                "cannot be changed on resume. Resume with what the run was started with."
            )

    def apply(self, before: dict[str, Any]) -> None:
        """After Lightning's restore: use what differs from ``before``."""
        if not _differences(before, self.asked):
            return
        trainer = self._trainer
        for optimizer, groups, old in zip(trainer.optimizers, self._groups, before["optimizers"]):
            for group, options, texts in zip(optimizer.param_groups, groups, old["groups"]):
                group.update({k: v for k, v in options.items() if k in texts and _text(v) != texts[k]})
        for config, fresh in zip(trainer.lr_scheduler_configs, self._fresh):
            scheduler: Any = config.scheduler
            steps = _steps(scheduler)
            place = trainer.optimizers.index(scheduler.optimizer)
            for group, options in zip(scheduler.optimizer.param_groups, self._groups[place]):
                group.update(deepcopy(options))
            scheduler.load_state_dict(fresh)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\)")
                for _ in range(steps - _steps(scheduler)):
                    scheduler.step()


def _steps(scheduler: Any) -> int:
    first = scheduler if hasattr(scheduler, "last_epoch") else scheduler._schedulers[0]  # ChainedScheduler
    return int(first.last_epoch)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def _text(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in options.items()}


def _kinds(asked: dict[str, Any]) -> str:
    optimizers = [f"{o['class']} ({len(o['groups'])} groups)" for o in asked["optimizers"]]
    return ", ".join(optimizers + [scheduler["class"] for scheduler in asked["schedulers"]])


def _differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    pairs = [pair for a, b in zip(before["optimizers"], now["optimizers"]) for pair in zip(a["groups"], b["groups"])]
    pairs += list(zip(before["schedulers"], now["schedulers"]))
    # Names that only one of them has are another version's of torch.
    changed = [(name, a[name], b[name]) for a, b in pairs for name in a if name in b and a[name] != b[name]]
    return list(dict.fromkeys(f"{name} is {now} and was {was}" for name, was, now in changed))
