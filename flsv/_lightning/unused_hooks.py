"""What Lightning does at every hook of every batch without anybody's need, left out for the length of a fit.

A batch passes some twenty hooks. Around each, Lightning enters a profiler's context, also of the profiler that profiles
nothing, and notes the hook's name on the module twice, which ``nn.Module.__setattr__`` examines as if it could be a
parameter; and it inspects the signature of ``training_step`` anew for every batch. Beside a small network's step that
shows (``tools/bench_overhead.py``). Nothing else changes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import lightning as L
from lightning.pytorch.loops import training_epoch_loop
from lightning.pytorch.profilers import PassThroughProfiler
from torch import nn

_NOTHING = nullcontext()


def skip_unused_hooks(trainer: L.Trainer) -> list[tuple[Any, str, Any]]:
    """The attributes to patch, see :class:`flsv._lightning.patches.PatchedAttributes`."""
    changes: list[tuple[Any, str, Any]] = []
    if L.LightningModule.__setattr__ is nn.Module.__setattr__:
        changes.append((L.LightningModule, "__setattr__", _set))
    if type(trainer.profiler) is PassThroughProfiler:  # type: ignore[attr-defined]
        changes.append((trainer.profiler, "profile", _profile))  # type: ignore[attr-defined]
    name = "is_param_in_hook_signature"
    if hasattr(training_epoch_loop, name):
        changes.append((training_epoch_loop, name, lru_cache(maxsize=64)(getattr(training_epoch_loop, name))))
    return changes


def _set(self: nn.Module, name: str, value: Any) -> None:
    if name == "_current_fx_name":
        self.__dict__[name] = value
    else:
        nn.Module.__setattr__(self, name, value)


def _profile(action_name: str) -> AbstractContextManager[None]:
    return _NOTHING
