"""Functions that read, write and compare the options of optimizers' parameter groups, such as the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

#: Names of the options of a parameter group that learning-rate schedulers (torch's and timm's) change.
SCHEDULED = {"lr", "initial_lr", "max_lr", "min_lr", "lr_scale", "weight_decay", "betas"}
SCHEDULED |= {"momentum", "base_momentum", "max_momentum"}
#: Options of several optimizers: for each optimizer a list with one ``{option: value}`` per parameter group.
Options = list[list[dict[str, Any]]]


def options_of(optimizers: Sequence[Optimizer]) -> Options:
    """Copy the options of each optimizer's parameter groups."""
    return [
        [{k: copied(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def copied(value: Any) -> Any:
    """Copy one value of an optimizer's options or state."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value if isinstance(value, (int, float, str, tuple, type(None))) else deepcopy(value)


def put(group: dict[str, Any], options: dict[str, Any]) -> None:
    """Write ``options`` into a parameter group, and into its tensors where shapes agree."""
    for name, value in options.items():
        present = group.get(name)
        if isinstance(present, Tensor) and isinstance(value, Tensor) and present.shape == value.shape:
            if present is not value:
                with torch.no_grad():
                    present.copy_(value)
        else:
            group[name] = deepcopy(value)


def equal_states(a: Any, b: Any) -> bool:
    """Return whether two nested states are equal."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal_states(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(equal_states, a, b))
    return bool(a == b)
