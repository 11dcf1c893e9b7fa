"""ModuleCopies: copies of a module in which models are scored, so that scoring does not change the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torch._dynamo import OptimizedModule, external_utils
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from flsv._lightning.patches import WATCHERS, callbacks_of
from flsv._lightning.private import forget_compilation, trainer_of
from flsv._lightning.rounding import MAX_ROUNDING
from flsv._lightning.validation_run import copy_of_trainer
from flsv.core.parameter_space import ParameterSpace
from flsv.isolation.file_writes import files_put_back
from flsv.isolation.pickles import Pickled, Redirection, StandIn, checked_stand_ins, pickled
from flsv.isolation.program_state import present_state, restored_program
from flsv.isolation.run_copy import find_unpicklable_part
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.plain_values import digest, is_dense
from flsv.utilities.seeding import isolated_rngs

#: Types of objects to which both a copy and the run's module refer.
_SHARED_TYPES = (
    L.Trainer,
    L.Callback,
    L.LightningDataModule,
    Logger,
    Strategy,
    Dataset,
    DataLoader,
)


class ModuleCopies:
    """Snapshot of a module, from which each :meth:`load` returns a new copy, without ``torch.compile``.

    A copy refers to the run's Trainer and its callbacks, loggers, data modules and data sets, and to the parameters
    that are constant in ``space``. All other objects are copied, among them the callbacks of ``configure_callbacks``,
    with the references that they have to each other. If an attribute of a layer cannot be pickled, the copy has a
    stand-in in its place, which raises an error when it is used.

    Args:
        module: the module.
        space: the map between the module and vectors. None: no parameter is constant.
        are_blank: whether the caller writes a vector into each copy. The copies then share the memory of the weights
            that vectors contain, so only the last copy may be used.

    Raises:
        ConfigurationError: a copy cannot be made. The message has the path of the part.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> copies = ModuleCopies(module)
        >>> module_copy = copies.load()
        >>> module_copy is module, torch.equal(module_copy.weight, module.weight)
        (False, True)
    """

    _pickled: Pickled | None = None

    def __init__(
        self, module: nn.Module, space: ParameterSpace | None = None, *, are_blank: bool = False
    ) -> None:
        self._module = module
        self._trainer = trainer_of(module)
        # {id of a part that cannot be pickled: what stands in its place in a copy}
        self._stand_ins: dict[int, StandIn] = {}
        # References to these parts, so that no other object gets the id of one of them.
        self._refused_parts: list[Any] = []
        # The callbacks that the module has configured. The values that they log count as the module's.
        self._callbacks: list[L.Callback] = []

        # Objects to which both a copy and the run's module refer.
        self._shared_objects = _factories(module)
        if space is not None:
            self._shared_objects += space.constants(module).values()
        # Keys of the storages whose content copies need not have, because the caller overwrites it.
        self._blank_storages: set[int] = set()
        if space is not None and are_blank:
            self._blank_storages = _storages_of_vectors(module, space)
        self._program = present_state()
        self._take_snapshot()
        if self._trainer is not None and _configures_callbacks(module):
            self._copy_callbacks(self._trainer)

    def _copy_callbacks(self, trainer: L.Trainer) -> None:
        parts_of_module = [*self._module.modules(), *vars(self._module).values()]
        part_by_type = {type(part): part for part in parts_of_module}
        configured_types = self._types_of_configured_callbacks()
        for callback in callbacks_of(trainer):
            if type(callback) not in configured_types or isinstance(callback, WATCHERS):
                continue
            # If the module refers to the callback, its copy must refer to the same copy of the callback.
            callback_of_module: Any = part_by_type.get(type(callback), callback)
            self._callbacks.append(callback_of_module)
            for method_name in ("log", "log_dict"):
                self._shared_objects.append(vars(callback_of_module).get(method_name))
        self._take_snapshot()

    def _dump(self, part: Any) -> Pickled:
        return pickled(
            part,
            copied_ids=frozenset(map(id, self._callbacks)),
            shared_ids=frozenset(map(id, self._shared_objects)),
            shared_types=_SHARED_TYPES,
            blank_storages=self._blank_storages,
            stand_ins=self._stand_ins,
            program=self._program,
        )

    def _types_of_configured_callbacks(self) -> set[type]:
        module_copy = self.load()
        # The method of the class, because a coalition's module hides it by an attribute that configures no callbacks.
        callbacks: Any = type(module_copy).configure_callbacks(module_copy)
        if not isinstance(callbacks, Sequence):
            callbacks = [callbacks]
        return set(map(type, callbacks))

    def load(self) -> Any:
        """Return a new copy of the module. Its layers have the same modes (training or evaluation)."""
        module, *_ = self._load()
        return module

    def load_to_score(self, is_last: bool = False) -> Any:
        """Return a new copy of the module in evaluation mode. The program's references to the module are redirected to
        the copy, see :func:`isolated_scoring`. The last copy uses the snapshot's memory.
        """
        _refer_to_originals()  # in place of an earlier copy
        module, *_ = self._load(is_last, redirected=_redirected)
        return module.eval()

    def content_of(self, module_copy: nn.Module) -> Any:
        """Return an object by which the content of copies can be compared. The content of a copy that cannot be pickled
        differs from any other.
        """
        try:
            pickled_copy = self._dump(module_copy)
        except Exception:
            return object()
        return pickled_copy.bytes, digest(pickled_copy.storages)

    def load_with_trainer(self) -> tuple[L.LightningModule, L.Trainer]:
        """Return a new copy of the module, and a copy of its Trainer and optimizers by which it can be validated. The
        program's references are redirected to the copies, see :func:`isolated_scoring`.
        """
        module, optimizers, schedulers, callbacks = self._load(redirected=_redirected)
        trainer = copy_of_trainer(self._trainer, module)
        trainer.callbacks = callbacks
        for callback in callbacks:
            callback.log = module.log
            callback.log_dict = module.log_dict
        trainer.strategy.optimizers = optimizers
        trainer.strategy.lr_scheduler_configs = schedulers
        return module, trainer

    def _parts(self) -> tuple[Any, Any, Any, Any]:
        if self._trainer is None:
            return self._module, [], [], []
        optimizers = self._trainer.optimizers
        return self._module, optimizers, self._trainer.lr_scheduler_configs, self._callbacks

    def _take_snapshot(self) -> None:
        self._pickled = None
        self._snapshot()

    def _snapshot(self) -> Pickled:
        """Return the snapshot, which is taken again if a stand-in was added after it."""
        if self._pickled is None:
            self._pickled = self._call_with_stand_ins(lambda: self._dump(self._parts()))
        return self._pickled

    def _load(
        self, is_last: bool = False, redirected: list[Redirection] | None = None
    ) -> tuple[Any, Any, Any, Any]:
        def load_snapshot() -> Any:
            return self._snapshot().load(copies_memory=not is_last, redirected=redirected)

        module, optimizers, schedulers, callbacks = self._call_with_stand_ins(load_snapshot)
        if self._trainer is not None:
            module.trainer = self._trainer  # no LightningModule is pickled with it
        for layer in module.modules():
            _uncompile(layer)
        return module, optimizers, schedulers, callbacks

    def _call_with_stand_ins(self, function: Callable[[], Any]) -> Any:
        """Call ``function``, which pickles or loads the parts, and return its result. If it fails at an attribute of a
        layer, replace this attribute by a stand-in and call the function again.
        """
        while True:
            try:
                return function()
            except Exception as error:
                self._replace_refused_attribute(error)

    def _replace_refused_attribute(self, error: Exception) -> None:
        """Find the attribute at which pickling or loading has failed, and let copies have a stand-in for it."""
        module, optimizers, _, callbacks = self._parts()
        roots = {
            "the module": module,
            "the optimizers": optimizers,
            "the module's callbacks": callbacks,
        }
        part = find_unpicklable_part(roots, lambda part: self._dump(part).load())
        message = part.describe(f"models are scored in copies of {type(self._module).__name__}")
        if part.attribute is None:
            raise ConfigurationError(message) from error
        self._refused_parts.append(part.attribute)
        self._stand_ins[id(part.attribute)] = StandIn(message)
        self._pickled = None  # the next snapshot has the stand-in


@dataclass
class ScoringEffects:
    """The changes that scoring a model makes, beside those of random generators. None: not known yet."""

    #: Whether scoring changes the program: a global, an attribute of a class, an environment variable, or torch's
    #: settings.
    program: bool | None = None
    #: Whether ``forward`` changes the module in evaluation mode.
    module: bool | None = None

    @property
    def are_none(self) -> bool:
        """Return whether scoring is known to change neither the program nor the module."""
        return self.program is False and self.module is False


@contextmanager
def isolated_scoring(effects: ScoringEffects, seed: int, device: torch.device) -> Iterator[None]:
    """Context in which a model is scored. The random numbers do not depend on earlier scores, and autocast is off. At
    the end the global random generators and the program's globals are restored, and an error is raised if a stand-in
    was used.
    """
    with_gradients = torch.is_grad_enabled()
    with (
        torch.inference_mode(False),  # which enables gradients
        torch.set_grad_enabled(with_gradients),
        # Autocast applies only to the thread that has entered it, so it is off for the same arithmetic on all threads.
        torch.autocast(device.type, enabled=False),
        isolated_rngs(seed, "utility"),
        _restored(effects),
        files_put_back(),
        checked_stand_ins(),
    ):
        yield


#: The program's references to the run's objects that are redirected to copies while these are scored.
_redirected: list[Redirection] = []


@contextmanager
def _restored(effects: ScoringEffects) -> Iterator[None]:
    """Restore the program at the end of this context. If the first score shows that scoring does not change it, it is
    not restored in later contexts.
    """
    _redirected.clear()
    if effects.program is False:  # scoring does not change it
        try:
            yield
        finally:
            _refer_to_originals()
        return

    program = present_state()
    with restored_program(program):
        yield
        # References to copies are not changes by the program.
        _refer_to_originals()
        if effects.program is None:  # this is the first score
            effects.program = not program.is_present()


def _refer_to_originals() -> None:
    """Undo the redirection of the program's references to copies."""
    while _redirected:
        reference, original = _redirected.pop()
        reference.write(original)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Set a module into evaluation mode in this context."""
    layers = list(module.modules())
    modes = [layer.training for layer in layers]
    module.eval()
    try:
        yield
    finally:
        for layer, mode in zip(layers, modes):
            layer.training = mode


class ScoringCopies:
    """Copies of a module, into which models' vectors are written. Those of one round are made from one snapshot."""

    _is_in_round = False
    _copies_of_round: ModuleCopies | None = None

    def __init__(self, module: nn.Module, space: ParameterSpace) -> None:
        self._module = module
        self._space = space

    def begin_round(self) -> None:
        """Begin a round, within which the module does not change."""
        self._is_in_round = True
        self._copies_of_round = None

    def end_round(self) -> None:
        """Release the snapshot of the round."""
        self._is_in_round = False
        self._copies_of_round = None

    def take(self) -> ModuleCopies:
        """Return copies of the module as it is now."""
        if self._copies_of_round is not None:
            return self._copies_of_round
        copies = ModuleCopies(self._module, self._space, are_blank=True)
        if self._is_in_round:
            self._copies_of_round = copies
        return copies


