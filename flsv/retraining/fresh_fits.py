"""FreshFits: trains coalitions in newly started processes, from a pickled fit.

A fresh process imports modules anew. It lacks globals, class attributes and replaced functions that were set after the
import, and settings of torch: it gets what the program has set in its modules, classes and functions, as it was at the
beginning of the fit.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import logging
import os
import pickle
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import lightning as L
import torch
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_info

from flsv._lightning.patches import callbacks_of
from flsv.core.ranks import ranks_of
from flsv.engines.ranks import FederatedStrategy
from flsv.retraining.coalition_fit import only_watches_the_run, prepare_coalition_fit
from flsv.retraining.fit_order import FitOrder, FitResult
from flsv.retraining.fits_in_processes import FitsInProcesses
from flsv.retraining.forked_fits import isolate_files, limit_since
from flsv.retraining.readings import Reading, reduced
from flsv.scores.performance import ModelScore
from flsv.server.round_server import NoModel
from flsv.utilities.errors import listed
from flsv.utilities.forks import num_cores
from flsv.utilities.own_files import own_folder
from flsv.utilities.reachable import PLAIN_TYPES, walk
from flsv.utilities.supervisor import (
    ANSWER_PIPE_VARIABLE,
    ChildFailed,
    FreshProcess,
    supervise_fresh,
)

#: Environment variables of a process itself.
_PROCESS_VARIABLES = (ANSWER_PIPE_VARIABLE, "PL_GLOBAL_SEED", "PL_SEED_WORKERS")
#: Attributes of classes that Python sets.
_PYTHON_ATTRIBUTES = {
    "__dict__",
    "__weakref__",
    "__doc__",
    "__module__",
    "__annotations__",
    "_abc_impl",
}
#: Types of values that are the same objects in all modules, or have no state.
_STATELESS_TYPES = (*PLAIN_TYPES, tuple, frozenset, Enum, FunctionType, type, ModuleType)


class FreshFits(FitsInProcesses):
    """Trainer of coalitions, each in a newly started process."""

    is_reentrant = False

    def __init__(
        self,
        trainer: L.Trainer,
        # From :func:`pickled_fit`.
        fit: bytes,
        measures: Mapping[str, str | ModelScore],
        # When the run has begun.
        start_time: float,
    ) -> None:
        self._start_time = start_time
        self._folder = ""  # of the files of a call of train
        device = trainer.strategy.root_device.type
        if device == "cpu" and ranks_of(trainer).size == 1:
            num_jobs = num_cores()
        else:
            num_jobs = 1
        self._process = FreshProcess()
        run: Any
        if device == "cuda":
            run = partial(supervise_fresh, forks=False)
        else:
            run = self._process.supervise

        def make_task(order: Any) -> Any:
            return partial(_train, fit, dict(measures), self._folder, order)

        super().__init__(make_task, num_jobs, run=run)

    def train(
        self, orders: Sequence[FitOrder]
    ) -> Iterator[tuple[FitOrder, FitResult | ChildFailed | Reading]]:
        self._limit_s = limit_since(self._start_time)
        with own_folder() as folder:
            self._folder = str(folder)
            yield from super().train(orders)

    def close(self) -> None:
        """End the process from which the others are forked, if there is one."""
        self._process.close()


def pickled_fit(
    trainer: L.Trainer,
    *parts: Any,
    environment: Mapping[str, str] | None = None,
) -> bytes:
    """Pickle a Trainer, a module or its factory, and perhaps data, with what the program has set in its modules.

    Objects that only observe the run are left out. With ``environment`` its variables and the working folder are set in
    the process that unpickles the fit.
    """
    # What the program has set in its modules.
    program = ProgramState(trainer, trainer.callbacks, *parts)  # type: ignore[attr-defined]
    pickled_state, not_pickled = program.pickled()
    if not_pickled:
        rank_zero_info(
            f"flsv: fresh processes have {listed(not_pickled)} as the modules make them, since they cannot be pickled."
        )

    # The fit's own objects, with references to the program's values in place of copies.
    file = io.BytesIO()
    pickler = _Pickler(file, trainer, variables=program.variables_by_id())
    pickler.dump((trainer, *parts))
    pickled_parts = file.getvalue()

    surroundings = None
    if environment is not None:
        surroundings = Surroundings(dict(environment), os.getcwd())
    # The parts stay bytes until `unpickled_fit` has restored what comes before them.
    return pickle.dumps((surroundings, torch_settings(), pickled_state, pickled_parts))


def unpickled_fit(data: bytes) -> tuple[Any, ...]:
    """Return what :func:`pickled_fit` has pickled, after giving this process the program's state."""
    surroundings, settings_of_torch, pickled_state, pickled_parts = pickle.loads(data)
    # The environment first: modules that the program's state imports may read it. The fit's objects come last, since
    # unpickling them may run the program's own code.
    if surroundings is not None:
        surroundings.restore()
    restore_program(pickled_state)
    restore_torch(settings_of_torch)
    return pickle.loads(pickled_parts)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that omits the profiler and a strategy of several ranks. Loggers and observing callbacks are pickled as
    stand-ins, and values of the program by their ``variables``.
    """

    def __init__(
        self,
        file: io.BytesIO,
        trainer: L.Trainer,
        variables: Mapping[int, Variable],
    ) -> None:
        super().__init__(file)
        untyped_trainer: Any = trainer
        # {id of an object: how it is pickled}, as __reduce__ returns it
        self._reduced_by_id: dict[int, Any] = {}
        for object_id, variable in variables.items():
            self._reduced_by_id[object_id] = (Variable.value, (variable,))
        self._reduced_by_id[id(untyped_trainer.profiler)] = (PassThroughProfiler, ())
        for logger in trainer.loggers:
            self._reduced_by_id[id(logger)] = reduced(logger)
        for callback in callbacks_of(trainer):
            if only_watches_the_run(callback):
                self._reduced_by_id[id(callback)] = reduced(callback)

        strategy = trainer.strategy
        if isinstance(strategy, FederatedStrategy):  # each rank trains its coalitions by itself
            arguments = (
                strategy.root_device,
                strategy.accelerator,
                None,  # no plugin for checkpoints
                strategy.precision_plugin,
            )
            self._reduced_by_id[id(strategy)] = (SingleDeviceStrategy, arguments)

    def reducer_override(self, value: Any) -> Any:
        return self._reduced_by_id.get(id(value)) or super().reducer_override(value)


def _train(
    data: bytes, measures: Mapping[str, str | ModelScore], folder: str, order: FitOrder
) -> FitResult:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    trainer, module = unpickled_fit(data)
    writable_folder = isolate_files(trainer, folder)
    datamodule: Any = trainer.datamodule
    scoring = prepare_coalition_fit(
        trainer, datamodule, measures=measures, order=order, folder=writable_folder
    )
    with suppress(NoModel):  # the last finite model counts
        trainer.fit(module, datamodule)
    return scoring.result()


@dataclass(frozen=True)
class Variable:
    """Place of a value: a module, and the path of an attribute in it, such as ``"Options.rate"``."""

    module: str
    path: str

    def __str__(self) -> str:
        return f"{self.module}.{self.path}"

    def value(self) -> Any:
        value: Any = sys.modules[self.module]
        for attribute in self.path.split("."):
            value = vars(value)[attribute]
        return value

    def description(self) -> str:
        """Return a text that is the same in two processes if the value is. Empty if there is none."""
        try:
            importlib.import_module(self.module)
            return _described(self.value())
        except Exception:  # the module or the attribute is missing, or cannot be pickled
            return ""

    def set(self, value: Any) -> None:
        owner_path, _, attribute = self.path.rpartition(".")
        owner: Any
        if owner_path:  # such as a class of the module
            owner = Variable(self.module, owner_path).value()
        else:
            owner = sys.modules[self.module]
        setattr(owner, attribute, value)


class ProgramState:
    """Globals, class attributes and replaced functions of a program, by name.

    Args:
        parts: objects of the fit. The program's own modules that define their classes and functions count, and those to
            which these modules refer.
    """

    def __init__(self, *parts: Any) -> None:
        module_names = _modules_from(_defining_modules(parts))
        self._variables: list[Variable] = []
        for module_name in module_names:
            self._variables += _variables_in(sys.modules[module_name], module_name)
        self._variables += _options_of_libraries(module_names)
        self._replaced_functions = _replaced_in_libraries()

    def variables_by_id(self) -> dict[int, Variable]:
        """Return the variable of each object that may change, by its id, so that a fit refers to it by name."""
        variables = {}
        for variable in self._variables:
            value = variable.value()
            if not isinstance(value, _STATELESS_TYPES):
                variables[id(value)] = variable
        return variables

    def pickled(self) -> tuple[bytes, list[str]]:
        """Return the values for :func:`restore_program`, and the names of those that cannot be pickled."""
        descriptions: dict[Variable, str] = {}
        not_pickled = []
        for variable in [*self._variables, *self._replaced_functions]:
            value = variable.value()
            try:
                description = _described(value)
                cloudpickle.dumps(value)  # only to see whether it can be pickled
            except Exception:  # whatever an object's own __reduce__ raises
                not_pickled.append(str(variable))
            else:
                descriptions[variable] = description

        # The values are pickled together, since they may share parts, and apart from their descriptions, since a
        # process that has the same values does not unpickle them.
        values = [variable.value() for variable in descriptions]
        pickled_values = cloudpickle.dumps(values)
        pickled_state = cloudpickle.dumps((descriptions, pickled_values))
        return pickled_state, not_pickled


def restore_program(pickled_state: bytes) -> None:
    """Set the values that differ in this process."""
    descriptions, pickled_values = pickle.loads(pickled_state)
    changed_variables = []
    for variable, description in descriptions.items():
        if variable.description() != description:
            changed_variables.append(variable)
    if not changed_variables:
        return
    # Unpickled only now, since it may be slow.
    values = pickle.loads(pickled_values)
    value_by_variable = dict(zip(descriptions, values))
    for variable in changed_variables:
        if variable.module in sys.modules:  # not if its import has failed
            variable.set(value_by_variable[variable])


def torch_settings() -> dict[str, Any]:
    """Return those settings of torch on which numbers depend."""
    return {
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
    }


def restore_torch(settings: Mapping[str, Any]) -> None:
    """Set torch as :func:`torch_settings` describes it."""
    torch.set_default_dtype(settings["dtype"])
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warn_only"])
    torch.set_float32_matmul_precision(settings["precision"])
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.backends.cudnn.allow_tf32 = settings["cudnn_tf32"]


@dataclass(frozen=True)
class Surroundings:
    """Environment variables and working folder of a process."""

    environment: dict[str, str]
    folder: str

    def restore(self) -> None:
        """Give this process exactly these environment variables, except its own, and the folder."""
        environment = dict(self.environment)
        for name in _PROCESS_VARIABLES:  # this process's values stay, or their absence
            if name in os.environ:
                environment[name] = os.environ[name]
            else:
                environment.pop(name, None)
        os.environ.clear()
        os.environ.update(environment)
        with suppress(OSError):  # the folder has been removed
            os.chdir(self.folder)


def _modules_from(roots: Iterable[str]) -> list[str]:
    names: dict[str, None] = {}  # a set that keeps its order
    main_module = sys.modules["__main__"]
    pending_names = [*sorted(roots), *_module_names_in(main_module)]
    while pending_names:
        name = pending_names.pop()
        if name in names or name == "__main__":
            continue
        module = sys.modules.get(name)
        if module is not None and _is_of_program(module):
            names[name] = None
            pending_names += _module_names_in(module)
    return list(names)


def _defining_modules(parts: Any) -> set[str]:
    module_names = set()
    for _, value in walk(parts):  # all objects that the parts hold
        for parent in type(value).__mro__:
            module_names.add(parent.__module__)
        if isinstance(value, FunctionType):
            module_names.add(value.__module__)
    return module_names


def _module_names_in(module: ModuleType) -> set[str]:
    names = set()
    for value in list(vars(module).values()):
        if isinstance(value, ModuleType):
            names.add(value.__name__)
        elif isinstance(value, type | FunctionType):
            names.add(str(value.__module__))
        for function in _functions_of(value):
            names_in_code = set(function.__code__.co_names)
            names |= names_in_code & sys.modules.keys()
    return names


def _functions_of(value: Any) -> list[FunctionType]:
    if isinstance(value, type):
        candidates = list(vars(value).values())
    else:
        candidates = [value]
    return [function for function in candidates if isinstance(function, FunctionType)]


def _variables_in(module: ModuleType, module_name: str) -> Iterator[Variable]:
    for variable, value in _attributes_of(module, module_name):
        is_of_python = variable.path.startswith("__")
        if not is_of_python and not isinstance(value, ModuleType):
            yield variable


def _options_of_libraries(module_names: Sequence[str]) -> Iterator[Variable]:
    """Yield the public plain values in libraries' modules and classes to which a program's modules refer."""
    libraries: dict[str, ModuleType] = {}
    for module_name in ("__main__", *module_names):
        module_globals = vars(sys.modules[module_name])
        for value in list(module_globals.values()):
            if isinstance(value, ModuleType) and not _is_of_program(value):
                libraries[value.__name__] = value

    for module_name, library in libraries.items():
        if sys.modules.get(module_name) is not library:  # it could not be found by its name
            continue
        for variable, value in _attributes_of(library, module_name):
            _, _, attribute = variable.path.rpartition(".")
            is_public = not attribute.startswith("_")
            if is_public and type(value) in PLAIN_TYPES:
                yield variable


def _replaced_in_libraries() -> list[Variable]:
    """Return the attributes of libraries' modules and classes that hold functions of the program."""
    variables = []
    for module_name, module in list(sys.modules.items()):
        is_library = isinstance(module, ModuleType) and not _is_of_program(module)
        if not is_library or module_name == "__main__":
            continue
        for variable, value in _attributes_of(module, module_name):
            if _is_function_of_program(value):
                variables.append(variable)
    return variables


