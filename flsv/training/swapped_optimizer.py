"""SwappedOptimizer: an optimizer with the state and the options of the client that trains."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache, partial
from inspect import getattr_static
from typing import Any, Literal, TypedDict

import lightning as L
import torch
from lightning.fabric.utilities.types import Optimizable
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from torch.optim import Adagrad
from torch.utils._pytree import tree_map_only

from flsv.utilities.plain_values import CONSTANT_TYPES, are_equal, copied, is_plain

#: Names of the options of a parameter group that learning-rate schedulers (torch's and timm's) change.
SCHEDULED_OPTIONS = {"lr", "initial_lr", "max_lr", "min_lr", "lr_scale", "weight_decay", "betas"}
SCHEDULED_OPTIONS |= {"momentum", "base_momentum", "max_momentum"}
#: Options of an optimizer: one ``{option: value}`` per parameter group.
Group = dict[str, Any]
Options = list[Group]
#: An optimizer's state by parameter, or by its number.
OptimizerState = dict[Any, Any]
Policy = Literal["reset", "persist"]
#: Attributes that every LightningModule has.
_LIGHTNINGS_ATTRIBUTES = frozenset(vars(L.LightningModule()))
_MISSING = object()


class StoredState(TypedDict):
    """State of an optimizer that a client keeps.

    ``state`` is as in ``Optimizer.state_dict()``: the keys are the parameters' indices, and items that belong to no
    parameter have the optimizer's own keys. ``attributes`` are plain attributes, such as a wrapper's counters."""

    state: OptimizerState
    attributes: dict[str, Any]


class SwappedOptimizer:
    """An optimizer with the state and the options of the client that trains."""

    def __init__(self, name: str, optimizer: Any, outer_optimizer: Any | None = None) -> None:
        self.name = name
        self.optimizer = optimizer
        self.outer_optimizer = outer_optimizer
        self.has_client_state = False
        holds_optimizer = any(map(is_optimizer, _attributes_of(optimizer).values()))
        self._is_unwrapped = outer_optimizer is None and not holds_optimizer
        self._configured_attributes = self._plain_attributes()

    @property
    def _groups(self) -> Options:
        """Return the parameter groups, without those of the outer optimizer, which are swapped there."""
        groups: Options = self.optimizer.param_groups
        if self.outer_optimizer is None:
            return groups
        ids_of_outer_groups = {id(group) for group in self.outer_optimizer.param_groups}
        return [group for group in groups if id(group) not in ids_of_outer_groups]

    def hidden_values(self) -> dict[str, Any]:
        """Return the attributes that are not swapped, by their paths."""
        values = {}
        for name, value in _attributes_of(self.optimizer).items():
            inner_optimizers: list[SwappedOptimizer] = []
            _collect_optimizers(name, value, self.optimizer, collected=inner_optimizers)
            if not is_plain(value) and not inner_optimizers:
                values[f"{self.name}.{name}"] = value
        return values

    def switch_to(self, mode: Literal["train", "eval"]) -> None:
        """Let a schedule-free optimizer write the weights of one of its modes into the module: in ``"train"`` those at
        which it takes gradients, in ``"eval"`` their average, which is the model."""
        has_modes = hasattr(self.optimizer, "train") and hasattr(self.optimizer, "eval")
        if has_modes and self.outer_optimizer is None:
            getattr(self.optimizer, mode)()

    def store_federation_options(self) -> None:
        """Store the options that :meth:`leave` restores."""
        self.switch_to("eval")  # without a state this does not change the weights
        self._federation_options = options_of(self._groups)

    def enter(self, stored: StoredState | None, options: Options) -> None:
        """Load the state and the options that a client has stored, or start without state."""
        self.has_client_state = True
        self._stored_options = options
        for group, values in zip(self._groups, options):
            set_options(group, values)
        self._options_at_entry = options_of(self._groups)

        if stored is None:
            self._begin_anew()
        else:
            state = self.optimizer.state
            state.clear()
            state.update(_state_by_parameter(self.optimizer, stored["state"]))
            self._set_attributes(stored["attributes"])
        self.switch_to("train")
        self.optimizer.zero_grad()

    def _begin_anew(self) -> None:
        """Give the optimizer the state and the attributes with which it began."""
        state = self.optimizer.state
        state.clear()
        state.update(initial_state(self.optimizer, self.optimizer.param_groups))
        self._set_attributes(self._configured_attributes)

    def state(self) -> StoredState:
        """Return the state for the client to keep, without copies of ``state``."""
        return {"state": _state_by_index(self.optimizer), "attributes": self._plain_attributes()}

    def client_options(self, scheduled: bool, policy: Policy) -> Options:
        """Return the options that the client's training has changed, in this round or before."""
        options_of_groups = []
        for index, options in enumerate(options_of(self._groups)):
            options_at_entry = _options_of_group(self._options_at_entry, index)
            options_before_round = _options_of_group(self._stored_options, index)
            client_options = {}
            for name, value in options.items():
                belongs_to_client = policy == "persist"
                if name in SCHEDULED_OPTIONS:
                    belongs_to_client = scheduled
                if not belongs_to_client:
                    continue
                value_at_entry = options_at_entry.get(name, _MISSING)
                is_unchanged = value is value_at_entry or are_equal(value, value_at_entry)
                if name in options_before_round or not is_unchanged:
                    client_options[name] = value
            options_of_groups.append(client_options)
        return options_of_groups

    def leave(self, scheduled_names: set[str]) -> None:
        """Restore the federation's state and options, but not those that schedulers set once a round."""
        self.has_client_state = False
        self._begin_anew()
        for group, federation_options in zip(self._groups, self._federation_options):
            client_only_names = group.keys() - federation_options.keys() - {"params"}
            for name in client_only_names:
                del group[name]
            options_to_restore = {
                name: value
                for name, value in federation_options.items()
                if name not in scheduled_names
            }
            set_options(group, options_to_restore)

    def move_state(self, stored: StoredState) -> StoredState:
        """Return a client's state from a checkpoint on the parameters' device."""
        optimizer = self.optimizer
        device = parameters_of(optimizer)[0].device
        move = partial(_move, device=device)
        if self._is_unwrapped:
            # load_state_dict moves the tensors. Read them back, and empty the optimizer's state.
            groups = optimizer.state_dict()["param_groups"]
            optimizer.load_state_dict({"state": stored["state"], "param_groups": groups})
            state = _state_by_index(optimizer)
            optimizer.state = defaultdict(dict)
        else:  # load_state_dict of a wrapper loads the state of the optimizer that it holds
            state = tree_map_only(Tensor, move, stored["state"])
        attributes = tree_map_only(Tensor, move, stored["attributes"])
        return {"state": state, "attributes": attributes}

    def _plain_attributes(self) -> dict[str, Any]:
        """Copy the optimizer's plain attributes, such as a wrapper's counters."""
        return {
            name: copied(value)
            for name, value in _attributes_of(self.optimizer).items()
            if is_plain(value)
        }

    def _set_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in _attributes_of(self.optimizer).items():
            if name not in values and is_plain(value):
                delattr(self.optimizer, name)
        for name, value in values.items():
            current_value = getattr(self.optimizer, name, None)
            if not are_equal(current_value, value):
                setattr(self.optimizer, name, copied(value))


