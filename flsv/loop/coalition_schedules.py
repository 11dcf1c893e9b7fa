"""Learning rate schedules of coalitions that are trained side by side: one optimizer's, for all of them."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L

from flsv.clients.schedules import SCHEDULED, put
from flsv.errors import ConfigurationError


class SideBySideSchedules:
    """Steps schedules by rounds (``interval="epoch"``) with the federation, and schedules by batches (``"step"``) with
    each client, which continues its own in its next round.

    Args:
        trainer: with its optimizers set up.

    Raises:
        ConfigurationError: a schedule by a logged value: each coalition would have its own.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        for config in trainer.lr_scheduler_configs:
            if config.reduce_on_plateau:
                raise ConfigurationError(
                    f"{type(config.scheduler).__name__} steps by a value, which every coalition has of its own, and "
                    "they are trained side by side. Use flsv.games.RetrainedUtility, or another schedule."
                )
        self._of_rounds: list[Any] = [config for config in trainer.lr_scheduler_configs if config.interval == "epoch"]
        self._of_steps: list[Any] = [config for config in trainer.lr_scheduler_configs if config.interval == "step"]
        self._optimizers = trainer.optimizers
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a schedule before a step
        self._rounds_begun = copy.deepcopy([config.scheduler.state_dict() for config in self._of_rounds])
        self._fresh, self._left = self._now(), dict[int, Any]()
        self._client, self._steps = -1, 0

    def restart(self) -> None:
        """As before the first round, for other coalitions."""
        self._put(self._fresh)
        self._left.clear()
        for config, state in zip(self._of_rounds, copy.deepcopy(self._rounds_begun)):
            config.scheduler.load_state_dict(state)

    def end_round(self, index: int) -> None:
        """After the round of this number, from 0."""
        for config in self._of_rounds:
            if (index + 1) % config.frequency == 0:
                config.scheduler.step()

    def enter(self, client: int) -> None:
        """Before a client's batches of a round."""
        if self._of_steps:
            self._put(self._left.get(client, self._fresh))
            self._client, self._steps = client, 0

    def after_step(self) -> None:
        """After each of them."""
        self._steps += 1
        for config in self._of_steps:
            if self._steps % config.frequency == 0:
                config.scheduler.step()

    def leave(self) -> None:
        """After the last one."""
        if self._of_steps:
            self._left[self._client] = self._now()

    def _now(self) -> Any:
        options = [[{k: v for k, v in g.items() if k in SCHEDULED} for g in o.param_groups] for o in self._optimizers]
        return copy.deepcopy((options, [config.scheduler.state_dict() for config in self._of_steps]))

    def _put(self, state: Any) -> None:
        options, schedulers = copy.deepcopy(state)
        for optimizer, groups in zip(self._optimizers, options):
            for group, scheduled in zip(optimizer.param_groups, groups):
                put(group, scheduled)
        for config, scheduler in zip(self._of_steps, schedulers):
            config.scheduler.load_state_dict(scheduler)
