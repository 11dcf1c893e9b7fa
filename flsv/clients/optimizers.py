"""Lightning's optimizers and schedulers, shared by all clients in turn."""

from __future__ import annotations

from collections import defaultdict
from copy import deepcopy
from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor
from torch.optim import Optimizer

from flsv._lightning.patches import configured, kept_schedulers
from flsv._lightning.per_client import LossScale
from flsv.clients.local_steps import LocalSteps
from flsv.errors import ConfigurationError

#: Options of a parameter group that schedulers write: torch's and timm's.
SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "lr_scale", "weight_decay", "betas"}
SCHEDULED |= {"momentum", "base_momentum", "max_momentum"}
_NEVER = 2**62
#: Per optimizer and parameter group, options by name.
Options = list[list[dict[str, Any]]]


class ClientOptimizers:
    """Switches optimizer state and schedules from client to client.

    - The optimizer's state (momentum buffers, Adam's moments) is emptied when a client starts (``policy="reset"``) or
      is the one the client left in its last round (``"persist"``). So is what it keeps in its parameter groups
      (schedule-free optimizers count their steps there): whatever changes there while a client trains, but the
      learning rate and the other options that schedulers write.
    - A scheduler that steps while clients train belongs to the client, and so does a learning rate that changes then:
      it goes on where that client left it, with either policy; see :class:`Schedules`.
    - A scheduler that steps per epoch, that is per round, belongs to the federation and is left alone.
    - The scale of the loss in half precision is the client's, see :mod:`flsv._lightning.per_client`.

    What a client leaves behind counts from :meth:`commit` on, which the loop calls when the round is complete: until
    then ``state_dict`` is that of the round's start, so that an interrupted round can be run again from there.

    Args:
        trainer: with its optimizers set up.
        policy: ``"reset"`` or ``"persist"``.
        state: of a checkpoint.
        steps: how many every client takes; None: as if it had not been asked.

    Raises:
        ConfigurationError: an optimizer or a scheduler that cannot be shared.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: Literal["reset", "persist"],
        state: dict[str, Any] | None = None,
        steps: LocalSteps | None = None,
    ) -> None:
        self.policy = policy
        self._steps = steps
        self._optimizers = trainer.optimizers
        self._schedules = Schedules(trainer, steps)
        self._scale = LossScale(trainer)
        _check_parameters(trainer)
        for optimizer in self._optimizers:
            if hasattr(optimizer, "upload_parameters") and (
                policy == "persist" or trainer.accumulate_grad_batches != 1
            ):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} starts anew with every client and takes several steps per batch. Set "
                    'FederatedLoop(optimizer_state="reset") and Trainer(accumulate_grad_batches=1).'
                )
        self._states: dict[int, list[Any]] = {}
        self._paces: dict[int, dict[str, Any]] = {}
        self._staged: list[tuple[int, list[Any], dict[str, Any]]] = []
        self._federations: Options | None = None
        if state:
            self._load(state)

    def load(self, client: int) -> None:
        """Make the shared optimizers this client's own."""
        if self._steps is not None:
            self._steps.client = client
        self._federations = self._options()
        pace = self._paces.get(client, {})
        self._scale.load(pace.get("scale"))
        self._schedules.load(client, pace.get("schedulers"))
        self._kept: Options = pace.get("options", [])
        for optimizer, groups in zip(self._optimizers, self._kept):
            for group, values in zip(optimizer.param_groups, groups):
                put(group, values)
        self._begun = self._options()
        states = self._states.get(client)
        for i, optimizer in enumerate(self._optimizers):
            optimizer.state = defaultdict(dict) if states is None else _copy(states[i])
            optimizer.zero_grad()

    def begin_batch(self, position: int, last: bool = False) -> None:
        """Before every batch of the client, counted from 0."""
        self._schedules.begin_batch(position)
        if self._steps is not None:
            self._steps.last_batch = last

    def upload(self) -> bool:
        """Before a client leaves: an optimizer that uploads other weights than it trained puts them into its parameters
        (``upload_parameters``). Whether there was one."""
        uploading = [optimizer for optimizer in self._optimizers if hasattr(optimizer, "upload_parameters")]
        for optimizer in uploading:
            optimizer.upload_parameters()
        return bool(uploading)

    def save(self, client: int) -> None:
        """Take the client's own states out of the shared optimizers."""
        options = self._options()
        schedulers = self._schedules.leave()
        pace = {"schedulers": schedulers, "options": self._own(options), "scale": self._scale.read()}
        states = [optimizer.state for optimizer in self._optimizers] if self.policy == "persist" else []
        self._staged.append((client, states, pace))
        self._give_back()

    def leave(self) -> None:
        """The client has left, with or without its states: options and schedules are the federation's again."""
        if self._federations is not None:
            self._schedules.leave()
            self._give_back()

    def _give_back(self) -> None:
        assert self._federations is not None
        self._scale.load(None)
        for optimizer, groups in zip(self._optimizers, self._federations):
            for group, options in zip(optimizer.param_groups, groups):
                for name in group.keys() - options.keys() - {"params"}:
                    del group[name]
                by_round = SCHEDULED if self._schedules.is_federations(optimizer) else ()
                put(group, {name: value for name, value in options.items() if name not in by_round})
        self._federations = None
        if self._steps is not None:
            self._steps.client = None

    def commit(self) -> None:
        """The round is complete: what its clients left is their state from now on."""
        for client, states, pace in self._staged:
            if self.policy == "persist":
                self._states[client] = states
            if pace["schedulers"] or pace["scale"] or any(any(groups) for groups in pace["options"]):
                self._paces[client] = pace
        self.discard()

    def forget(self, client: int) -> None:
        """Forget what one client left in the round."""
        self._staged = [left for left in self._staged if left[0] != client]

    def discard(self) -> None:
        """Forget what the round's clients left, and leave no client's state in the shared optimizers."""
        self.leave()
        self._staged.clear()
        if self._steps is not None:
            self._steps.last_batch = None
        for optimizer in self._optimizers:
            optimizer.state = defaultdict(dict)

    def clients(self) -> set[int]:
        """Those that have left something."""
        return {*self._states, *self._paces}

    def rewind(self, checkpoint: dict[str, Any]) -> None:
        """Turn a checkpoint that Lightning saves within a round into one without any client's state."""
        for i, saved in enumerate(checkpoint.get("optimizer_states", [])):
            saved["state"] = {}
            if self._federations is not None:
                saved["param_groups"] = [
                    {**deepcopy(options), "params": group["params"]}
                    for group, options in zip(saved["param_groups"], self._federations[i])
                ]
        if "lr_schedulers" in checkpoint:
            self._schedules.rewind(checkpoint["lr_schedulers"])

    def state_dict(self) -> dict[str, Any]:
        states = {c: list(map(_by_index, self._optimizers, kept)) for c, kept in self._states.items()}
        return {"states": states, "paces": self._paces, "scale": self._scale.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        for client, states in state["states"].items():
            for optimizer, by_index in zip(self._optimizers, states):
                optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
            self._states[client] = [optimizer.state for optimizer in self._optimizers]
            self.discard()
        self._paces = state["paces"]
        self._scale.load_state_dict(state["scale"])

    def _options(self) -> Options:
        return [
            [{k: _value(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
            for optimizer in self._optimizers
        ]

    def _own(self, options: Options) -> Options:
        """What of the options as the client leaves them is the client's."""
        result: Options = []
        for i, (optimizer, groups) in enumerate(zip(self._optimizers, options)):
            may = set() if self._schedules.is_federations(optimizer) else SCHEDULED
            result.append([])
            for j, group in enumerate(groups):
                begun = self._begun[i][j] if j < len(self._begun[i]) else {}
                kept = self._kept[i][j] if i < len(self._kept) and j < len(self._kept[i]) else {}
                result[-1].append(
                    {
                        name: value
                        for name, value in group.items()
                        if (name in may if name in SCHEDULED else self.policy == "persist")
                        and (name in kept or name not in begun or not same(begun[name], value))
                    }
                )
        return result


def _check_parameters(trainer: L.Trainer) -> None:
    known = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups if optimizer.state_dict() else []:  # Lightning's stand-in has none
            strange = [list(tensor.shape) for tensor in group["params"] if id(tensor) not in known]
            if strange:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} trains tensors of shape {strange} that are no parameters of the "
                    "module: they would pass from client to client. Make them nn.Parameter attributes of the module."
                )


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str, tuple, type(None))) else deepcopy(value)