def _storages_of_vectors(module: nn.Module, space: ParameterSpace) -> set[int]:
    """Return the keys of the storages that hold only tensors that model vectors contain."""
    storages = set()
    for name, tensor in named_tensors(module).items():
        is_plain = type(tensor) in (Tensor, nn.Parameter) and is_dense(tensor)
        if name not in space.names or not is_plain:
            continue
        storage = tensor.untyped_storage()
        if tensor.is_contiguous() and tensor.numel() * tensor.itemsize == storage.nbytes():
            storages.add(storage._cdata)
    return storages


def _configures_callbacks(module: nn.Module) -> bool:
    """Return whether a module's class has its own ``configure_callbacks``."""
    method_of_lightning = L.LightningModule.configure_callbacks
    method = getattr(type(module), "configure_callbacks", method_of_lightning)
    return method is not method_of_lightning


# The command line's factories refer to its parser, which would take longer to copy than a small module.
def _factories(module: nn.Module) -> list[Any]:
    factories = []
    for layer in module.modules():
        for value in vars(layer).values():
            if issubclass(type(value), partial) and _is_factory(value):
                factories.append(value)
    return factories


def _is_factory(factory: partial[Any]) -> bool:
    """Return whether a ``partial`` constructs objects: it wraps a class, or was created by jsonargparse."""
    if isinstance(factory.func, type):
        return True
    modules = [type(argument).__module__ for argument in factory.args]
    return any(module.startswith("jsonargparse.") for module in modules)


