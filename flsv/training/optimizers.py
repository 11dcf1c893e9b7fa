"""Optimizers: swaps the Trainer's optimizers, schedules and loss scale between clients."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from copy import deepcopy
from typing import Any

import lightning as L
from lightning.pytorch.utilities.types import LRSchedulerTypeTuple
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler

from flsv._lightning.patches import new_optimizers
from flsv.training.client_batches import LocalSteps
from flsv.training.swapped_optimizer import (
    SCHEDULED_OPTIONS,
    Options,
    Policy,
    StoredState,
    SwappedOptimizer,
    find_optimizers,
    options_of,
    parameters_of,
    set_options,
)
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import are_equal

#: Beginning of the names of optimizers that no attribute holds.
UNNAMED_PREFIX = "unnamed optimizer"


class Optimizers:
    """Optimizers, schedules and loss scale of a Trainer, which are swapped between clients."""

    def __init__(self, trainer: L.Trainer, policy: Policy, steps: LocalSteps) -> None:
        self._trainer = trainer
        self._policy = policy
        self._schedules = Schedules(trainer, steps)
        self._swapped_optimizers = find_optimizers(trainer)
        _check_optimizers(trainer, policy, self._swapped_optimizers)
        self._stored: Mapping[str, Any] = {}
        self._scaler: Any = None
        self._initial_scale: dict[str, Any] | None = None
        precision_plugin = getattr(trainer, "precision_plugin", None)
        scaler = getattr(precision_plugin, "scaler", None)
        if scaler is not None and scaler.is_enabled():
            self._scaler = scaler
            self._initial_scale = dict(scaler.state_dict())

    def enter(self, client: int, stored: Mapping[str, Any]) -> None:
        """Load a client's schedules, options, optimizer state and loss scale, as :meth:`leave` returned them."""
        self._stored = stored
        for swapped_optimizer in self._swapped_optimizers:
            swapped_optimizer.store_federation_options()
        # The schedules first: they set options that the client's stored options then overwrite.
        pace = stored.get("pace") or {}  # see `leave`
        self._schedules.load(client, pace.get("schedulers"))
        for swapped_optimizer in self._swapped_optimizers:
            self._enter_optimizer(swapped_optimizer)

        if self._scaler is not None:
            loss_scale = stored.get("loss_scale")
            if loss_scale is None:  # the client's first round
                loss_scale = self._initial_scale
            self._scaler.load_state_dict(loss_scale)

    def enter_new_optimizer(self, optimizer: Any) -> None:
        """Load a client's state into an optimizer that the module has made in training, before its first step."""
        if self._is_known(optimizer):
            return
        self._add_new_optimizers()  # those that attributes hold
        if not self._is_known(optimizer):
            self._add_unnamed_optimizer(optimizer)
        for swapped_optimizer in self._swapped_optimizers:
            if not swapped_optimizer.has_client_state:
                swapped_optimizer.store_federation_options()
                self._enter_optimizer(swapped_optimizer)

    def _add_unnamed_optimizer(self, optimizer: Any) -> None:
        if self._policy == "persist":
            raise ConfigurationError(
                f"no attribute of the module or of an optimizer holds the {type(optimizer).__name__} that has "
                "stepped, so clients cannot keep its state. Store it in an attribute of the module, or set "
                'FederatedLoop(optimizer_state="reset").'
            )
        name = f"{UNNAMED_PREFIX} {id(optimizer)}"
        self._swapped_optimizers.append(SwappedOptimizer(name, optimizer))

    def _is_known(self, optimizer: Any) -> bool:
        return any(
            swapped_optimizer.optimizer is optimizer
            for swapped_optimizer in self._swapped_optimizers
        )

    def leave(self) -> dict[str, Any]:
        """Restore the federation's optimizers, and return the state that the client keeps."""
        client_state: dict[str, Any] = {}
        if self._scaler is not None:
            client_state["loss_scale"] = dict(self._scaler.state_dict())
            self._scaler.load_state_dict(self._initial_scale)  # until the next client enters

        client_optimizers = [
            swapped_optimizer
            for swapped_optimizer in self._swapped_optimizers
            if swapped_optimizer.has_client_state
        ]
        if self._policy == "persist":
            client_state["optimizer"] = {
                optimizer.name: optimizer.state() for optimizer in client_optimizers
            }
        pace = self._leave_schedules(client_optimizers)  # the client's schedules and options
        if pace:
            client_state["pace"] = pace
        self._leave_optimizers(client_optimizers)
        return client_state

    def _leave_schedules(self, entered: Iterable[SwappedOptimizer]) -> dict[str, Any]:
        """Reset the schedules. Return the client's schedules and options, empty if they are the federation's."""
        options_by_name = {}
        has_client_options = False
        for swapped_optimizer in entered:
            has_round_scheduler = self._schedules.has_round_scheduler(swapped_optimizer.optimizer)
            options_of_groups = swapped_optimizer.client_options(
                scheduled=not has_round_scheduler, policy=self._policy
            )
            options_by_name[swapped_optimizer.name] = options_of_groups
            has_client_options |= any(options_of_groups)
        scheduler_states = self._schedules.leave()
        if scheduler_states or has_client_options:
            return {"schedulers": scheduler_states, "options": options_by_name}
        return {}

    def _leave_optimizers(self, entered: Iterable[SwappedOptimizer]) -> None:
        """Restore the federation's optimizers, and forget those without a name."""
        for swapped_optimizer in entered:
            has_round_scheduler = self._schedules.has_round_scheduler(swapped_optimizer.optimizer)
            swapped_optimizer.leave(
                scheduled_names=SCHEDULED_OPTIONS if has_round_scheduler else set()
            )
        # An optimizer without a name is found again at its next first step.
        self._swapped_optimizers = [
            swapped_optimizer
            for swapped_optimizer in self._swapped_optimizers
            if not swapped_optimizer.name.startswith(UNNAMED_PREFIX)
        ]

    def move_states(self, states: Mapping[str, StoredState]) -> dict[str, StoredState]:
        """Return a client's optimizer states from a checkpoint on the optimizers' device."""
        moved_states = dict(states)
        for swapped_optimizer in self._swapped_optimizers:
            if swapped_optimizer.name in states:
                moved_states[swapped_optimizer.name] = swapped_optimizer.move_state(
                    states[swapped_optimizer.name]
                )
        return moved_states

    def write_model(self) -> None:
        """Let schedule-free optimizers write the averaged weights, the client's model, into the module."""
        for swapped_optimizer in self._swapped_optimizers:
            if swapped_optimizer.has_client_state:
                swapped_optimizer.switch_to("eval")

    def write_upload(self) -> bool:
        """Let optimizers overwrite the module's weights by those to send, and return whether any did."""
        is_written = False
        for optimizer in self._trainer.optimizers:
            if hasattr(optimizer, "upload_parameters"):  # such as pFedMe's
                optimizer.upload_parameters()
                is_written = True
        return is_written

    def outer_optimizer_of(self, optimizer: Any) -> Any | None:
        """Return the optimizer that holds ``optimizer`` in an attribute, or None."""
        for swapped_optimizer in self._swapped_optimizers:
            if swapped_optimizer.optimizer is optimizer:
                return swapped_optimizer.outer_optimizer
        return None

    def _add_new_optimizers(self) -> None:
        """Add optimizers of the trainer, its optimizers or module that are not yet known."""
        swapped_by_name = {
            swapped_optimizer.name: swapped_optimizer
            for swapped_optimizer in self._swapped_optimizers
        }
        for optimizer_now in find_optimizers(self._trainer):
            known_optimizer = swapped_by_name.get(optimizer_now.name)
            # If the module makes an optimizer again, the new one replaces the old one.
            if known_optimizer is None or known_optimizer.optimizer is not optimizer_now.optimizer:
                swapped_by_name[optimizer_now.name] = optimizer_now
        self._swapped_optimizers = list(swapped_by_name.values())

    def _enter_optimizer(self, swapped_optimizer: SwappedOptimizer) -> None:
        states = self._stored.get("optimizer") or {}
        pace = self._stored.get("pace") or {}
        options = pace.get("options", {})
        swapped_optimizer.enter(
            states.get(swapped_optimizer.name), options.get(swapped_optimizer.name, [])
        )


