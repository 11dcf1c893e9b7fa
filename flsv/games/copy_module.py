"""Deep copies of modules, without anything compiled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch._dynamo import OptimizedModule, external_utils
from torch.overrides import TorchFunctionMode

from flsv.utilities.errors import ConfigurationError

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_module(module: AnyModule, instead: Mapping[int, Any] | None = None) -> AnyModule:
    """Make a deep copy that shares factories, and is not compiled.

    Factories of optimizers that the command line makes hold its parser, which takes longer to copy than a small module
    does, and nothing of the module.

    Args:
        module: the original.
        instead: ``id`` of an object of the module to the object that takes its place in the copy.

    Raises:
        ConfigurationError: it cannot be copied, naming the attributes to blame.

    Example:
        >>> net = nn.Linear(2, 1)
        >>> net.compile()
        >>> copy_module(net)._compiled_call_impl is None
        True
    """
    memo: dict[int, Any] = {}
    for layer in module.modules():
        memo |= {id(value): value for value in vars(layer).values() if isinstance(value, partial) and _makes(value)}
    memo.update(instead or {})
    try:
        with _OutputsDetached():
            own = copy.deepcopy(module, memo)
    except Exception as error:
        attributes = [(prefix, *item) for prefix, layer in module.named_modules() for item in vars(layer).items()]
        kinds = [(".".join(filter(None, (prefix, name))), type(value).__name__) for prefix, name, value in attributes]
        blamed = [f"{type(module).__name__}.{name} ({kind})" for name, kind in kinds if f"'{kind}'" in str(error)]
        raise ConfigurationError(
            f"{type(module).__name__} cannot be copied ({error}), and models are evaluated in copies of the module: "
            f"{', '.join(blamed) or 'something that it keeps'} is to blame. Keep generators, locks and open files out "
            "of its attributes, or make them where they are used."
        ) from error
    for layer in module.modules():
        _uncompile(layer, memo[id(layer)], memo)
    return own


class _OutputsDetached(TorchFunctionMode):
    """Mode in which a tensor in the middle of a graph is copied without the graph, wherever the module keeps it: torch
    copies none (an output in a list, a pruned layer's weight).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        return memo.setdefault(id(tensor), tensor.detach().clone())


def _makes(factory: partial) -> bool:
    """Tell whether a factory makes objects of a class, as optimizers are made from a configuration."""
    command_line = any(type(argument).__module__.startswith("jsonargparse.") for argument in factory.args)
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
            if isinstance(plain, FunctionType) and plain.__code__.co_filename == external_utils.__file__:
                plain = plain.__wrapped__  # type: ignore[attr-defined]  # a frame that dynamo puts around torch's own
            vars(own)[name] = copy.deepcopy(plain, memo)  # a method is bound to the copy
