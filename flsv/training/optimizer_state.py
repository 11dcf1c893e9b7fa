"""OptimizerState: each client's own state of the optimizers, such as momentum and Adam's moments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from flsv.training.group_options import copied
from flsv.training.slots import Slot
from flsv.utilities.errors import ConfigurationError

#: An optimizer's state as in ``Optimizer.state_dict()``. The keys are the parameters' numbers; entries that belong to
#: no parameter have the optimizer's own keys.
ByIndex = dict[Any, Any]


class OptimizerState(Slot):
    """Slot for each client's optimizer state, such as momentum."""

    name = "optimizer"

    def __init__(self, trainer: L.Trainer, policy: Literal["reset", "persist"]) -> None:
        self._optimizers, self._policy = trainer.optimizers, policy
        _check_parameters(trainer)
        for optimizer in self._optimizers:
            if hasattr(optimizer, "upload_parameters") and (
                policy == "persist" or trainer.accumulate_grad_batches != 1
            ):
                raise ConfigurationError(
                    f"{type(optimizer).__name__} starts anew with every client and takes several steps per batch. Set "
                    'FederatedLoop(optimizer_state="reset") and Trainer(accumulate_grad_batches=1).'
                )

    def enter(self, client: int, kept: list[ByIndex] | None) -> None:
        for i, optimizer in enumerate(self._optimizers):
            optimizer.state = defaultdict(dict) if kept is None else _of(optimizer, kept[i])
            optimizer.zero_grad()

    def leave(self) -> list[ByIndex] | None:
        left = [_by_index(optimizer) for optimizer in self._optimizers] if self._policy == "persist" else None
        for optimizer in self._optimizers:
            optimizer.state = defaultdict(dict)
        return left

    def restored(self, kept: list[ByIndex]) -> list[ByIndex]:
        placed = []
        for optimizer, by_index in zip(self._optimizers, kept):
            optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
            placed.append(_by_index(optimizer))
            optimizer.state = defaultdict(dict)
        return placed


def upload_parameters(trainer: L.Trainer) -> bool:
    """Let optimizers write the weights to send into the module, and return whether one has."""
    uploading = [optimizer for optimizer in trainer.optimizers if hasattr(optimizer, "upload_parameters")]
    for optimizer in uploading:
        optimizer.upload_parameters()
    return bool(uploading)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _by_index(optimizer: Optimizer) -> ByIndex:
    """Return an optimizer's state with the parameters' indices as keys, without copies."""
    index = {p: i for i, p in enumerate(_parameters(optimizer))}
    return {index.get(key, key) if isinstance(key, Tensor) else key: value for key, value in optimizer.state.items()}


def _of(optimizer: Optimizer, kept: Mapping[Any, Any]) -> Any:
    """Return a client's stored state with the optimizer's parameters as keys."""
    parameters = dict(enumerate(_parameters(optimizer)))
    return defaultdict(dict, {parameters.get(key, key): _copies(entries) for key, entries in kept.items()})


def _copies(entries: Any) -> Any:
    return {key: copied(value) for key, value in entries.items()} if isinstance(entries, dict) else copied(entries)


def _check_parameters(trainer: L.Trainer) -> None:
    """Check that optimizers train the parameters of the trainer's module only."""
    known = {id(parameter) for parameter in trainer.lightning_module.parameters()}
    for optimizer in trainer.optimizers:
        for group in optimizer.param_groups if optimizer.state_dict() else []:  # Lightning's stand-in has no groups
            strange = [list(tensor.shape) for tensor in group["params"] if id(tensor) not in known]
            if strange:
                raise ConfigurationError(
                    f"{type(optimizer).__name__} trains tensors of shape {strange} that are no parameters of the "
                    "module: they would pass from client to client. Make them nn.Parameter attributes of the module."
                )