def find_optimizers(trainer: L.Trainer) -> list[SwappedOptimizer]:
    """Find the trainer's optimizers, those that they hold, and those that attributes of the module hold."""
    # Each call below appends what it finds.
    optimizers: list[SwappedOptimizer] = []
    for index, optimizer in enumerate(trainer.optimizers):
        _collect_optimizers(
            f"optimizers.{index}", optimizer, outer_optimizer=None, collected=optimizers
        )
    for prefix, layer in trainer.lightning_module.named_modules():
        path = f"module.{prefix}" if prefix else "module"
        for name, value in _attributes_of(layer).items():
            _collect_optimizers(f"{path}.{name}", value, outer_optimizer=None, collected=optimizers)
    return optimizers


def is_optimizer(value: Any) -> bool:
    """Return whether a value has the attributes that Lightning requires of an optimizer."""
    # Few objects have a step, and looking for all attributes takes ten times as long.
    if getattr_static(value, "step", None) is None:
        return False
    try:
        return isinstance(value, Optimizable)
    except Exception:  # the check may run a property, which may raise any error
        return False


def parameters_of(optimizer: Any) -> list[Tensor]:
    """List the parameters in the groups of an optimizer."""
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


def options_of(groups: Iterable[Group]) -> Options:
    """Copy the options of an optimizer's parameter groups."""
    copies = []
    for group in groups:
        options = dict(group)
        del options["params"]
        for name, value in options.items():
            if type(value) not in CONSTANT_TYPES:
                options[name] = _copied_option(value)
        copies.append(options)
    return copies


