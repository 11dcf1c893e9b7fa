"""Guards against code that reads what differs between the models that train at once: weights, steps and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flsv._lightning.patches import PatchedAttributes
from flsv.utilities.errors import NotBatched
from flsv.vmap.row_step import deny_client_attributes

#: A module's hooks that are called between the rounds and at the end of training, when the module holds the model of
#: one of the coalitions only.
HOOKS_BETWEEN_ROUNDS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "lr_scheduler_step",
)


class _WeightReads(TorchDispatchMode):
    """Mode in which an operation on one of a module's parameters or buffers raises ``refuse(what is read)``."""

    def __init__(self, module: nn.Module, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._refuse = refuse
        self._addresses = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._addresses[_address(tensor)] = name
        self._addresses.pop(0, None)  # of tensors without elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _address(value) in self._addresses:
                raise self._refuse(f"{self._addresses[_address(value)]!r} of the module")
        return func(*args, **kwargs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def guarded(module: L.LightningModule) -> Iterator[None]:
    """Raise NotBatched if code within this context reads the module's weights, or an attribute of its Trainer that
    belongs to a single model, also if the code catches the error.
    """
    refusals: list[NotBatched] = []

    def refuse(what: str) -> NotBatched:
        refusals.append(NotBatched(f"a hook reads {what}, which each coalition has for itself."))
        return refusals[-1]

    try:
        with deny_client_attributes(module, refuse), _WeightReads(module, refuse):
            yield
    except Exception as error:
        if not refusals or error is refusals[0]:
            raise
        raise refusals[0] from error
    if refusals:
        raise refusals[0]


def guard_hooks(module: L.LightningModule) -> PatchedAttributes:
    """Guard a module's own hooks between rounds. Undo it by ``restore`` of the result."""
    changes = []
    for name in HOOKS_BETWEEN_ROUNDS:
        if is_overridden(name, module, L.LightningModule):
            changes.append((module, name, _guarded_hook(module, getattr(module, name))))
    return PatchedAttributes(changes)


def _guarded_hook(module: L.LightningModule, hook: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(hook)
    def guarded_hook(*args: Any, **kwargs: Any) -> Any:
        with guarded(module):
            return hook(*args, **kwargs)

    return guarded_hook
