"""ModuleState: all that training may change in a module, so that another model can use the module for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.training.module_snapshot import ModuleSnapshot


class ModuleState(NamedTuple):
    """The values of a module that clients share, those that they do not share, and all others."""

    vector: Tensor  # [P]
    snapshot: ModuleSnapshot
    private: dict[str, Tensor]  # the parameters that clients do not share

    @classmethod
    def read(cls, module: nn.Module, space: ParameterSpace) -> ModuleState:
        return cls(
            vector=space.read(module),
            snapshot=ModuleSnapshot(module),
            private=space.read_private(module),
        )

    def write(self, module: nn.Module, space: ParameterSpace) -> None:
        # Layers, parameters and buffers come before the values within them.
        self.snapshot.restore()
        space.write(module, self.vector)
        space.write_private(module, self.private)


@contextmanager
def kept_state(module: nn.Module, space: ParameterSpace) -> Iterator[None]:
    """Return a context in which another model may use the module, which then has its own state again."""
    state = ModuleState.read(module, space)
    try:
        yield
    finally:
        state.write(module, space)
