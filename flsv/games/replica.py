"""Replica: a copy of a module, into which coalitions' models are loaded so that the module itself stays unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.core.plain_tensors import plain_tensors
from flsv.games.check_copies import check_copies
from flsv.games.copy_module import copy_module
from flsv.games.lent_module import named_tensors
from flsv.games.vector_evaluator import Build, row_builder
from flsv.utilities.seeding import isolated_rngs


class Replica:
    """A copy of a module in evaluation mode, into which models are loaded from vectors.

    Args:
        module: the module to copy.
        space: the map between the module's state and vectors ``[P]``.

    Raises:
        ConfigurationError: the module cannot be copied.
    """

    def __init__(self, module: nn.Module, space: ParameterSpace) -> None:
        self.module = copy_module(module).eval().requires_grad_(False)
        self.space = space
        self.vector = torch.empty(space.size, dtype=space.dtype, device=module_device(module))
        self._held, self._constant = frozenset(space.names), frozenset(space.constant_names)
        self._mine: list[Tensor] = []
        self._theirs: list[Tensor] = []

    def follow(self, module: nn.Module, private: Mapping[str, Tensor] | None = None) -> None:
        """Copy the state that vectors do not hold (counters, masks, private state) from ``module``, now and again at
        every :meth:`load`.

        Args:
            module: the original module.
            private: ``{name: tensor}``, state that is copied in place of the module's state of these names.
        """
        layers = dict(self.module.named_modules())
        for name, _, own, value in plain_tensors(module):
            layers[name.rpartition(".")[0]].__dict__[own] = value.clone()
        private, mine = private or {}, named_tensors(self.module)
        self._mine, self._theirs = [], []
        for name, theirs in named_tensors(module).items():
            theirs = private.get(name, theirs)
            if name in self._held or name not in mine or mine[name].shape != theirs.shape:
                continue
            mine[name].copy_(theirs.detach())
            if name not in self._constant:  # which no forward pass changes
                self._mine.append(mine[name])
                self._theirs.append(theirs.detach())

    def load(self, build: Build, index: int) -> None:
        """Load the model that ``build(index, out)`` writes into ``out [P]``."""
        build(index, self.vector)
        self.space.write(self.module, self.vector)
        if self._mine:
            torch._foreach_copy_(self._mine, self._theirs)

    @torch.inference_mode(False)
    def check(self, module: nn.Module, x: Any) -> None:
        """Check by :func:`check_copies` that this copy is independent of ``module``, using its outputs for the input
        ``x``.

        Raises:
            ConfigurationError: the outputs depend on the module's weights, or do not depend on the copy's weights.
        """

        def outputs(vector: Tensor) -> Any:
            self.load(row_builder(vector[None]), 0)
            with isolated_rngs(0, "trial"):
                return self.module(x)

        check_copies(module, self.space, outputs)


def module_device(module: nn.Module) -> torch.device:
    """Return the device of the module's first parameter or buffer; the CPU if it has none."""
    return next((tensor.device for tensor in named_tensors(module).values()), torch.device("cpu"))
