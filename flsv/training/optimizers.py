"""Optimizers: swaps the Trainer's optimizers, schedules and loss scale between clients."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities.types import LRSchedulerTypeTuple
from torch import Tensor
from torch.optim import Optimizer

from flsv._lightning.patches import new_optimizers
from flsv.training.client_batches import LocalSteps
from flsv.utilities.errors import ConfigurationError

#: Names of the options of a parameter group that learning-rate schedulers (torch's and timm's) change.
SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "lr_scale", "weight_decay", "betas"}
SCHEDULED |= {"momentum", "base_momentum", "max_momentum"}
#: Options of several optimizers: for each optimizer a list with one ``{option: value}`` per parameter group.
Options = list[list[dict[str, Any]]]
#: An optimizer's state as in ``Optimizer.state_dict()``. The keys are the parameters' numbers; entries that belong to
#: no parameter have the optimizer's own keys.
ByIndex = dict[Any, Any]


class Optimizers:
    """Optimizers, schedules and loss scale of a Trainer, which are swapped between clients."""

    def __init__(
        self, trainer: L.Trainer, policy: Literal["reset", "persist"], steps: LocalSteps
    ) -> None:
        self._optimizers, self._policy = trainer.optimizers, policy
        self._schedules = Schedules(trainer, steps)
        _check_optimizers(trainer, policy)
        self._federations: Options = []
        scaler: Any = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._fresh_scale = None if self._scaler is None else dict(self._scaler.state_dict())

    def enter(self, client: int, kept: Mapping[str, Any]) -> None:
        """Load a client's schedules, options, optimizer state and loss scale, as :meth:`leave` returned them."""
        pace, states, scale = kept.get("pace") or {}, kept.get("optimizer"), kept.get("loss_scale")
        self._federations = options_of(self._optimizers)
        self._schedules.load(client, pace.get("schedulers"))
        self._kept: Options = pace.get("options", [])
        for optimizer, groups in zip(self._optimizers, self._kept):
            for group, values in zip(optimizer.param_groups, groups):
                put(group, values)
        self._begun = options_of(self._optimizers)
        for i, optimizer in enumerate(self._optimizers):
            optimizer.state = defaultdict(dict) if states is None else _of(optimizer, states[i])
            optimizer.zero_grad()
        if self._scaler is not None:
            self._scaler.load_state_dict(self._fresh_scale if scale is None else scale)

    def leave(self) -> dict[str, Any]:
        """Restore the federation's optimizers, and return the state that the client keeps."""
        left: dict[str, Any] = {}
        if self._scaler is not None:
            left["loss_scale"] = dict(self._scaler.state_dict())
            self._scaler.load_state_dict(self._fresh_scale)
        if self._policy == "persist":
            left["optimizer"] = [_by_index(optimizer) for optimizer in self._optimizers]
        for optimizer in self._optimizers:
            optimizer.state = defaultdict(dict)
        own = self._own(options_of(self._optimizers))
        schedulers = self._schedules.leave()
        for optimizer, groups in zip(self._optimizers, self._federations):
            for group, options in zip(optimizer.param_groups, groups):
                for name in group.keys() - options.keys() - {"params"}:
                    del group[name]
                by_round = SCHEDULED if self._schedules.is_federations(optimizer) else ()
                put(group, {name: value for name, value in options.items() if name not in by_round})
        if schedulers or any(any(groups) for groups in own):
            left["pace"] = {"schedulers": schedulers, "options": own}
        return left

    def restored(self, kept: list[ByIndex]) -> list[ByIndex]:
        """Move a client's optimizer states from a checkpoint to the optimizers' device."""
        placed = []
        for optimizer, by_index in zip(self._optimizers, kept):
            optimizer.load_state_dict(
                {"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]}
            )
            placed.append(_by_index(optimizer))
            optimizer.state = defaultdict(dict)
        return placed

    def write_upload(self) -> bool:
        """Let optimizers overwrite the module's weights by those to send, and return whether any did."""
        uploading: list[Any] = [
            each for each in self._optimizers if hasattr(each, "upload_parameters")
        ]
        for optimizer in uploading:
            optimizer.upload_parameters()
        return bool(uploading)

    def _own(self, options: Options) -> Options:
        """Return the options that the client's training has changed, in this round or before."""
        result: Options = []
        for i, (optimizer, groups) in enumerate(zip(self._optimizers, options)):
            scheduled = not self._schedules.is_federations(optimizer)
            result.append([])
            for j, group in enumerate(groups):
                begun, kept = _group(self._begun, i, j), _group(self._kept, i, j)
                own = {}
                for name, value in group.items():
                    changed = (
                        name in kept or name not in begun or not equal_states(begun[name], value)
                    )
                    if changed and (scheduled if name in SCHEDULED else self._policy == "persist"):
                        own[name] = value
                result[-1].append(own)
        return result


class Schedules:
    """Learning-rate schedulers of a fit, each set to the position of the client that trains."""

    def __init__(self, trainer: L.Trainer, steps: LocalSteps) -> None:
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
        """Return whether an optimizer's scheduler steps once per round."""
        return any(each.optimizer is optimizer for each in self._by_round)

    def load(self, client: int, states: dict[int, Any] | None) -> None:
        """Set the schedulers to the client's last ``states``, or without these to its first step."""
        self._begun = [
            deepcopy(scheduler.state_dict()) for scheduler in self._by_round if self._manual
        ]
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
        """Return schedulers made for the client's number of steps. None: the fit's own are right for it."""
        if not self._steps.length_was_read:
            return None
        number = self._steps.of(client)
        if number == self._steps.most():
            return None
        if number not in self._families:
            self._families[number] = _Family(self._trainer, self._places, self._steps)
        return self._families[number]

    def _check(self) -> None:
        for scheduler in self._schedulers:
            if self.is_federations(scheduler.optimizer):
                raise ConfigurationError(
                    "one optimizer has a scheduler that steps per batch and one that steps per round: the learning "
                    "rate would belong to the client and to the federation at once. Chain them in one scheduler "
                    "(torch.optim.lr_scheduler.SequentialLR or ChainedScheduler)."
                )
        if kept := _kept_schedulers(self._trainer):
            raise ConfigurationError(
                f"{kept[0]} is a learning-rate scheduler that configure_optimizers does not return: its state would "
                "pass from client to client. Return it with {'scheduler': ..., 'interval': 'step'}."
            )

    def _check_owner(self) -> None:
        """Check that a client's training has not stepped a scheduler that steps once per round."""
        begun, self._begun = self._begun, []
        for scheduler, state in zip(self._by_round, begun):
            if not equal_states(scheduler.state_dict(), state):
                raise ConfigurationError(
                    f"{type(scheduler).__name__} is stepped while a client trains, and its interval is a round's: it "
                    "would pass from client to client. Return it with {'scheduler': ..., 'interval': 'step'}, or step "
                    "it in on_train_epoch_end only."
                )


class _Family:
    """Set of schedulers made for the number of steps of the client that trains now."""

    def __init__(self, trainer: L.Trainer, places: list[int], steps: LocalSteps) -> None:
        lengths = steps.tell_batches()
        try:
            self._optimizers, schedulers = new_optimizers(trainer)
        finally:
            lengths.restore()
        self._used = trainer.optimizers
        self._groups = [
            [
                {k: deepcopy(v) for k, v in group.items() if k in SCHEDULED}
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]
        self._schedulers = [schedulers[place] for place in places]
        self._fresh = [deepcopy(scheduler.state_dict()) for scheduler in self._schedulers]
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a schedule before a step

    def enter(self, schedulers: list[Any]) -> None:
        """Overwrite the fit's ``schedulers`` with those of this set, at their first step."""
        for optimizer, used, fresh in zip(self._optimizers, self._used, self._groups):
            optimizer.param_groups = used.param_groups
            for group, options in zip(used.param_groups, fresh):
                put(group, options)
        for scheduler, mine, fresh_state in zip(schedulers, self._schedulers, self._fresh):
            mine.load_state_dict(deepcopy(fresh_state))
            optimizer = scheduler.optimizer
            scheduler.__dict__ = vars(mine)
            scheduler.optimizer = optimizer


def _kept_schedulers(trainer: L.Trainer) -> list[str]:
    """Return the names of schedulers that the module holds but ``configure_optimizers`` does not return."""

    def parts(scheduler: Any) -> Iterator[int]:
        yield id(scheduler)
        for part in getattr(scheduler, "_schedulers", ()):
            yield from parts(part)

    returned = {part for each in trainer.lr_scheduler_configs for part in parts(each.scheduler)}
    return [
        f"{name}.{attribute}".lstrip(".")
        for name, layer in trainer.lightning_module.named_modules()
        for attribute, value in vars(layer).items()
        if isinstance(value, LRSchedulerTypeTuple) and id(value) not in returned
    ]


class OptimizerOptions:
    """Options that ``configure_optimizers`` has set, as they were before a checkpoint is restored."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._optimizers = trainer.optimizers
        self._options = [group for groups in options_of(trainer.optimizers) for group in groups]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedulers = [type(scheduler).__name__ for scheduler in schedulers]
        optimizers = [
            f"{type(each).__name__} ({len(each.param_groups)} groups)"
            for each in trainer.optimizers
        ]
        self.configured_options: dict[str, Any] = {
            "kinds": ", ".join(optimizers + self._schedulers),
            "options": [
                {name: _text(value) for name, value in options.items()}
                for options in self._options + [each.state_dict() for each in schedulers]
            ],
        }

    def check(self, before: dict[str, Any]) -> None:
        """Check that options which differ from the saved ones, ``before``, can be applied."""
        if before["kinds"] != self.configured_options["kinds"]:
            raise ConfigurationError(
                f"the run was started with {before['kinds']} and is resumed with {self.configured_options['kinds']}: "
                "an optimizer's state is of no use to another. Resume with the same; its options, such as the learning "
                "rate, may change."
            )
        differ: dict[str, None] = {}
        for was, now in zip(before["options"], self.configured_options["options"]):
            # An option that only one of the two dictionaries has comes from another version of torch.
            names = [name for name in was if name in now and was[name] != now[name]]
            differ |= dict.fromkeys(f"{name} is {now[name]} and was {was[name]}" for name in names)
        if differ and self._schedulers:
            raise ConfigurationError(
                f"{', '.join(differ)}: with {self._schedulers[0]}, the learning rate follows from what has happened so "
                "far and cannot be changed on resume. Resume with what the run was started with."
            )

    def apply(self, before: dict[str, Any]) -> None:
        """Apply the options that differ from the saved ones, ``before``."""
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        for group, options, texts in zip(groups, self._options, before["options"]):
            group.update({k: v for k, v in options.items() if k in texts and _text(v) != texts[k]})


def _text(value: Any) -> str:
    """Return an option's value as text, without memory addresses."""
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def options_of(optimizers: Sequence[Optimizer]) -> Options:
    """Copy the options of each optimizer's parameter groups."""
    return [
        [
            {k: copied(v) for k, v in group.items() if k != "params"}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def copied(value: Any) -> Any:
    """Copy one value of an optimizer's options or state."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str, tuple, type(None))) else deepcopy(value)


def put(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Write ``options`` into a parameter group, in place for tensors of equal shape."""
    for name, value in options.items():
        present = group.get(name)
        if (
            isinstance(present, Tensor)
            and isinstance(value, Tensor)
            and present.shape == value.shape
        ):
            if present is not value:
                with torch.no_grad():
                    present.copy_(value)
        else:
            group[name] = deepcopy(value)


def equal_states(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return (
            isinstance(a, Tensor)
            and isinstance(b, Tensor)
            and a.shape == b.shape
            and bool((a == b).all())
        )
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return bool(a == b)


def _group(options: Options, optimizer: int, group: int) -> Mapping[str, Any]:
    """Return the options of one parameter group, or an empty mapping."""
    groups = options[optimizer] if optimizer < len(options) else []
    return groups[group] if group < len(groups) else {}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _by_index(optimizer: Optimizer) -> ByIndex:
    """Return an optimizer's state with the parameters' indices as keys, without copies."""
    index = {p: i for i, p in enumerate(_parameters(optimizer))}
    return {
        index.get(key, key) if isinstance(key, Tensor) else key: value
        for key, value in optimizer.state.items()
    }


def _of(optimizer: Optimizer, kept: Mapping[Any, Any]) -> Any:
    """Return a client's stored state with the optimizer's parameters as keys."""
    parameters = dict(enumerate(_parameters(optimizer)))
    state: Any = defaultdict(dict)
    for key, entries in kept.items():
        by_name = isinstance(entries, dict)
        state[parameters.get(key, key)] = (
            {n: copied(v) for n, v in entries.items()} if by_name else copied(entries)
        )
    return state


def _check_optimizers(trainer: L.Trainer, policy: str) -> None:
    """Check that optimizers train the parameters of the trainer's module only."""
    known = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    for optimizer in trainer.optimizers:
        for group in (
            optimizer.param_groups if optimizer.state_dict() else []
        ):  # Lightning's stand-in has no groups
            strange = [list(tensor.shape) for tensor in group["params"] if id(tensor) not in known]
            if strange:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} trains tensors of shape {strange} that are no parameters of the "
                    "module: they would pass from client to client. Make them nn.Parameter attributes of the module."
                )
        if hasattr(optimizer, "upload_parameters") and (
            policy == "persist" or trainer.accumulate_grad_batches != 1
        ):
            raise ConfigurationError(
                f"{type(optimizer).__name__} starts anew with every client and takes several steps per batch. Set "
                'FederatedLoop(optimizer_state="reset") and Trainer(accumulate_grad_batches=1).'
            )
