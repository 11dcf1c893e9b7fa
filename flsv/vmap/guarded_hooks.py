"""Guards against code that reads what differs between the models that train at once: weights, steps and logs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import lightning as L
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchmetrics import Metric
from torchmetrics.aggregation import SumMetric

from flsv._lightning.patches import Patch, PatchedAttributes
from flsv.data import FederatedDataModule
from flsv.utilities.errors import NotBatched
from flsv.utilities.plain_values import is_plain
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


#: Reads of a tensor's values that are no operation of torch's.
_READS_WITHOUT_OPERATION = frozenset(
    {Tensor.tolist, Tensor.__repr__, Tensor.untyped_storage, Tensor.data_ptr, Tensor.__dlpack__}
)
#: Attributes of a metric by which it does not tell what it has seen.
_NEUTRAL_ATTRIBUTES = frozenset(vars(SumMetric())).difference(
    {"_computed", "_forward_cache", "_update_count"}
)


class _WeightReads(TorchDispatchMode):
    """Mode in which an operation on a tensor at one of the addresses raises ``refuse(what is read)``."""

    def __init__(self, names: Mapping[int, str], refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._names = names
        self._refuse = refuse

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and _address(value) in self._names:
                raise self._refuse(f"{self._names[_address(value)]!r} of the module")
        return func(*args, **kwargs)


class _OtherReads(TorchFunctionMode):
    """Mode in which reads that are no operations raise ``refuse(what is read)``: of tensors at the addresses, and of
    gradients, which rows do not leave behind.
    """

    def __init__(self, names: Mapping[int, str], refuse: Callable[[str], Exception]) -> None:
        super().__init__()
        self._names = names
        self._refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_gradient = func == Tensor.grad.__get__  # type: ignore[union-attr]
        if is_gradient or func in _READS_WITHOUT_OPERATION:
            name = self._names.get(_address(args[0]))
            if name is not None:
                gradient = "the gradient of " if is_gradient else ""
                raise self._refuse(f"{gradient}{name!r} of the module")
        return func(*args, **(kwargs or {}))


def _names_by_address(module: nn.Module) -> dict[int, str]:
    """Return the names of the module's parameters and buffers, and of its metrics' tensors, by address."""
    names = {}
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        names[_address(tensor)] = name
    for layer_name, layer in module.named_modules():
        if isinstance(layer, Metric):  # which is not updated in steps of rows
            for attribute, value in vars(layer).items():
                if isinstance(value, Tensor):
                    names[_address(value)] = f"{layer_name}.{attribute}"
    names.pop(0, None)  # of tensors without elements
    return names


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Unreadable:
    """Stand-in for a value that each coalition has for itself. Whatever is done with it raises an error."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        self._error = error

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise self._error()

    __bool__ = __len__ = __iter__ = __getitem__ = __contains__ = __call__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
    __int__ = __float__ = __index__ = __str__ = _refuse
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
            is_of_program = is_overridden(name, self._module, L.LightningModule) and not is_of_flsv
            # Lightning's own steps a schedule, which may be a function of the program.
            if is_of_program or name == "lr_scheduler_step":
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
        names = _names_by_address(self._module)
        with (
            _raised_again() as refuse,
            self._denied_members(refuse),
            deny_client_attributes(self._module, refuse),
            PatchedAttributes(
                silent_metrics(self._module, ("forward", "update", "compute"), refuse)
            ),
            PatchedAttributes(_unreadable_values(self._module, refuse)),
            _WeightReads(names, refuse),
            _OtherReads(names, refuse),
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


def _unreadable_values(module: nn.Module, refuse: Callable[[str], Exception]) -> list[Patch]:
    """Return changes by which plain values of a module's metrics cannot be read: states that are lists, the number of
    updates, and all that the program's own metrics keep.
    """
    changes: list[Patch] = []
    for name, layer in module.named_modules():
        if not isinstance(layer, Metric):
            continue
        for attribute, value in vars(layer).items():
            if attribute in _NEUTRAL_ATTRIBUTES or isinstance(value, Tensor):
                continue
            if is_plain(value):
                unreadable = Unreadable(partial(refuse, f"{name}.{attribute} of the module"))
                changes.append((layer, attribute, unreadable))
    return changes
