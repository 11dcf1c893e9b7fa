"""VectorEvaluator: the base class of evaluators, from models' vectors to their scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from flsv.core.parameter_space import ParameterSpace
from flsv.games.scores import Scores

#: Writes model i's vector into a tensor ``[P]``.
Build = Callable[[int, Tensor], None]


def rows_of(vectors: Tensor) -> Build:
    """Model i is row i of ``vectors [K, P]``."""

    def build(index: int, out: Tensor) -> None:
        out.copy_(vectors[index])

    return build


class VectorEvaluator(ABC):
    """Gives scores of models of one structure, as vectors."""

    space: ParameterSpace
    asks_clients = False
    """Whether it asks the clients: then all ranks evaluate all models together."""

    def __call__(self, vectors: Tensor) -> Scores:
        """The scores of the models in the rows of ``vectors [K, P]``."""
        if vectors.ndim != 2 or vectors.shape[1] != self.space.size:
            raise ValueError(f"expected vectors [K, {self.space.size}], got {list(vectors.shape)}.")
        return self.evaluate(rows_of(vectors), len(vectors))

    @abstractmethod
    def evaluate(self, build: Build, count: int) -> Scores:
        """The scores of ``count`` models that exist one or a chunk at a time; see :data:`Build`."""
