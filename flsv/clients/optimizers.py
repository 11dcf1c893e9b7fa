"""Lightning's optimizers and schedulers, shared by all clients in turn."""

from __future__ import annotations

import re
from collections import defaultdict
from copy import deepcopy
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from flsv._lightning.per_client import LossScale
from flsv.clients.schedules import SCHEDULED, LocalSteps, Schedules, put, same
from flsv.errors import ConfigurationError

#: Per optimizer and parameter group, options by name.
Options = list[list[dict[str, Any]]]


class ClientOptimizers:
    """Switches optimizer state and schedules from client to client.

    - The optimizer's state (momentum buffers, Adam's moments) is emptied when a client starts (``policy="reset"``) or
      is the one the client left in its last round (``"keep"``). So is what it keeps in its parameter groups
      (schedule-free optimizers count their steps there): whatever changes there while a client trains, but the
      learning rate and the other options that schedulers write.
    - A scheduler that steps while clients train belongs to the client, and so does a learning rate that changes then:
      it goes on where that client left it, with either policy; see :mod:`flsv.clients.schedules`.
    - A scheduler that steps per epoch, that is per round, belongs to the federation and is left alone.
    - The scale of the loss in half precision is the client's, see :mod:`flsv._lightning.per_client`.

    What a client leaves behind counts from :meth:`commit` on, which the loop calls when the round is complete: until
    then ``state_dict`` is that of the round's start, so that an interrupted round can be run again from there.

    Args:
        trainer: with its optimizers set up.
        policy: ``"reset"`` or ``"keep"``.
        state: of a checkpoint.
        steps: how many every client takes.

    Raises:
        ConfigurationError: an optimizer that cannot be shared, or trains what is no parameter of the module.
    """

    def __init__(
        self,
        trainer: L.Trainer,
        policy: Literal["reset", "keep"],
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
            if hasattr(optimizer, "upload_parameters") and (policy == "keep" or trainer.accumulate_grad_batches != 1):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} starts anew with every client and takes several steps per batch. Set "
                    'FederatedLoop(client_optimizer="reset") and Trainer(accumulate_grad_batches=1).'
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
            self._steps.enter(client)
        self._federations = self._options()
        pace = self._paces.get(client, {})
        self._scale.load(pace.get("scale"))
        self._schedules.load(client, pace.get("schedulers"))
        self._kept: Options = pace.get("options", [])
        self._put(self._kept)
        self._begun = self._options()
        states = self._states.get(client)
        for i, optimizer in enumerate(self._optimizers):
            optimizer.state = defaultdict(dict) if states is None else _copy(states[i])
            optimizer.zero_grad()

    def begin_batch(self, position: int) -> None:
        """Before every batch of the client, counted from 0."""
        self._schedules.begin_batch(position)

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
        states = [optimizer.state for optimizer in self._optimizers] if self.policy == "keep" else []
        self._staged.append((client, states, pace))
        self.leave()

    def leave(self) -> None:
        """The client has left, with or without its states: options and schedules are the federation's again."""
        if self._federations is None:
            return
        self._schedules.leave()
        self._scale.load(None)
        for optimizer, groups in zip(self._optimizers, self._federations):
            for group, options in zip(optimizer.param_groups, groups):
                for name in group.keys() - options.keys() - {"params"}:
                    del group[name]
                by_round = SCHEDULED if self._schedules.is_federations(optimizer) else ()
                put(group, {name: value for name, value in options.items() if name not in by_round})
        self._federations = None
        if self._steps is not None:
            self._steps.enter(None)

    def commit(self) -> None:
        """The round is complete: what its clients left is their state from now on."""
        for client, states, pace in self._staged:
            if self.policy == "keep":
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
        return {
            "states": {
                c: [_by_index(o, s) for o, s in zip(self._optimizers, all_)] for c, all_ in self._states.items()
            },
            "paces": self._paces,
            "scale": self._scale.state_dict(),
        }

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

    def _put(self, options: Options) -> None:
        for optimizer, groups in zip(self._optimizers, options):
            for group, values in zip(optimizer.param_groups, groups):
                put(group, values)

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
                        if (name in may if name in SCHEDULED else self.policy == "keep")
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
    def value(v: Any) -> Any:
        return v.clone() if isinstance(v, Tensor) else deepcopy(v)

    return defaultdict(dict, {p: {k: value(v) for k, v in entries.items()} for p, entries in state.items()})


def _by_index(optimizer: Optimizer, state: Any) -> dict[int, Any]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: state[p] for i, p in enumerate(parameters) if p in state}


class OptimizerOptions:
    """Remembers the options of ``configure_optimizers`` before Lightning restores a checkpoint, so that changed options
    have effect.

    Lightning restores an optimizer with all its options: a learning rate given on resume would change nothing. Here
    what ``configure_optimizers`` gives now is compared with what it gave when the run was started. Where nothing
    differs, everything goes on as restored. An option that differs is used.

    Args:
        trainer: with its optimizers set up.

    Attributes:
        asked: what there is, and the options of every parameter group, then of every scheduler, as text. To be saved.
    """

    def __init__(self, trainer: L.Trainer) -> None:
        self._optimizers = trainer.optimizers
        self._options = [_options(group) for group in self._groups()]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedulers = [type(scheduler).__name__ for scheduler in schedulers]
        optimizers = [f"{type(each).__name__} ({len(each.param_groups)} groups)" for each in trainer.optimizers]
        self.asked: dict[str, Any] = {
            "kinds": ", ".join(optimizers + self._schedulers),
            "options": [_texts(options) for options in self._options + [each.state_dict() for each in schedulers]],
        }

    def check(self, before: dict[str, Any]) -> None:
        """Whether what differs from ``before``, the ``asked`` of the run's start, can be used.

        Raises:
            ConfigurationError: another class or number of optimizers, groups or schedulers; other options together with
                a scheduler.
        """
        if before["kinds"] != self.asked["kinds"]:
            raise ConfigurationError(
                f"the run was started with {before['kinds']} and is resumed with {self.asked['kinds']}: an optimizer's "
                "state is of no use to another. Resume with the same; its options, such as the learning rate, may "
                "change."
            )
        differ: dict[str, None] = {}
        for was, now in zip(before["options"], self.asked["options"]):
            # Names that only one of them has are another version's of torch.
            names = [name for name in was if name in now and was[name] != now[name]]
            differ |= dict.fromkeys(f"{name} is {now[name]} and was {was[name]}" for name in names)
        if differ and self._schedulers:
            raise ConfigurationError(
                f"{', '.join(differ)}: with {self._schedulers[0]}, the learning rate follows from what has happened so "
                "far and cannot be changed on resume. Resume with what the run was started with."
            )

    def apply(self, before: dict[str, Any]) -> None:
        """After Lightning's restore: use what differs from ``before``."""
        for group, options, texts in zip(self._groups(), self._options, before["options"]):
            group.update({k: v for k, v in options.items() if k in texts and _text(v) != texts[k]})

    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: deepcopy(value) for name, value in group.items() if name != "params"}


def _text(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _texts(options: dict[str, Any]) -> dict[str, str]:
    return {name: _text(value) for name, value in options.items()}
