"""Deep copies of modules, without ``torch.compile``. Functions that a copy stores refer to the copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._dynamo import OptimizedModule, external_utils
from torch.overrides import TorchFunctionMode

from flsv._lightning.private import forget_compilation
from flsv.utilities.errors import ConfigurationError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_module(module: AnyModule) -> AnyModule:
    """Make a deep copy of a module, without ``torch.compile``. It shares the original's optimizer factories."""
    # deepcopy's memo, {id(original): copy}. A factory is entered as its own copy, so that both modules share it.
    memo: dict[int, Any] = {}
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, partial) and _is_factory(value):
                memo[id(value)] = value

    # Copy, and fill the memo.
    parts = (*module.modules(), *module.parameters(), *module.buffers())
    part_ids = set(map(id, parts))
    try:
        with _CloningGraphTensors():
            module_copy = deepcopy_with_closures(module, module.modules(), part_ids, memo)
    except Exception as error:
        attributes = ", ".join(_attributes_named_in(error, module))
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied ({error}), and a training takes a copy of it: "
            f"{attributes or 'something that it keeps'} is to blame. Keep generators, locks and open files out "
            "of its attributes, or make them where they are used."
        ) from error

    for layer in module.modules():
        layer_copy = memo[id(layer)]
        _uncompile(layer, layer_copy, memo)
    return module_copy


def _attributes_named_in(error: Exception, module: nn.Module) -> list[str]:
    """List the attributes of a module and its layers whose class an error's message quotes."""
    attributes = []
    for prefix, layer in module.named_modules(prefix=type(module).__name__):
        for name, value in vars(layer).items():
            class_name = type(value).__name__
            if f"'{class_name}'" in str(error):
                attributes.append(f"{prefix}.{name} ({class_name})")
    return attributes


def deepcopy_with_closures(
    value: Any,
    holders: Iterable[object],
    part_ids: set[int],
    memo: dict[int, Any],
) -> Any:
    """Make a deep copy of ``value`` and of closures that the ``holders`` store. The copied closures refer to the copies
    of the parts with ``part_ids``.
    """
    function_copies: dict[FunctionType, FunctionType] = {}
    for holder in holders:
        _copy_closures(vars(holder).values(), part_ids, function_copies)
    # deepcopy takes the copies from its memo. By itself it would share functions.
    for function, function_copy in function_copies.items():
        memo[id(function)] = function_copy
    value_copy = copy.deepcopy(value, memo)

    # Cells are filled last, when everything that they may refer to has been copied.
    for function, function_copy in function_copies.items():
        cells = function.__closure__ or ()
        cell_copies = function_copy.__closure__ or ()
        for cell, cell_copy in zip(cells, cell_copies):
            with suppress(ValueError):  # a cell may be empty
                contents = cell.cell_contents
                # Contents that were not copied are shared.
                cell_copy.cell_contents = memo.get(id(contents), contents)
    return value_copy


class _CloningGraphTensors(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` clones tensors of an autograd graph, which torch refuses to copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


def _copy_closures(
    values: Iterable[Any],
    part_ids: set[int],
    function_copies: dict[FunctionType, FunctionType],
) -> None:
    """Add ``{function: its copy with empty closure cells}`` to ``function_copies`` for functions with closures over
    parts.
    """
    # The cells are filled later, when the parts to which they refer have been copied.
    for function in _functions_in(values):
        if function in function_copies:
            continue
        # A function is copied if it may use a part of the module, itself or by a function that it calls. Others are
        # shared.
        contents = _contents_of_cells(function)
        called_functions = [content for content in contents if isinstance(content, FunctionType)]
        refers_to_part = any(id(content) in part_ids for content in contents)
        if called_functions or refers_to_part:
            function_copies[function] = _with_empty_cells(function)
            _copy_closures(called_functions, part_ids, function_copies)


def _functions_in(values: Iterable[Any]) -> Iterator[FunctionType]:
    """Yield the functions among a layer's attributes, in its hooks, in partials, and before ``torch.compile``."""
    for value in values:
        if isinstance(value, dict):  # a layer's hooks
            yield from _functions_in(value.values())
        elif isinstance(value, partial):
            yield from _functions_in([value.func, *value.args, *value.keywords.values()])
        elif isinstance(value, FunctionType):
            yield value
            uncompiled = getattr(value, "_torchdynamo_orig_callable", None)
            yield from _functions_in([uncompiled])  # of None there are none


def _contents_of_cells(function: FunctionType) -> list[Any]:
    contents = []
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # a cell may be empty
            contents.append(cell.cell_contents)
    return contents


def _with_empty_cells(function: FunctionType) -> FunctionType:
    cells = function.__closure__ or ()
    function_copy = FunctionType(
        function.__code__,
        function.__globals__,
        name=function.__name__,
        argdefs=function.__defaults__,
        closure=tuple(CellType() for _ in cells),
    )
    function_copy.__kwdefaults__ = function.__kwdefaults__
    vars(function_copy).update(vars(function))
    return function_copy


# The command line's factories refer to its parser, which would take longer to copy than a small module.
def _is_factory(factory: partial[Any]) -> bool:
    """Return whether a ``partial`` constructs objects: it wraps a class, or jsonargparse made it."""
    if isinstance(factory.func, type):
        return True
    modules = [type(argument).__module__ for argument in factory.args]
    return any(module.startswith("jsonargparse.") for module in modules)


def _uncompile(
    layer: nn.Module,
    layer_copy: nn.Module,
    memo: dict[int, Any],
) -> None:
    """Remove from a layer's copy what ``torch.compile`` has added."""
    attributes = vars(layer_copy)  # to change them is to change the copy
    # layer.compile() has set this attribute.
    attributes.pop("_compiled_call_impl", None)
    # torch.compile(layer) has put this module around the layer.
    if isinstance(layer_copy, OptimizedModule):
        attributes["forward"] = layer_copy._orig_mod.__call__
        return
    forget_compilation(attributes)

    # The program has set layer.forward = torch.compile(layer.forward), or another method.
    for name, value in vars(layer).items():
        is_forgotten = name not in attributes
        is_submodule = isinstance(value, nn.Module)  # it is among the layers itself
        if is_forgotten or is_submodule:
            continue
        uncompiled = getattr(value, "_torchdynamo_orig_callable", None)
        if uncompiled is None:  # nothing has compiled this attribute
            continue
        if _is_frame_of_dynamo(uncompiled):
            uncompiled = uncompiled.__wrapped__  # the function of torch in the frame
        attributes[name] = copy.deepcopy(uncompiled, memo)  # a method is bound to the copy


def _is_frame_of_dynamo(function: Any) -> bool:
    """Return whether a function is the frame that dynamo puts around torch's own functions."""
    if not isinstance(function, FunctionType):
        return False
    return function.__code__.co_filename == external_utils.__file__
