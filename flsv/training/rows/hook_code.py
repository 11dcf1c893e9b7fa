"""Inspection of a hook's code, to find out whether the hook only computes and logs, or may change the training."""

from __future__ import annotations

import dis
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

#: Bytecode instructions that store a value outside the hook's local variables.
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_SUBSCR", "DELETE_ATTR", "DELETE_SUBSCR")
#: Names that a hook uses to compute and log values.
_WORDS = """
    log log_dict compute reset clear print logger experiment add_scalar add_scalars add_figure log_metrics trainer
    current_epoch global_step sanity_checking len sum max min mean stack cat float int str round range zip
    enumerate sorted list dict tuple items keys values item detach cpu numpy tolist torch Tensor numel size shape
    super device argmax softmax sigmoid exp sqrt info debug format join isinstance
"""
_LOGGING = frozenset(_WORDS.split())
#: Names by which a hook reads what validation has logged.
_SCORES = frozenset({"callback_metrics", "logged_metrics", "progress_bar_metrics"})


def hook_adapts(part: Any, hook: str, proved: bool = False) -> bool:
    """Return whether a hook of a module or a callback may change the training depending on validation scores.

    The hook's code is inspected: the answer is True if it reads a validation score, or if it is not Python code. It is
    also True if a hook that runs after the round's training stores an attribute or uses names that do more than
    compute, log and collect outputs. Hooks that Lightning, torch or flsv define are not inspected.

    Args:
        part: the module or the callback.
        hook: the hook's name.
        proved: whether a coalition is also trained alone and the results are compared. The answer is then True only if
            the hook reads a validation score.

    Example:
        >>> class Logs(nn.Module):
        ...     __module__ = "project"
        ...     def on_validation_epoch_end(self):
        ...         self.log("n", 1)
        >>> class Adapts(nn.Module):
        ...     __module__ = "project"
        ...     def on_validation_epoch_end(self):
        ...         self.weight = 2.0
        >>> hook_adapts(Logs(), "on_validation_epoch_end"), hook_adapts(Adapts(), "on_validation_epoch_end")
        (False, True)
    """
    before = hook in ("on_train_epoch_start", "on_train_start")
    for function in _own(part, hook):
        codes = list(_codes(function))
        names = {name for code in codes for name in code.co_names}
        if names & _SCORES or (not codes and not proved):
            return True
        if not (before or proved) and (_stores(codes) or any(_acts(part, name) for name in names - {hook})):
            return True
    return False


def _stores(codes: Sequence[CodeType]) -> bool:
    return any(step.opname in _STORES for code in codes for step in dis.get_instructions(code))


def _acts(part: Any, name: str) -> bool:
    """Return whether a hook of ``part`` that uses ``name`` may do more than compute, log and collect outputs."""
    return name not in _LOGGING and not _is_record(part, name)


def _own(part: Any, hook: str) -> Iterator[Any]:
    """Yield the functions that define ``hook`` of ``part``: its instance attribute, if it has one, and the methods of
    its classes, except classes of Lightning, torch and flsv."""
    if hook in vars(part):
        yield vars(part)[hook]
    for kind in type(part).__mro__:
        if hook in vars(kind) and not kind.__module__.startswith(("lightning.", "flsv.", "torch.")):
            yield vars(kind)[hook]


def _codes(function: Any) -> Iterator[CodeType]:
    """Yield a function's code and the code of the functions defined in it; yield nothing if it is not Python code."""
    waiting = [getattr(getattr(function, "__func__", function), "__code__", None)]
    while waiting:
        code = waiting.pop()
        if code is not None:
            yield code
            waiting += [each for each in code.co_consts if isinstance(each, CodeType)]


def _is_record(part: Any, name: str) -> bool:
    """Return whether ``part`` is a module whose attribute ``name`` is a metric, a list or a dictionary. A hook that
    uses such an attribute is assumed to collect outputs in it."""
    value = getattr(part, name, None) if isinstance(part, nn.Module) else None
    return isinstance(value, (Metric, MetricCollection, list, dict, nn.ModuleDict, nn.ModuleList))
