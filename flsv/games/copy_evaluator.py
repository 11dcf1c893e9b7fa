"""CopyEvaluator: the base class of evaluators that score models in copies of a module, in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from typing import Any, Self

import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.games.module_copies import ScoringCopies, ScoringEffects, isolated_scoring, put_private
from flsv.games.vector_evaluator import VectorEvaluator

Private = Callable[[], Mapping[str, Tensor]]


class CopyEvaluator(VectorEvaluator):
    """Base class of evaluators that score models in copies of a module. The arguments are those of its subclasses."""

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        device: torch.device,
        seed: int,
        effects: ScoringEffects | None,
    ) -> None:
        self.space = space
        self.device = device
        self.effects: ScoringEffects = effects or ScoringEffects()
        self.copies: ScoringCopies = ScoringCopies(module, space)
        self._module: Any = module
        self._seed = seed
        self._read_private: Private = dict

    def with_batches(
        self,
        batches: Any,
        private: Private | None = None,
    ) -> Self:
        """Return a copy of this evaluator that computes the same scores on other batches.

        Args:
            batches: the other batches, in the form of the constructor's argument. None: the batches of this evaluator.
            private: function that returns the state-dict entries that vectors do not contain. None: they are those of
                the module.
        """
        evaluator = copy(self)
        evaluator.copies = ScoringCopies(self._module, self.space)
        evaluator._read_private = private or dict
        if batches is not None:
            evaluator._read_batches(batches)
        return evaluator

    @abstractmethod
    def _read_batches(self, batches: Any) -> None:
        """Replace the batches on which models are scored."""

    def _scoring(self) -> AbstractContextManager[None]:
        return isolated_scoring(self.effects, self._seed, device=self.device)

    def _new_vector(self) -> Tensor:
        return torch.empty(
            self.space.size,
            dtype=self.space.dtype,
            device=self.device,
        )

    def _write(self, module_copy: nn.Module, vector: Tensor) -> None:
        """Write a model ``[P]``, and the state-dict entries that vectors do not contain, into a copy of the module."""
        self.space.write(module_copy, vector)
        put_private(module_copy, self.space, self._read_private())
