"""Training in 64 bits, by which a difference of two ways to train is told from rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from lightning.pytorch.plugins.precision import DoublePrecision
from torch import Tensor
from torch.overrides import TorchFunctionMode

_SHORTER = {torch.float32, torch.float16, torch.bfloat16}
_CASTS = {Tensor.float, Tensor.half, Tensor.bfloat16}
#: Names of types for ``Tensor.type``.
_NAMES = {"torch.FloatTensor", "torch.cuda.FloatTensor", "torch.HalfTensor"}


def compute_in_double(trainer: L.Trainer) -> None:
    """Let a copied Trainer train in 64 bits. It converts its module when the fit sets it up."""
    vars(trainer.strategy)["_precision_plugin"] = DoubleEverywhere()


class DoubleEverywhere(DoublePrecision):
    """Lightning's plugin for 64 bits, in whose steps code that names a shorter type gets 64 bits, too."""

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        with super().forward_context(), _NoShorterTypes():
            yield


class _NoShorterTypes(TorchFunctionMode):
    """Mode in which shorter floating-point types are those of 64 bits."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].double()
        if func is torch.Tensor.type and len(args) > 1 and args[1] in _NAMES:
            return args[0].double()
        name = getattr(func, "__name__", "")
        is_in_place = name.endswith("_") or name.startswith("__") or "out" in kwargs
        args = tuple(_longer(value, not is_in_place) for value in args)
        kwargs = {name: _longer(value, not is_in_place) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _longer(value: Any, converts_tensors: bool) -> Any:
    if isinstance(value, torch.dtype) and value in _SHORTER:
        return torch.float64
    # Such as class weights in an attribute that is no buffer.
    if converts_tensors and isinstance(value, Tensor) and value.dtype in _SHORTER:
        return value.double()
    return value
