"""Guards against code that reads what differs between the models that train at once: weights, steps and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric

from flsv._lightning.patches import Patch, PatchedAttributes
from flsv.data import FederatedDataModule
from flsv.utilities.errors import NotBatched
from flsv.vmap.row_step import deny_client_attributes, silent_metrics

#: A module's hooks that are called between the rounds and at the end of training, when the module holds the model of
#: one of the coalitions only.
HOOKS_BETWEEN_ROUNDS = (
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "lr_scheduler_step",
)
#: A module's hooks before the first round, when the data are those of all clients.
HOOKS_AT_START = (
    "setup",
    "configure_model",
    "on_fit_start",
    "on_train_start",
    "configure_optimizers",
)


class _WeightReads(TorchDispatchMode):
    """Mode in which an operation on one of a module's parameters or buffers raises ``refuse(what is read)``."""

    def __init__(self, module: nn.Module, refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._refuse = refuse
        self._addresses = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            self._addresses[_address(tensor)] = name
        for layer_name, layer in module.named_modules():
            if isinstance(layer, Metric):  # which is not updated in steps of rows
                for state in layer._defaults:
                    value = getattr(layer, state)
                    if isinstance(value, Tensor):
                        self._addresses[_address(value)] = f"{layer_name}.{state}"
        self._addresses.pop(0, None)  # of tensors without elements

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _address(value) in self._addresses:
                raise self._refuse(f"{self._addresses[_address(value)]!r} of the module")
        return func(*args, **kwargs)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Unreadable:
    """Stand-in for a value that each coalition has for itself. Whatever is done with it raises an error."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error()

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __eq__ = __call__ = _refuse
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        raise self._error()

    def clear(self) -> None:
        """Do nothing, when a metric is reset."""


class Guard:
    """Guard of a module's hooks and steps, which may not read what each coalition has for itself.

    Args:
        module: the module, whose weights, metrics and Trainer's attributes belong to one coalition.
        data: the run's data module, whose members do.
    """

    def __init__(self, module: L.LightningModule, data: FederatedDataModule) -> None:
        self._module = module
        self._attributes_of_members = data.attributes_of_members()

    def hooks(self, names: Iterable[str], denies_model: bool) -> PatchedAttributes:
        """Guard a module's own hooks. Undo it by ``restore`` of the result."""
        changes = []
        for name in names:
            hook = getattr(self._module, name)
            # What flsv's own modules read of the members, they declare by `constants_of`.
            is_of_flsv = hook.__module__.startswith("flsv.")
            if is_overridden(name, self._module, L.LightningModule) and not is_of_flsv:
                changes.append((self._module, name, self._guarded_hook(hook, denies_model)))
        return PatchedAttributes(changes)

    def _guarded_hook(self, hook: Callable[..., Any], denies_model: bool) -> Callable[..., Any]:
        guarded = self.of_hook if denies_model else self.of_first_hook

        @wraps(hook)
        def guarded_hook(*args: Any, **kwargs: Any) -> Any:
            with guarded():
                return hook(*args, **kwargs)

        return guarded_hook

    @contextmanager
    def of_first_hook(self) -> Iterator[None]:
        """Raise NotBatched if code within this context reads which clients take part, also if it catches the error."""
        with _raised_again() as refuse, self._denied_members(refuse):
            yield

    @contextmanager
    def of_hook(self) -> Iterator[None]:
        """Raise NotBatched if code within this context reads which clients take part, the module's weights or metrics,
        or an attribute of its Trainer that belongs to a single model, also if it catches the error.
        """
        with (
            _raised_again() as refuse,
            self._denied_members(refuse),
            deny_client_attributes(self._module, refuse),
            PatchedAttributes(
                silent_metrics(self._module, ("forward", "update", "compute"), refuse)
            ),
            PatchedAttributes(_unreadable_lists(self._module, refuse)),
            _WeightReads(self._module, refuse),
        ):
            yield

    @contextmanager
    def of_step(self) -> Iterator[None]:
        """Raise NotBatched if a training step within this context reads which clients take part."""

        def refuse(what: str) -> NotBatched:
            return NotBatched(f"training_step reads {what}, which each coalition has for itself.")

        with self._denied_members(refuse):
            yield

    def _denied_members(self, refuse: Callable[[str], Exception]) -> PatchedAttributes:
        unreadable = Unreadable(partial(refuse, "the clients' data"))
        changes = [(owner, name, unreadable) for owner, name in self._attributes_of_members]
        return PatchedAttributes(changes)


@contextmanager
def _raised_again() -> Iterator[Callable[[str], NotBatched]]:
    """Yield a function that makes the error of a hook that reads something. The first one is raised at the end."""
    refusals: list[NotBatched] = []

    def refuse(what: str) -> NotBatched:
        refusals.append(NotBatched(f"a hook reads {what}, which each coalition has for itself."))
        return refusals[-1]

    try:
        yield refuse
    except Exception as error:
        if not refusals or error is refusals[0]:
            raise
        raise refusals[0] from error
    if refusals:
        raise refusals[0]


def _unreadable_lists(module: nn.Module, refuse: Callable[[str], Exception]) -> list[Patch]:
    """Return changes by which the states of a module's metrics that are lists cannot be read."""
    changes: list[Patch] = []
    for name, layer in module.named_modules():
        if not isinstance(layer, Metric):
            continue
        for state in layer._defaults:
            if isinstance(getattr(layer, state), list):
                unreadable = Unreadable(partial(refuse, f"{name}.{state} of the module"))
                changes.append((layer, state, unreadable))
    return changes
