"""Copies of modules, without ``torch.compile``."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any, TypeVar

from torch import nn
from torch._dynamo import OptimizedModule, external_utils

from flsv._lightning.private import forget_compilation
from flsv.utilities.run_copy import copy_of

AnyModule = TypeVar("AnyModule", bound=nn.Module)


def copy_module(module: AnyModule) -> AnyModule:
    """Make a copy of a module, without ``torch.compile``. It shares the original's optimizer factories."""
    factories = []
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, partial) and _is_factory(value):
                factories.append(value)
    module_copy: AnyModule = copy_of(module, factories)
    for layer in module_copy.modules():
        _uncompile(layer)
    return module_copy


# The command line's factories refer to its parser, which would take longer to copy than a small module.
def _is_factory(factory: partial[Any]) -> bool:
    """Return whether a ``partial`` constructs objects: it wraps a class, or jsonargparse made it."""
    if isinstance(factory.func, type):
        return True
    modules = [type(argument).__module__ for argument in factory.args]
    return any(module.startswith("jsonargparse.") for module in modules)


def _uncompile(layer: nn.Module) -> None:
    """Remove from a layer what ``torch.compile`` has added."""
    attributes = vars(layer)
    # layer.compile() has set this attribute.
    attributes.pop("_compiled_call_impl", None)
    # torch.compile(layer) has put this module around the layer.
    if isinstance(layer, OptimizedModule):
        attributes["forward"] = layer._orig_mod.__call__
        return
    forget_compilation(attributes)

    # The program has set layer.forward = torch.compile(layer.forward), or another method.
    for name, value in list(attributes.items()):
        is_submodule = isinstance(value, nn.Module)  # it is among the layers itself
        uncompiled = getattr(value, "_torchdynamo_orig_callable", None)
        if is_submodule or uncompiled is None:
            continue
        if _is_frame_of_dynamo(uncompiled):
            uncompiled = uncompiled.__wrapped__  # the function of torch in the frame
        attributes[name] = uncompiled


def _is_frame_of_dynamo(function: Any) -> bool:
    """Return whether a function is the frame that dynamo puts around torch's own functions."""
    if not isinstance(function, FunctionType):
        return False
    return function.__code__.co_filename == external_utils.__file__