def _uncompile(layer: nn.Module) -> None:
    attributes = vars(layer)
    # layer.compile() has set this attribute.
    attributes.pop("_compiled_call_impl", None)
    # torch.compile(layer) has wrapped the layer in this module.
    if isinstance(layer, OptimizedModule):
        attributes["forward"] = layer._orig_mod.__call__
        return
    forget_compilation(attributes)

    # The program has set layer.forward = torch.compile(layer.forward), or another method.
    for name, value in list(attributes.items()):
        function = _function_before_compilation(value)
        if function is not None:
            attributes[name] = function


def _function_before_compilation(value: Any) -> Any:
    """Return the function that ``torch.compile`` has wrapped in ``value``, None for any other value."""
    if type(value) is StandIn:
        return None
    if isinstance(value, nn.Module):  # a submodule, which is uncompiled itself
        return None
    function: Any = getattr(value, "_torchdynamo_orig_callable", None)
    if _is_frame_of_dynamo(function):
        return function.__wrapped__  # the function of torch in the frame
    return function


def is_compiled(module: nn.Module) -> bool:
    """Return whether ``torch.compile`` was applied to a part of a module."""
    attributes = chain.from_iterable(vars(layer).values() for layer in module.modules())
    return any(hasattr(value, "_torchdynamo_orig_callable") for value in attributes)