class Schedules:
    """Learning-rate schedulers of a fit, each set to the position of the client that trains."""

    def __init__(self, trainer: L.Trainer, steps: LocalSteps) -> None:
        self._trainer = trainer
        self._steps = steps
        self._is_manual = not trainer.lightning_module.automatic_optimization
        self._separate_schedulers({})
        self._check_schedulers()
        # By the numbers of steps and batches for which they are made, and their positions.
        self._schedulers_by_length: dict[Any, _SchedulersOfLength] = {}
        # While a client trains: the states that its schedulers have between clients, and those of rounds' schedulers.
        self._fit_states: list[Any] | None = None
        self._round_scheduler_states: list[Any] | None = None

    def _separate_schedulers(self, states: Mapping[int, Any]) -> None:
        """Separate schedulers of clients from those of rounds, given the ``states`` that the present client has stored.

        With manual optimization a module steps its schedulers itself, whatever their interval is. A scheduler that has
        been stepped between rounds is a scheduler of rounds.
        """
        self._schedulers: list[Any] = []  # those that step per batch
        self._indices: list[int] = []  # their positions in the trainer's list
        self._round_schedulers: list[Any] = []  # those that step per round
        self._round_optimizers: list[Optimizer] = []  # the optimizers of these
        for index, config in enumerate(self._trainer.lr_scheduler_configs):
            scheduler: Any = config.scheduler
            is_per_batch = config.interval == "step"
            has_stepped_between_rounds = _has_stepped(scheduler)  # now no client trains
            has_stepped_in_client = index in states and not is_per_batch
            if has_stepped_in_client and has_stepped_between_rounds:
                raise _stepped_in_and_between_rounds(scheduler)
            is_stepped_by_hand = self._is_manual and not has_stepped_between_rounds
            if is_per_batch or is_stepped_by_hand:
                self._schedulers.append(scheduler)
                self._indices.append(index)
            else:
                self._round_schedulers.append(scheduler)
                self._round_optimizers.append(scheduler.optimizer)
        self._attributes = [vars(scheduler) for scheduler in self._schedulers]

    def has_round_scheduler(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer's scheduler steps once per round."""
        return optimizer in self._round_optimizers

    def load(self, client: int, states: dict[int, Any] | None) -> None:
        """Set the schedulers to the client's last ``states``, or to the first step if None."""
        self._stored_states = states or {}  # by position
        if self._is_manual:  # training_step may step any scheduler
            self._separate_schedulers(self._stored_states)
            self._check_schedulers()
            self._round_scheduler_states = _copy_states(self._round_schedulers)
        if not self._schedulers:
            return

        self._fit_states = _copy_states(self._schedulers)  # which `leave` restores
        client_schedulers = self._schedulers_for(client)
        if client_schedulers is not None:
            client_schedulers.load_into(self._schedulers)
        for index, scheduler in zip(self._indices, self._schedulers):
            if index in self._stored_states:
                scheduler.load_state_dict(deepcopy(self._stored_states[index]))
        self._client_states_at_start = _copy_states(self._schedulers)

    def leave(self) -> dict[int, Any]:
        """Return the client's scheduler states by position, and reset the schedulers."""
        self._check_round_schedulers()
        if self._fit_states is None:
            return {}
        client_states = dict(self._stored_states)
        for index, scheduler, state_at_entry in zip(
            self._indices, self._schedulers, self._client_states_at_start
        ):
            state = deepcopy(scheduler.state_dict())
            if not are_equal(state, state_at_entry):
                client_states[index] = state
        self._reset_schedulers(self._fit_states)
        self._fit_states = None
        return client_states

    def _reset_schedulers(self, states: Iterable[Any]) -> None:
        for scheduler, attributes, state in zip(self._schedulers, self._attributes, states):
            # `load` may have given the scheduler the attributes of another one.
            scheduler.__dict__ = attributes
            scheduler.load_state_dict(deepcopy(state))

    def _schedulers_for(self, client: int) -> _SchedulersOfLength | None:
        """Return schedulers for the client's numbers of steps and batches. None: use the fit's schedulers."""
        if not self._steps.length_was_read:
            return None  # no schedule depends on a number of steps or batches
        lengths = self._steps.lengths_of(client)
        if lengths == self._steps.largest_lengths():
            return None  # the fit's schedulers are made for these lengths
        key = lengths, tuple(self._indices)
        if key not in self._schedulers_by_length:
            # configure_optimizers reads these numbers from the trainer, which now reports this client's.
            self._schedulers_by_length[key] = _SchedulersOfLength(self._trainer, self._indices)
        return self._schedulers_by_length[key]

    def _check_schedulers(self) -> None:
        for scheduler in self._schedulers:
            if self.has_round_scheduler(scheduler.optimizer):
                raise ConfigurationError(
                    "one optimizer has a scheduler that steps per batch, which belongs to a client, and one that steps "
                    "per round, which belongs to the federation. Combine them in one scheduler "
                    "(torch.optim.lr_scheduler.SequentialLR or ChainedScheduler)."
                )
        names = _unreturned_schedulers(self._trainer)
        if names:
            raise ConfigurationError(
                f"configure_optimizers does not return the learning-rate scheduler {names[0]}, so all clients would "
                "share its state. Return it with {'scheduler': ..., 'interval': 'step'}."
            )

    def _check_round_schedulers(self) -> None:
        """Check that a client's training has not stepped a scheduler that steps once per round."""
        if self._round_scheduler_states is None:
            return
        states_before_client = self._round_scheduler_states
        self._round_scheduler_states = None  # no client trains
        for scheduler, state_before_client in zip(self._round_schedulers, states_before_client):
            if not are_equal(scheduler.state_dict(), state_before_client):
                raise _stepped_in_and_between_rounds(scheduler)


def _has_stepped(scheduler: Any) -> bool:
    """Return whether a scheduler has been stepped. True for a scheduler that does not count its steps."""
    if isinstance(scheduler, ChainedScheduler):
        return any(map(_has_stepped, scheduler._schedulers))
    num_steps: int = getattr(scheduler, "last_epoch", 1)
    return num_steps > 0


def _stepped_in_and_between_rounds(scheduler: Any) -> ConfigurationError:
    return ConfigurationError(
        f"{type(scheduler).__name__} is stepped both while a client trains and between rounds, so clients would share "
        "its state. Step it in training_step only, and return it with {'scheduler': ..., 'interval': 'step'}, or step "
        "it in on_train_epoch_end only."
    )


class _SchedulersOfLength:
    """Set of schedulers made for the number of steps of the client that trains now."""

    def __init__(self, trainer: L.Trainer, indices: list[int]) -> None:
        self._optimizers, schedulers = new_optimizers(trainer)
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # else torch warns of a missing step
        self._fit_optimizers = trainer.optimizers
        self._initial_options = [_scheduled_options(optimizer) for optimizer in self._optimizers]
        self._schedulers = [schedulers[index] for index in indices]
        self._initial_states = _copy_states(self._schedulers)

    def load_into(self, fit_schedulers: list[Any]) -> None:
        """Overwrite the fit's schedulers with those of this set, at their first step."""
        # An optimizer's schedulers write into its parameter groups, from now on into those of the fit's optimizer.
        for optimizer, fit_optimizer, initial_options in zip(
            self._optimizers, self._fit_optimizers, self._initial_options
        ):
            optimizer.param_groups = fit_optimizer.param_groups
            for group, options in zip(optimizer.param_groups, initial_options):
                set_options(group, options)

        for fit_scheduler, scheduler, initial_state in zip(
            fit_schedulers, self._schedulers, self._initial_states
        ):
            scheduler.load_state_dict(deepcopy(initial_state))
            # From here on both schedulers share one dictionary of attributes, with the trainer's optimizer in it.
            fit_optimizer = fit_scheduler.optimizer
            fit_scheduler.__dict__ = vars(scheduler)
            fit_scheduler.optimizer = fit_optimizer


def _scheduled_options(optimizer: Optimizer) -> Options:
    """Copy each group's options that schedulers change."""
    options_of_groups = []
    for group in optimizer.param_groups:
        options = {name: deepcopy(group[name]) for name in SCHEDULED_OPTIONS & group.keys()}
        options_of_groups.append(options)
    return options_of_groups


def _copy_states(schedulers: Iterable[Any]) -> list[Any]:
    return [deepcopy(scheduler.state_dict()) for scheduler in schedulers]


def _unreturned_schedulers(trainer: L.Trainer) -> list[str]:
    """Return the names of schedulers that the module holds but ``configure_optimizers`` does not return."""
    returned_ids: set[int] = set()
    for config in trainer.lr_scheduler_configs:
        returned_ids.update(_scheduler_ids(config.scheduler))

    names = []
    for prefix, layer in trainer.lightning_module.named_modules():
        for attribute, value in vars(layer).items():
            if isinstance(value, LRSchedulerTypeTuple) and id(value) not in returned_ids:
                names.append(f"{prefix}.{attribute}".lstrip("."))
    return names


def _scheduler_ids(scheduler: Any) -> Iterator[int]:
    yield id(scheduler)
    for chained in getattr(scheduler, "_schedulers", ()):
        yield from _scheduler_ids(chained)


class OptimizerOptions:
    """Optimizer options as set by ``configure_optimizers``, before a checkpoint overwrites them."""

    def __init__(self, trainer: L.Trainer) -> None:
        self._optimizers = trainer.optimizers
        self._options: Options = []
        optimizer_descriptions = []
        for optimizer in trainer.optimizers:
            groups = optimizer.param_groups
            self._options += options_of(groups)
            optimizer_descriptions.append(f"{type(optimizer).__name__} ({len(groups)} groups)")

        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._scheduler_names = [type(scheduler).__name__ for scheduler in schedulers]
        scheduler_states = [scheduler.state_dict() for scheduler in schedulers]
        texts_by_name = []
        for options in [*self._options, *scheduler_states]:
            texts_by_name.append({name: _option_text(value) for name, value in options.items()})
        self.configured_options: dict[str, Any] = {
            "kinds": ", ".join(optimizer_descriptions + self._scheduler_names),
            "options": texts_by_name,
        }

    def check(self, saved: dict[str, Any]) -> None:
        """Check that options which differ from the saved ones can be applied."""
        if saved["kinds"] != self.configured_options["kinds"]:
            raise ConfigurationError(
                f"the run was started with {saved['kinds']} and is resumed with {self.configured_options['kinds']}, "
                "which cannot continue from the saved state. Resume with the same optimizers and schedulers. Their "
                "options, such as the learning rate, may change."
            )
        changes = self.changes(saved)
        if changes and self._scheduler_names:
            raise ConfigurationError(
                f"the optimizer's options have changed on resume ({', '.join(changes)}), but with "
                f"{self._scheduler_names[0]} the learning rate depends on the rounds before. Resume with the options "
                "that the run was started with."
            )

    def changes(self, saved: dict[str, Any]) -> list[str]:
        """Describe each option that differs from the saved ones."""
        descriptions = []
        for saved_options, options in zip(saved["options"], self.configured_options["options"]):
            for name, saved_text in saved_options.items():
                # An option that only one of the two dictionaries has comes from another version of torch.
                text = options.get(name, saved_text)
                if text != saved_text:
                    descriptions.append(f"{name} is {text} and was {saved_text}")
        return list(dict.fromkeys(descriptions))  # groups often have the same options

    def apply(self, saved: dict[str, Any]) -> None:
        """Apply the options that differ from the saved ones."""
        groups = []
        for optimizer in self._optimizers:
            groups += optimizer.param_groups
        # The groups now have the checkpoint's options. `self._options` are what configure_optimizers has set.
        for group, configured_options, saved_texts in zip(groups, self._options, saved["options"]):
            for name, value in configured_options.items():
                was_changed = name in saved_texts and _option_text(value) != saved_texts[name]
                if was_changed:  # by the user since the run was started
                    group[name] = value


def _option_text(value: Any) -> str:
    """Return an option's value as text, without memory addresses."""
    if isinstance(value, Tensor):
        value = value.tolist()
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def _check_optimizers(
    trainer: L.Trainer, policy: str, swapped_optimizers: Iterable[SwappedOptimizer]
) -> None:
    parameter_ids = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    is_restricted = policy == "persist" or trainer.accumulate_grad_batches != 1
    for swapped_optimizer in swapped_optimizers:
        optimizer = swapped_optimizer.optimizer
        foreign_shapes = _foreign_shapes(optimizer, parameter_ids)
        if foreign_shapes:
            raise ConfigurationError(
                f"{type(optimizer).__name__} trains tensors of shape {foreign_shapes} that are not parameters of the "
                "module, so all clients would share them. Make them nn.Parameter attributes of the module."
            )
        if is_restricted and hasattr(optimizer, "upload_parameters"):  # such as pFedMe's
            raise ConfigurationError(
                f"{type(optimizer).__name__} starts without state at every client and takes several steps per batch. "
                'Set FederatedLoop(optimizer_state="reset") and Trainer(accumulate_grad_batches=1).'
            )


def _foreign_shapes(optimizer: Any, parameter_ids: Container[int]) -> list[list[int]]:
    """Return the shapes of an optimizer's tensors that are not among the module's parameters."""
    if not optimizer.state_dict():  # Lightning's mock optimizer has an empty one
        return []
    tensors = parameters_of(optimizer)
    return [list(tensor.shape) for tensor in tensors if id(tensor) not in parameter_ids]
