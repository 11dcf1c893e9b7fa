"""Learning rate schedules of coalitions that are trained side by side: one optimizer's, for all of them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning as L

from flsv.clients.optimizers import ClientOptimizers
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
        self._trainer: Any = trainer
        self._groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for optimizer in trainer.optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a schedule before a step
        self._options = deepcopy([{k: v for k, v in group.items() if k in SCHEDULED} for group in self._groups])
        self._states = deepcopy([config.scheduler.state_dict() for config in trainer.lr_scheduler_configs])
        self.restart()

    def restart(self) -> None:
        """As before the first round, for other coalitions."""
        for group, options in zip(self._groups, self._options):
            put(group, options)
        for config, state in zip(self._trainer.lr_scheduler_configs, self._states):
            config.scheduler.load_state_dict(deepcopy(state))
        self._clients = ClientOptimizers(self._trainer, "reset")

    def end_round(self, index: int) -> None:
        """After the round of this number, from 0."""
        self._clients.commit()
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "epoch" and (index + 1) % config.frequency == 0:
                config.scheduler.step()

    def enter(self, client: int) -> None:
        """Before a client's batches of a round."""
        self._clients.load(client)
        self._client, self._steps = client, 0
        self._clients.begin_batch(0)

    def after_step(self) -> None:
        """After each of them."""
        for config in self._trainer.lr_scheduler_configs:
            if config.interval == "step" and config.frequency == 1:
                config.scheduler.step()
        self._steps += 1
        self._clients.begin_batch(self._steps)

    def leave(self) -> None:
        """After the last one."""
        self._clients.save(self._client)
