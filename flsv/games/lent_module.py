"""LentModule: the training run's own module, used to evaluate other models and restored afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, Dataset

from flsv._lightning.private import progress_of, trainer_of
from flsv.core.parameter_space import ParameterSpace
from flsv.data.federated_data import FederatedData
from flsv.utilities.errors import ConfigurationError, listed
from flsv.utilities.object_states import ObjectState, VersionState, hidden_state_of, states_of
from flsv.utilities.reachable import Part, walk

#: Types of objects that a walk from a module, or from a data module, does not enter: evaluating a model only reads
#: them, or :func:`_reachable` lists their parts that are states.
_NOT_ENTERED_TYPES = (Dataset, DataLoader, L.LightningDataModule, L.Trainer)
_NOT_ENTERED_IN_DATA = (Dataset, DataLoader, FederatedData, L.Trainer, nn.Module)
#: Number of entries from which a data module's tensor is data, which are not copied.
_MAX_COPIED_ENTRIES = 1000


class LentModule:
    """Snapshot of all that evaluating a model can change, which :meth:`restore` writes back.

    These are all objects to which the module refers, as :func:`flsv.utilities.reachable.walk` finds them, and of its
    trainer the optimizers, the schedulers, the loops' progress and the data module. Data sets, large tensors of the
    data module, and the parameters that are constant in ``space`` are left out.
    """

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace | None = None,
    ) -> None:
        # (parameter, requires_grad, gradient)
        self._gradient_states = []
        for parameter in module.parameters():
            self._gradient_states.append((parameter, parameter.requires_grad, parameter.grad))
        self._states: list[ObjectState] = []
        constant_ids = _constant_ids(module, space)
        for path, value in _reachable(module):
            if not _is_left_uncopied(path, value, constant_ids):
                self._states.extend(states_of(value))

    def restore(self) -> None:
        """Set everything back to its state at construction."""
        for state in self._states:
            state.restore()
        for parameter, requires_grad, gradient in self._gradient_states:
            parameter.requires_grad = requires_grad
            parameter.grad = gradient


@contextmanager
def refusing_lasting_changes(
    module: nn.Module,
    space: ParameterSpace | None = None,
    requester: str = "a metric",
) -> Iterator[None]:
    """Compare everything that scoring can change before and after the context, in which models are scored.

    Args:
        module: the module in which they are scored.
        space: the map between the module and vectors.
        requester: name of what needs the scores, for messages.

    Raises:
        ConfigurationError: something has changed, and was not restored. The message names it.
    """
    states, uncomparable_paths = _compared_states(module, space)
    if uncomparable_paths:
        names = listed(uncomparable_paths)
        rank_zero_info(f"flsv: whether scoring changes {names} is unknown: it cannot be pickled.")
    yield

    changes = _changed_names(states)
    if changes:
        raise ConfigurationError(
            f"{requester}: scoring a model changes {listed(changes)} of {type(module).__name__}, "
            "which cannot be restored: the run would train otherwise because it is measured. Keep this state in an "
            "attribute that holds numbers, tensors, lists or random generators, or leave it alone in validation."
        )


def _compared_states(
    module: nn.Module,
    space: ParameterSpace | None,
) -> tuple[list[tuple[str, ObjectState]], list[str]]:
    """Return the states that scoring can change, and names of what cannot be compared."""
    constant_ids = _constant_ids(module, space)
    states: list[tuple[str, ObjectState]] = []
    uncomparable_paths = []
    for path, value in _reachable(module):
        if isinstance(value, Tensor) and _is_left_uncopied(path, value, constant_ids):
            states.append((path, VersionState(value)))  # without a copy
            continue
        for state in states_of(value):  # those of an object's tensors, lists, and the like
            states.append((path, state))
        try:
            hidden_state = hidden_state_of(value)
        except Exception:  # whatever an object's own __reduce__ raises
            uncomparable_paths.append(path.removeprefix("."))
        else:
            if hidden_state is not None:
                states.append((path, hidden_state))
    return states, uncomparable_paths


def _changed_names(states: list[tuple[str, ObjectState]]) -> list[str]:
    names = []
    for path, state in states:
        if not state.is_unchanged():
            names.append(path.removeprefix("."))
    return list(dict.fromkeys(names))  # each once: an object may have several states


def _constant_ids(module: nn.Module, space: ParameterSpace | None) -> set[int]:
    """Return the ids of the parameters that training does not change."""
    if space is None:
        return set()
    return set(map(id, space.constants(module).values()))


def _is_left_uncopied(path: str, value: Any, constant_ids: set[int]) -> bool:
    """Return whether a tensor is not copied: it is constant, a gradient, or data."""
    if not isinstance(value, Tensor):
        return False
    if path.startswith(".datamodule"):
        return value.numel() > _MAX_COPIED_ENTRIES
    is_gradient = path.endswith(".grad")
    is_constant = id(value) in constant_ids
    return is_gradient or is_constant or is_lazy(value)


def _reachable(module: nn.Module) -> Iterator[Part]:
    """Yield ``(path, object)`` of what evaluating a model can change."""
    trainer = trainer_of(module)
    if trainer is None:
        yield from walk(module, "module", closed=_NOT_ENTERED_TYPES)
        return

    # The namespaces give paths their first names, such as "optimizers" and "datamodule".
    run_root = SimpleNamespace(
        module=module,
        optimizers=trainer.optimizers,
        schedulers=trainer.lr_scheduler_configs,
        progress=progress_of(trainer),
    )
    yield from walk(run_root, closed=_NOT_ENTERED_TYPES)
    data_root = SimpleNamespace(datamodule=getattr(trainer, "datamodule", None))
    yield from walk(data_root, closed=_NOT_ENTERED_IN_DATA)


@contextmanager
def lent(module: nn.Module, space: ParameterSpace | None = None) -> Iterator[LentModule]:
    """Yield a snapshot of a module's state, and restore the module when the context ends."""
    state = LentModule(module, space)
    try:
        yield state
    finally:
        state.restore()


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    tensors.update(module.named_buffers())
    return tensors


def named_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    """Return the dtypes of a module's parameters and buffers by name."""
    dtypes = {}
    for name, tensor in named_tensors(module).items():
        dtypes[name] = tensor.dtype
    return dtypes


def module_device(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer, or the CPU."""
    for tensor in named_tensors(module).values():
        return tensor.device
    return torch.device("cpu")


@torch.no_grad()
def put_private(module: nn.Module, space: ParameterSpace, private: Mapping[str, Tensor]) -> None:
    """Write ``private``, the state-dict entries that model vectors do not contain, into a module."""
    if not private:
        return
    module_tensors = named_tensors(module)
    for name, value in private.items():
        tensor = module_tensors.get(name)
        is_in_vectors = name in space.names
        if tensor is None or is_in_vectors:
            continue
        if tensor.shape == value.shape:
            tensor.copy_(value)
