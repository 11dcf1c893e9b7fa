"""Pace: each client's position in its learning-rate schedules, and its optimizer options that change in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import lightning as L

from flsv.training.group_options import SCHEDULED, Options, equal_states, options_of, put
from flsv.training.schedules import Schedules
from flsv.training.slots import Slot
from flsv.training.step_counts import LocalSteps


class Pace(Slot):
    """Slot for learning-rate schedulers and optimizer options, which each client continues."""

    name = "pace"

    def __init__(
        self, trainer: L.Trainer, policy: Literal["reset", "persist"], steps: LocalSteps | None = None
    ) -> None:
        self._optimizers, self._policy = trainer.optimizers, policy
        self._schedules = Schedules(trainer, steps)
        self._federations: Options | None = None

    def enter(self, client: int, kept: dict[str, Any] | None) -> None:
        kept = kept or {}
        self._federations = options_of(self._optimizers)
        self._schedules.load(client, kept.get("schedulers"))
        self._kept: Options = kept.get("options", [])
        for optimizer, groups in zip(self._optimizers, self._kept):
            for group, values in zip(optimizer.param_groups, groups):
                put(group, values)
        self._begun = options_of(self._optimizers)

    def leave(self) -> dict[str, Any] | None:
        assert self._federations is not None
        own = self._own(options_of(self._optimizers))
        schedulers = self._schedules.leave()
        for optimizer, groups in zip(self._optimizers, self._federations):
            for group, options in zip(optimizer.param_groups, groups):
                for name in group.keys() - options.keys() - {"params"}:
                    del group[name]
                by_round = SCHEDULED if self._schedules.is_federations(optimizer) else ()
                put(group, {name: value for name, value in options.items() if name not in by_round})
        self._federations = None
        changed = schedulers or any(any(groups) for groups in own)
        return {"schedulers": schedulers, "options": own} if changed else None

    def _own(self, options: Options) -> Options:
        """Select the client's own options that its training has changed, now or before."""
        result: Options = []
        for i, (optimizer, groups) in enumerate(zip(self._optimizers, options)):
            scheduled = not self._schedules.is_federations(optimizer)
            result.append([])
            for j, group in enumerate(groups):
                begun, kept = _group(self._begun, i, j), _group(self._kept, i, j)
                own = {}
                for name, value in group.items():
                    changed = name in kept or name not in begun or not equal_states(begun[name], value)
                    if changed and (scheduled if name in SCHEDULED else self._policy == "persist"):
                        own[name] = value
                result[-1].append(own)
        return result


def _group(options: Options, optimizer: int, group: int) -> Mapping[str, Any]:
    """Return the options of one parameter group, or an empty mapping."""
    groups = options[optimizer] if optimizer < len(options) else []
    return groups[group] if group < len(groups) else {}
