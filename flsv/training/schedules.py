"""Schedules: a fit's learning-rate schedulers, each set to the position of the client that trains."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import lightning as L
from torch.optim import Optimizer

from flsv._lightning.patches import kept_schedulers, new_optimizers
from flsv.training.group_options import SCHEDULED, equal_states, put
from flsv.training.step_counts import LocalSteps
from flsv.utilities.errors import ConfigurationError


class Schedules:
    """Learning-rate schedulers of a fit, each set to the position of the client that trains."""

    def __init__(self, trainer: L.Trainer, steps: LocalSteps | None = None) -> None:
        self._trainer, self._steps = trainer, steps
        self._manual = not trainer.lightning_module.automatic_optimization
        configs = trainer.lr_scheduler_configs
        tracked = [c for c in configs if c.interval == "step"]
        self._places = [configs.index(config) for config in tracked]
        self._schedulers: list[Any] = [config.scheduler for config in tracked]
        self._by_round = [config.scheduler for config in configs if config not in tracked]
        self._check()
        self._families: dict[float, _Family] = {}
        self._own = [vars(scheduler) for scheduler in self._schedulers]
        self._federations: list[Any] | None = None
        self._begun: list[Any] = []

    def is_federations(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's scheduler steps once a round."""
        return any(each.optimizer is optimizer for each in self._by_round)

    def load(self, client: int, states: dict[int, Any] | None) -> None:
        """Set the schedulers to the client's position."""
        self._begun = [deepcopy(scheduler.state_dict()) for scheduler in self._by_round if self._manual]
        if not self._schedulers:
            return
        self._federations = self.states()
        if (family := self._family(client)) is not None:
            family.enter(self._schedulers)
        for i, state in (states or {}).items():
            self._schedulers[i].load_state_dict(deepcopy(state))

    def leave(self) -> dict[int, Any]:
        """Return the client's scheduler states, and reset the schedulers."""
        self._check_owner()
        if self._federations is None:
            return {}
        now = self.states()
        for scheduler, own, state in zip(self._schedulers, self._own, self._federations):
            scheduler.__dict__ = own
            scheduler.load_state_dict(deepcopy(state))
        self._federations = None
        return dict(enumerate(now))

    def states(self) -> list[Any]:
        """Copy the present states of the clients' schedulers."""
        return [deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]

    def _family(self, client: int) -> _Family | None:
        """Return schedulers made for the client's number of steps, or None if the fit's own suit it."""
        if self._steps is None or not self._steps.length_was_read:
            return None
        number = self._steps.of(client)
        if number == self._steps.most():
            return None
        if number not in self._families:
            self._families[number] = _Family(self._trainer, self._places)
        return self._families[number]

    def _check(self) -> None:
        for scheduler in self._schedulers:
            if self.is_federations(scheduler.optimizer):
                raise ConfigurationError(
                    "one optimizer has a scheduler that steps per batch and one that steps per round: the learning "
                    "rate would belong to the client and to the federation at once. Chain them in one scheduler "
                    "(torch.optim.lr_scheduler.SequentialLR or ChainedScheduler)."
                )
        if kept := kept_schedulers(self._trainer):
            raise ConfigurationError(
                f"{kept[0]} is a learning-rate scheduler that configure_optimizers does not return: its state would "
                "pass from client to client. Return it with {'scheduler': ..., 'interval': 'step'}."
            )

    def _check_owner(self) -> None:
        """Check that a client's training has stepped no scheduler of the rounds."""
        begun, self._begun = self._begun, []
        for scheduler, state in zip(self._by_round, begun):
            if not equal_states(scheduler.state_dict(), state):
                raise ConfigurationError(
                    f"{type(scheduler).__name__} is stepped while a client trains, and its interval is a round's: it "
                    "would pass from client to client. Return it with {'scheduler': ..., 'interval': 'step'}, or step "
                    "it in on_train_epoch_end only."
                )


class _Family:
    """Schedulers made for the present client's number of steps."""

    def __init__(self, trainer: L.Trainer, places: list[int]) -> None:
        self._optimizers, schedulers = new_optimizers(trainer)
        self._used = trainer.optimizers
        self._groups = [
            [{k: deepcopy(v) for k, v in group.items() if k in SCHEDULED} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]
        self._schedulers = [schedulers[place] for place in places]
        self._fresh = [deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a schedule before a step

    def enter(self, schedulers: list[Any]) -> None:
        """Give the fit's schedulers the attributes of this family's."""
        for optimizer, used, fresh in zip(self._optimizers, self._used, self._groups):
            optimizer.param_groups = used.param_groups
            for group, options in zip(used.param_groups, fresh):
                put(group, options)
        for scheduler, mine, fresh_state in zip(schedulers, self._schedulers, self._fresh):
            mine.load_state_dict(deepcopy(fresh_state))
            optimizer = scheduler.optimizer
            scheduler.__dict__ = vars(mine)
            scheduler.optimizer = optimizer