def set_options(group: Group, options: Group) -> None:
    """Write ``options`` into a parameter group, in place for tensors of equal shape."""
    for name, value in options.items():
        current_value: Any = group.get(name)
        are_tensors = isinstance(current_value, Tensor) and isinstance(value, Tensor)
        if not are_tensors or current_value.shape != value.shape:
            group[name] = deepcopy(value)
        elif current_value is not value:
            with torch.no_grad():
                current_value.copy_(value)


def _collect_optimizers(
    name: str, value: Any, outer_optimizer: Any | None, collected: list[SwappedOptimizer]
) -> None:
    """Append an optimizer, and those that it holds, to ``collected``."""
    if isinstance(value, dict):
        for key, item in value.items():
            _collect_optimizers(f"{name}.{key}", item, outer_optimizer, collected)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _collect_optimizers(f"{name}.{index}", item, outer_optimizer, collected)
    elif isinstance(value, LightningOptimizer):
        _collect_optimizers(name, value.optimizer, outer_optimizer, collected)
    elif is_optimizer(value):
        if any(swapped_optimizer.optimizer is value for swapped_optimizer in collected):
            return
        collected.append(SwappedOptimizer(name, value, outer_optimizer))
        for attribute, item in _attributes_of(value).items():
            _collect_optimizers(f"{name}.{attribute}", item, value, collected)


@cache
def _attributes_of_torch() -> frozenset[str]:
    # The first optimizer of a class changes the class, so this is not done when the file is imported.
    optimizer = torch.optim.SGD([torch.zeros(1)])
    set_by_schedulers = {"step", "_opt_called", "_step_count"}
    return frozenset(vars(optimizer).keys() | set_by_schedulers)


def _attributes_of(value: Any) -> dict[str, Any]:
    """Return an object's attributes without those that torch and Lightning give it."""
    if isinstance(value, nn.Module):
        names_to_skip = _LIGHTNINGS_ATTRIBUTES
    else:
        names_to_skip = _attributes_of_torch()
    attributes: dict[str, Any] = getattr(value, "__dict__", {})
    return {name: item for name, item in attributes.items() if name not in names_to_skip}


def _copied_option(value: Any) -> Any:
    if is_plain(value):
        return copied(value)
    return deepcopy(value)


def _options_of_group(options: Options, index: int) -> Mapping[str, Any]:
    """Return the options of one parameter group, or an empty mapping."""
    if index < len(options):
        return options[index]
    return {}


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device, except counters of steps, as in torch."""
    if tensor.ndim == 0:
        return tensor
    return tensor.to(device)


def initial_state(optimizer: Any, groups: Iterable[Group]) -> OptimizerState:
    """Return the state by parameter with which an optimizer begins that is like ``optimizer`` and has these groups."""
    if not isinstance(optimizer, Adagrad):  # others make their state in their first step
        return {}
    # The groups are copied, since a constructor adds options to them.
    copied_groups = [dict(group) for group in groups]
    return Adagrad(copied_groups, **optimizer.defaults).state


def _state_by_index(optimizer: Any) -> OptimizerState:
    """Return an optimizer's state with the parameters' indices as keys, without copies."""
    index_of_parameter = {
        parameter: index for index, parameter in enumerate(parameters_of(optimizer))
    }
    # An item that belongs to no parameter has its own key.
    return {index_of_parameter.get(key, key): value for key, value in optimizer.state.items()}


def _state_by_parameter(optimizer: Any, stored: OptimizerState) -> OptimizerState:
    """Copy a client's stored state with the optimizer's parameters as keys."""
    parameters = dict(enumerate(parameters_of(optimizer)))
    return {parameters.get(key, key): _copied_option(value) for key, value in stored.items()}