def _copy(state: Any) -> Any:
    return defaultdict(dict, {p: {k: _value(v) for k, v in entries.items()} for p, entries in state.items()})


def _by_index(optimizer: Optimizer, state: Any) -> dict[int, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: state[p] for i, p in enumerate(parameters) if p in state}


class Schedules:
    """The schedulers of a fit, each set to the position of the client that trains.

    The configuration says it, with manual optimization, too: a scheduler with ``interval="step"`` is the client's, one
    with ``interval="epoch"`` the federation's.

    Between two clients, and between rounds, they are the federation's: as ``configure_optimizers`` gave them, but for
    the steps that it takes itself.
    """

    def __init__(self, trainer: L.Trainer, steps: LocalSteps | None = None) -> None:
        self._trainer, self._steps = trainer, steps
        self._manual = not trainer.lightning_module.automatic_optimization
        configs = trainer.lr_scheduler_configs
        tracked = [c for c in configs if c.interval == "step"]
        self._places = [configs.index(config) for config in tracked]
        self._schedulers: list[Any] = [config.scheduler for config in tracked]
        self._by_round = [config.scheduler for config in configs if config not in tracked]
        self._frequencies = [(c, c.frequency) for c in tracked if not self._manual and c.frequency > 1]
        self._check()
        self._families: dict[float, _Family] = {}
        self._own = [vars(scheduler) for scheduler in self._schedulers]
        self._federations: list[Any] | None = None
        self._begun: list[Any] = []

    def is_federations(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer's learning rate follows the rounds, by a scheduler that is told to."""
        return any(each.optimizer is optimizer for each in self._by_round)

    def load(self, client: int, states: dict[int, Any] | None) -> None:
        """Put the schedulers where the client has left them; at their beginning where it comes for the first time."""
        self._begun = [deepcopy(scheduler.state_dict()) for scheduler in self._by_round if self._manual]
        if not self._schedulers:
            return
        self._federations = self.states()
        if (family := self._family(client)) is not None:
            family.enter(self._schedulers)
        for i, state in (states or {}).items():
            self._schedulers[i].load_state_dict(deepcopy(state))

    def begin_batch(self, position: int) -> None:
        """Before a client's batch, counted from 0: a scheduler of ``frequency=k`` steps after every k-th of its own."""
        for config, frequency in self._frequencies:
            config.frequency = 1 if (position + 1) % frequency == 0 else _NEVER

    def leave(self) -> dict[int, Any]:
        """The states of the client's own schedulers; all of them are the federation's again."""
        self._check_owner()
        if self._federations is None:
            return {}
        now = self.states()
        for scheduler, own, state in zip(self._schedulers, self._own, self._federations):
            scheduler.__dict__ = own
            scheduler.load_state_dict(deepcopy(state))
        for config, frequency in self._frequencies:
            config.frequency = frequency
        self._federations = None
        return dict(enumerate(now))

    def states(self) -> list[Any]:
        return [deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]

    def rewind(self, saved: list[Any]) -> None:
        """Put the federation's states into those of a checkpoint that is saved while a client trains."""
        for place, state in zip(self._places, self._federations or []):
            saved[place] = deepcopy(state)

    def _family(self, client: int) -> _Family | None:
        """The schedulers that ``configure_optimizers`` gives for a client with so many steps; None: those that are
        there, or their like."""
        if self._steps is None or not self._steps.asked:
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
        begun, self._begun = self._begun, []
        for scheduler, state in zip(self._by_round, begun):
            if not same(scheduler.state_dict(), state):
                raise ConfigurationError(
                    f"{type(scheduler).__name__} is stepped while a client trains, and its interval is a round's: it "
                    "would pass from client to client. Return it with {'scheduler': ..., 'interval': 'step'}, or step "
                    "it in on_train_epoch_end only."
                )


class _Family:
    """Schedulers made for another number of steps."""

    def __init__(self, trainer: L.Trainer, places: list[int]) -> None:
        self._optimizers, schedulers = configured(trainer)
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
        """Become these schedulers: whoever holds one of them holds this one, and theirs are the parameter groups."""
        for optimizer, used, fresh in zip(self._optimizers, self._used, self._groups):
            optimizer.param_groups = used.param_groups
            for group, options in zip(used.param_groups, fresh):
                put(group, options)
        for scheduler, mine, fresh_state in zip(schedulers, self._schedulers, self._fresh):
            mine.load_state_dict(deepcopy(fresh_state))
            optimizer = scheduler.optimizer
            scheduler.__dict__ = vars(mine)
            scheduler.optimizer = optimizer


def put(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Write options into a parameter group; a tensor stays the object that it is."""
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
            if present is not value:
                with torch.no_grad():
                    present.copy_(value)
        else:
            group[name] = deepcopy(value)


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)
