"""One set of Lightning optimizers and schedulers, shared by all clients in turn."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from flsv.errors import ConfigurationError


class ClientOptimizers:
    """Gives every client its own optimizer state and step-scheduler state.

    - The optimizer's state (momentum buffers, Adam's moments) is emptied when a client starts (``policy="reset"``) or
      is the one the client left in its last round (``"keep"``).
    - A scheduler that steps per batch belongs to the client: it goes on where that client left it.
    - A scheduler that steps per epoch, that is per round, belongs to the federation and is left alone.

    What a client leaves behind counts from :meth:`commit` on, which the loop calls when the round is complete: until
    then ``state_dict`` is that of the round's start, so that an interrupted round can be run again from there.
    """

    def __init__(
        self, trainer: L.Trainer, policy: Literal["reset", "keep"], state: dict[str, Any] | None = None
    ) -> None:
        self.policy = policy
        self._optimizers = trainer.optimizers
        self._schedulers = [c.scheduler for c in trainer.lr_scheduler_configs if c.interval == "step"]
        self._paced = [o for o in self._optimizers if any(s.optimizer is o for s in self._schedulers)]
        for config in trainer.lr_scheduler_configs:
            if config.interval == "epoch" and config.scheduler.optimizer in self._paced:
                raise ConfigurationError(
                    "one optimizer has a scheduler that steps per batch and one that steps per round: the learning "
                    "rate would belong to the client and to the federation at once. Chain them in one scheduler "
                    "(torch.optim.lr_scheduler.SequentialLR or ChainedScheduler)."
                )
        for optimizer in self._optimizers:
            if hasattr(optimizer, "upload_parameters") and (policy == "keep" or trainer.accumulate_grad_batches != 1):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} starts anew with every client and takes several steps per batch. Set "
                    'FederatedLoop(client_optimizer="reset") and Trainer(accumulate_grad_batches=1).'
                )
        self._states: dict[int, list[Any]] = {}
        self._paces: dict[int, Any] = {}
        self._staged: list[tuple[int, list[Any], Any]] = []
        self._fresh = self.pace()
        if state:
            self._load(state)

    def load(self, client: int) -> None:
        """Make the shared optimizers this client's own."""
        states = self._states.get(client)
        for i, optimizer in enumerate(self._optimizers):
            optimizer.state = defaultdict(dict) if states is None else _copy(states[i])
            optimizer.zero_grad()
        if self._schedulers:
            self.set_pace(self._paces.get(client, self._fresh))

    def upload(self) -> bool:
        """Before a client leaves: an optimizer that uploads other weights than it trained puts them into its parameters
        (``upload_parameters``). Whether there was one."""
        uploading = [optimizer for optimizer in self._optimizers if hasattr(optimizer, "upload_parameters")]
        for optimizer in uploading:
            optimizer.upload_parameters()
        return bool(uploading)

    def save(self, client: int) -> None:
        """Take the client's own states out of the shared optimizers."""
        states = [optimizer.state for optimizer in self._optimizers] if self.policy == "keep" else []
        self._staged.append((client, states, self.pace() if self._schedulers else None))

    def commit(self) -> None:
        """The round is complete: what its clients left is their state from now on."""
        for client, states, pace in self._staged:
            if self.policy == "keep":
                self._states[client] = states
            if self._schedulers:
                self._paces[client] = pace
        self.discard()

    def discard(self) -> None:
        """Forget what the round's clients left, and leave no client's state in the shared optimizers."""
        self._staged.clear()
        for optimizer in self._optimizers:
            optimizer.state = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:
        return {
            "states": {
                c: [_by_index(o, s) for o, s in zip(self._optimizers, all_)] for c, all_ in self._states.items()
            },
            "paces": self._paces,
            "fresh": self._fresh,
        }

    def _load(self, state: dict[str, Any]) -> None:
        for client, states in state["states"].items():
            for optimizer, by_index in zip(self._optimizers, states):
                optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
            self._states[client] = [optimizer.state for optimizer in self._optimizers]
            self.discard()
        self._paces, self._fresh = state["paces"], state["fresh"]

    def clients(self) -> set[int]:
        """Those that have left something."""
        return {*self._states, *self._paces}

    def pace(self) -> Any:
        """Where the schedulers that step per batch stand, and the options that they have set."""
        options = [[{k: v for k, v in g.items() if k != "params"} for g in o.param_groups] for o in self._paced]
        return deepcopy({"schedulers": [s.state_dict() for s in self._schedulers], "options": options})

    def set_pace(self, pace: Any) -> None:
        """The inverse."""
        pace = deepcopy(pace)
        for scheduler, state in zip(self._schedulers, pace["schedulers"]):
            scheduler.load_state_dict(state)
        for optimizer, groups in zip(self._paced, pace["options"]):
            for group, options in zip(optimizer.param_groups, groups):
                group.update(options)


def _copy(state: Any) -> Any:
    def value(v: Any) -> Any:
        return v.clone() if isinstance(v, Tensor) else deepcopy(v)

    return defaultdict(dict, {p: {k: value(v) for k, v in entries.items()} for p, entries in state.items()})


def _by_index(optimizer: Optimizer, state: Any) -> dict[int, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: state[p] for i, p in enumerate(parameters) if p in state}