def _attributes_of(module: ModuleType, module_name: str) -> Iterator[tuple[Variable, Any]]:
    for attribute, value in list(vars(module).items()):
        yield Variable(module_name, attribute), value
        # isinstance also reads value.__class__, at which deprecated objects warn.
        is_class = issubclass(type(value), type)
        if not is_class or value.__module__ != module_name:  # an imported class is another module's
            continue
        for class_attribute, class_value in list(vars(value).items()):
            if class_attribute not in _PYTHON_ATTRIBUTES:
                yield Variable(module_name, f"{attribute}.{class_attribute}"), class_value


def _is_function_of_program(value: Any) -> bool:
    if issubclass(type(value), staticmethod | classmethod):
        value = value.__func__
    return type(value) is FunctionType and _is_file_of_program(value.__code__.co_filename)


def _is_of_program(module: ModuleType) -> bool:
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and _is_file_of_program(path)


@cache
def _is_file_of_program(path: str) -> bool:
    if not os.path.isfile(path):  # as of code that was made at run time
        return False
    folders = path.split(os.sep)
    if "site-packages" in folders or "dist-packages" in folders:
        return False
    return not path.startswith(_library_folders())


@cache
def _library_folders() -> tuple[str, ...]:
    path_names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = [sysconfig.get_path(name) for name in path_names]
    package = find_spec("flsv")
    if package is not None and package.origin is not None:
        folders.append(os.path.dirname(package.origin))
    return tuple(os.path.join(folder, "") for folder in folders)


def _described(value: Any) -> str:
    """Return a text that is the same in two processes if a value is the same."""
    if isinstance(value, staticmethod | classmethod):
        return _described(value.__func__)
    if isinstance(value, property):
        accessors = (value.fget, value.fset, value.fdel)
        return " ".join(_described(accessor) for accessor in accessors)
    if isinstance(value, FunctionType):
        code = value.__code__
        position = f"{code.co_filename} {code.co_firstlineno}"
        return f"{value.__module__} {value.__qualname__} {position}"
    if isinstance(value, type | ModuleType):
        module_name = getattr(value, "__module__", "")  # a module has none
        return f"{module_name} {value.__name__}"
    return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