def _is_frame_of_dynamo(function: Any) -> bool:
    """Return whether a function is the wrapper that dynamo puts around torch's own functions."""
    if not isinstance(function, FunctionType):
        return False
    return function.__code__.co_filename == external_utils.__file__


# ---- one model scored twice


@contextmanager
@torch.no_grad()
def other_weights(module: nn.Module, space: ParameterSpace) -> Iterator[None]:
    """Change a module's weights within this context, except those that its copies share with it."""
    constants = space.constants(module)
    constant_ids = set(map(id, constants.values()))
    weights = []
    for tensor in named_tensors(module).values():
        if is_lazy(tensor) or id(tensor) in constant_ids:
            continue
        is_number = tensor.is_floating_point() and is_dense(tensor)
        if is_number and not tensor.is_inference():
            weights.append((tensor, tensor.clone()))
    try:
        for tensor, _ in weights:
            tensor.add_(torch.ones_like(tensor))
        yield
    finally:
        for tensor, original in weights:
            tensor.copy_(original)


def are_repeated(result: Any, repeated_result: Any, device: torch.device) -> bool:
    """Return whether two results of models on a device are equal, on a CPU to the bit. Results are tensors, numbers, or
    structures of these.
    """
    tolerance = 0.0 if device.type == "cpu" else MAX_ROUNDING
    leaves = tree_leaves(result)
    repeated_leaves = tree_leaves(repeated_result)
    if len(leaves) != len(repeated_leaves):
        return False
    pairs = zip(leaves, repeated_leaves)
    return all(_are_close(leaf, repeated_leaf, tolerance) for leaf, repeated_leaf in pairs)


def _are_close(leaf: Any, repeated_leaf: Any, tolerance: float) -> bool:
    if not isinstance(leaf, Tensor | float | int):
        return True  # scores do not depend on objects of other types
    values = torch.as_tensor(leaf)
    repeated_values = torch.as_tensor(repeated_leaf)
    if values.shape != repeated_values.shape:
        return False
    is_close = torch.isclose(
        values, repeated_values, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    return bool(is_close.all())


def not_repeated(requester: str, module: nn.Module, part: str) -> ConfigurationError:
    """Return the error for a module of which two copies have different scores."""
    return ConfigurationError(
        f"{requester}: one model, scored twice, has two scores. {part} of {type(module).__name__} depends on something "
        "that the module's copy does not contain, such as a global, a file, or the original module, to which its "
        "Trainer refers. So scores would be wrong, or scoring would change the training. Store this state in an "
        "attribute of the module, or do not use it in validation."
    )


# ---- tensors of modules


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and buffers by name."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


def named_dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in named_tensors(module).items()}


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
    private_names = module_tensors.keys() & private.keys() - set(space.names)
    for name in private_names:
        if module_tensors[name].shape == private[name].shape:
            module_tensors[name].copy_(private[name])
