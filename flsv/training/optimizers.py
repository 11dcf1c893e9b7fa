"""Optimizers: swaps the Trainer's optimizers, schedules and loss scale between clients."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities.types import LRSchedulerTypeTuple
from torch import Tensor
from torch.optim import Optimizer

from flsv._lightning.patches import new_optimizers
from flsv.training.client_batches import LocalSteps
from flsv.training.swapped_optimizer import (
    SCHEDULED,
    Options,
    StoredState,
    SwappedOptimizer,
    held_optimizers,
    options_of,
    parameters_of,
    put,
)
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import are_equal

#: Beginning of the names of optimizers that no attribute holds.
UNNAMED = "unnamed optimizer"


class Optimizers:
    """Optimizers, schedules and loss scale of a Trainer, which are swapped between clients."""

    def __init__(
        self, trainer: L.Trainer, policy: Literal["reset", "persist"], steps: LocalSteps
    ) -> None:
        self._trainer = trainer
        self._policy = policy
        self._schedules = Schedules(trainer, steps)
        self._swapped = held_optimizers(trainer)
        _check_optimizers(trainer, policy, self._swapped)
        self._stored: Mapping[str, Any] = {}
        scaler: Any = getattr(getattr(trainer, "precision_plugin", None), "scaler", None)
        self._scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._fresh_scale = None if self._scaler is None else dict(self._scaler.state_dict())

    def enter(self, client: int, stored: Mapping[str, Any]) -> None:
        """Load a client's schedules, options, optimizer state and loss scale, as :meth:`leave` returned them."""
        self._stored = stored
        pace = stored.get("pace") or {}
        for swapped in self._swapped:
            swapped.remember_federations_options()
        self._schedules.load(client, pace.get("schedulers"))
        for swapped in self._swapped:
            self._enter_optimizer(swapped)

        scale = stored.get("loss_scale")
        if self._scaler is not None:
            self._scaler.load_state_dict(self._fresh_scale if scale is None else scale)

    def enter_late(self, optimizer: Any) -> None:
        """Load a client's state into an optimizer that its module has made in training, before its first step."""
        if any(swapped.optimizer is optimizer for swapped in self._swapped):
            return
        self._find_optimizers()
        if not any(swapped.optimizer is optimizer for swapped in self._swapped):
            if self._policy == "persist":
                raise ConfigurationError(
                    f"{type(optimizer).__name__} steps, and neither the module nor an optimizer holds it in an "
                    "attribute, so that clients cannot keep its state. Hold it in an attribute of the module, or set "
                    'FederatedLoop(optimizer_state="reset").'
                )
            self._swapped.append(SwappedOptimizer(f"{UNNAMED} {id(optimizer)}", optimizer))
        for swapped in self._swapped:
            if not swapped.is_entered:
                swapped.remember_federations_options()
                self._enter_optimizer(swapped)

    def leave(self) -> dict[str, Any]:
        """Restore the federation's optimizers, and return the state that the client keeps."""
        client_state: dict[str, Any] = {}
        if self._scaler is not None:
            client_state["loss_scale"] = dict(self._scaler.state_dict())
            self._scaler.load_state_dict(self._fresh_scale)

        entered = [swapped for swapped in self._swapped if swapped.is_entered]
        if self._policy == "persist":
            client_state["optimizer"] = {swapped.name: swapped.state() for swapped in entered}
        options = {swapped.name: self._client_options(swapped) for swapped in entered}
        schedulers = self._schedules.leave()
        for swapped in entered:
            is_by_round = self._schedules.is_federations(swapped.optimizer)
            swapped.leave(options_by_round=SCHEDULED if is_by_round else set())
        # An optimizer without a name is found again at its next first step.
        self._swapped = [
            swapped for swapped in self._swapped if not swapped.name.startswith(UNNAMED)
        ]

        has_options = any(any(groups) for groups in options.values())
        if schedulers or has_options:
            client_state["pace"] = {"schedulers": schedulers, "options": options}
        return client_state

    def _client_options(self, swapped: SwappedOptimizer) -> Options:
        by_round = self._schedules.is_federations(swapped.optimizer)
        return swapped.client_options(scheduled=not by_round, policy=self._policy)

    def restored(self, stored: Mapping[str, StoredState]) -> dict[str, StoredState]:
        """Move a client's optimizer states from a checkpoint to the optimizers' device."""
        placed = dict(stored)
        for swapped in self._swapped:
            if swapped.name in stored:
                placed[swapped.name] = swapped.placed(stored[swapped.name])
        return placed

    def write_upload(self) -> bool:
        """Let optimizers overwrite the module's weights by those to send, and return whether any did."""
        is_written = False
        for optimizer in self._trainer.optimizers:
            if hasattr(optimizer, "upload_parameters"):
                optimizer.upload_parameters()
                is_written = True
        return is_written

    def holder_of(self, optimizer: Any) -> Any | None:
        """Return the optimizer that holds ``optimizer`` in an attribute, or None."""
        for swapped in self._swapped:
            if swapped.optimizer is optimizer:
                return swapped.holder
        return None

    def _find_optimizers(self) -> None:
        """Add the optimizers that the trainer, its optimizers or its module hold, and that are not yet known."""
        swapped_by_name = {swapped.name: swapped for swapped in self._swapped}
        for swapped in held_optimizers(self._trainer):
            present = swapped_by_name.get(swapped.name)
            # An optimizer that the module makes anew takes the place of its last one.
            if present is None or present.optimizer is not swapped.optimizer:
                swapped_by_name[swapped.name] = swapped
        self._swapped = list(swapped_by_name.values())

    def _enter_optimizer(self, swapped: SwappedOptimizer) -> None:
        states = self._stored.get("optimizer") or {}
        pace = self._stored.get("pace") or {}
        options = pace.get("options", {})
        swapped.enter(states.get(swapped.name), options.get(swapped.name, []))


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
            if not are_equal(scheduler.state_dict(), state):
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
        self._options: Options = []
        kinds = []
        for optimizer in trainer.optimizers:
            self._options += options_of(optimizer.param_groups)
            kinds.append(f"{type(optimizer).__name__} ({len(optimizer.param_groups)} groups)")

        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._schedulers = [type(scheduler).__name__ for scheduler in schedulers]
        options_to_compare = list(self._options)
        options_to_compare += [scheduler.state_dict() for scheduler in schedulers]
        texts = []
        for options in options_to_compare:
            texts.append({name: _text(value) for name, value in options.items()})
        self.configured_options: dict[str, Any] = {
            "kinds": ", ".join(kinds + self._schedulers),
            "options": texts,
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


def _check_optimizers(
    trainer: L.Trainer, policy: str, swapped_optimizers: Iterable[SwappedOptimizer]
) -> None:
    """Check that optimizers train the parameters of the trainer's module only."""
    parameter_ids = set(map(id, trainer.lightning_module.parameters()))
    is_restricted = policy == "persist" or trainer.accumulate_grad_batches != 1
    for swapped in swapped_optimizers:
        optimizer = swapped.optimizer
        foreign_shapes = []
        if optimizer.state_dict():  # Lightning's stand-in has an empty one
            for tensor in parameters_of(optimizer):
                if id(tensor) not in parameter_ids:
                    foreign_shapes.append(list(tensor.shape))
        if foreign_shapes:
            raise ConfigurationError(
                f"{type(optimizer).__name__} trains tensors of shape {foreign_shapes} that are no parameters of the "
                "module: they would pass from client to client. Make them nn.Parameter attributes of the module."
            )
        if is_restricted and hasattr(optimizer, "upload_parameters"):
            raise ConfigurationError(
                f"{type(optimizer).__name__} starts anew with every client and takes several steps per batch. Set "
                'FederatedLoop(optimizer_state="reset") and Trainer(accumulate_grad_batches=1).'
            )
