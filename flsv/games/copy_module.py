"""Deep copies of modules, without ``torch.compile``. Functions that a copy stores refer to the copy."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._dynamo import OptimizedModule, external_utils
from torch.overrides import TorchFunctionMode

from flsv.utilities.errors import ConfigurationError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_module(module: AnyModule) -> AnyModule:
    """Make a deep copy of a module, without ``torch.compile``. It shares the original's optimizer factories."""
    memo: dict[int, Any] = {}
    for layer in module.modules():
        memo |= {
            id(value): value
            for value in vars(layer).values()
            if isinstance(value, partial) and _makes(value)
        }
    parts = {id(part) for part in (*module.modules(), *module.parameters(), *module.buffers())}
    try:
        with _OutputsDetached():
            own = deepcopy_with_closures(module, module.modules(), parts, memo)
    except Exception as error:
        attributes = [
            (prefix, *item)
            for prefix, layer in module.named_modules()
            for item in vars(layer).items()
        ]
        kinds = [
            (".".join(filter(None, (prefix, name))), type(value).__name__)
            for prefix, name, value in attributes
        ]
        blamed = [
            f"{type(module).__name__}.{name} ({kind})"
            for name, kind in kinds
            if f"'{kind}'" in str(error)
        ]
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied ({error}), and a training takes a copy of it: "
            f"{', '.join(blamed) or 'something that it keeps'} is to blame. Keep generators, locks and open files out "
            "of its attributes, or make them where they are used."
        ) from error
    for layer in module.modules():
        _uncompile(layer, memo[id(layer)], memo)
    return own


def deepcopy_with_closures(
    value: Any, holders: Iterable[object], parts: set[int], memo: dict[int, Any]
) -> Any:
    """Make a deep copy of ``value`` and of closures that the ``holders`` store. The copied closures refer to the copies
    of ``parts``, a set of ids.
    """
    twins: dict[FunctionType, FunctionType] = {}
    for holder in holders:
        _find_closures(vars(holder).values(), parts, twins)
    memo |= {id(function): twin for function, twin in twins.items()}
    own = copy.deepcopy(value, memo)
    for function, twin in twins.items():
        for old, new in zip(function.__closure__ or (), twin.__closure__ or ()):
            with suppress(ValueError):  # a cell may be empty
                new.cell_contents = memo.get(id(old.cell_contents), old.cell_contents)
    return own


class _OutputsDetached(TorchFunctionMode):
    """Mode in which ``copy.deepcopy`` clones tensors of an autograd graph, which torch refuses to copy."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


def _find_closures(
    held: Iterable[Any], parts: set[int], twins: dict[FunctionType, FunctionType]
) -> None:
    """Add ``{function: its copy with empty closure cells}`` to ``twins`` for functions with closures over ``parts``."""
    for value in held:
        if isinstance(value, dict):  # of hooks
            _find_closures(value.values(), parts, twins)
        elif isinstance(value, partial):
            _find_closures([value.func, *value.args, *value.keywords.values()], parts, twins)
        elif isinstance(value, FunctionType) and value not in twins:
            _find_closures([getattr(value, "_torchdynamo_orig_callable", None)], parts, twins)
            cells = value.__closure__ or ()
            contents = []
            for cell in cells:
                with suppress(ValueError):
                    contents.append(cell.cell_contents)
            inner = [each for each in contents if isinstance(each, FunctionType)]
            if not inner and parts.isdisjoint(map(id, contents)):
                continue
            empty = tuple(CellType() for _ in cells)
            twin = FunctionType(
                value.__code__, value.__globals__, value.__name__, value.__defaults__, empty
            )
            twin.__kwdefaults__ = value.__kwdefaults__
            vars(twin).update(vars(value))
            twins[value] = twin
            _find_closures(inner, parts, twins)


# The command line's factories refer to its parser, which would take longer to copy than a small module.
def _makes(factory: partial) -> bool:
    """Return whether a ``partial`` constructs objects: it wraps a class, or jsonargparse made it."""
    command_line = any(
        type(argument).__module__.startswith("jsonargparse.") for argument in factory.args
    )
    return isinstance(factory.func, type) or command_line


def _uncompile(layer: nn.Module, own: nn.Module, memo: dict[int, Any]) -> None:
    vars(own).pop("_compiled_call_impl", None)
    if isinstance(own, OptimizedModule):
        vars(own)["forward"] = own._orig_mod.__call__
        return
    if vars(own).get("_compiler_ctx") is not None:
        vars(own)["_compiler_ctx"] = None  # Lightning's note that it is compiled
    for name, value in vars(layer).items():
        plain = getattr(value, "_torchdynamo_orig_callable", None)
        if plain is not None and name in vars(own) and not isinstance(value, nn.Module):
            if (
                isinstance(plain, FunctionType)
                and plain.__code__.co_filename == external_utils.__file__
            ):
                plain = plain.__wrapped__  # type: ignore[attr-defined]  # a frame that dynamo puts around torch's own
            vars(own)[name] = copy.deepcopy(plain, memo)  # a method is bound to the copy
