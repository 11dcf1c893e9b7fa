"""CopyEvaluator: the base class of evaluators that score models in copies of a module, in this process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from copy import copy
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch
from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.games.module_copies import ScoringCopies, ScoringEffects, isolated_scoring, put_private
from flsv.games.vector_evaluator import VectorEvaluator
from flsv.isolation.program_state import ProgramState, present_state, restored_program

Private = Callable[[], Mapping[str, Tensor]]

Arguments = ParamSpec("Arguments")
Evaluator = TypeVar("Evaluator", bound="CopyEvaluator")
Result = TypeVar("Result")


def leaves_program(
    score: Callable[Concatenate[Evaluator, Arguments], Result],
) -> Callable[Concatenate[Evaluator, Arguments], Result]:
    """Decorate a method that scores models, so that it changes no global of the program.

    If scores change the program although the first score has not, the method is called again, and the program is
    restored after each score from then on.
    """

    @wraps(score)
    def score_and_restore(
        self: Evaluator, /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        if self.effects.program is not False:  # it is restored after each score
            return score(self, *args, **kwargs)
        # It is kept, since looking whether it is present takes less time than looking at the program again.
        self._program = present_state()
        with restored_program(self._program):
            result = score(self, *args, **kwargs)
            if self._program.is_present():
                return result
        self.effects.program = True
        return score(self, *args, **kwargs)

    return score_and_restore


class CopyEvaluator(VectorEvaluator):
    """Base class of evaluators that score models in copies of a module. The arguments are those of its subclasses."""

    # The program's state before the last scores.
    _program: ProgramState | None = None

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
