"""VectorEvaluator: the base class of evaluators, from models' vectors to their scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor

from flsv.core.parameter_space import ParameterSpace
from flsv.games.scores import Scores

#: Writes model i's vector into a tensor ``[P]``.
Build = Callable[[int, Tensor], None]


def row_builder(vectors: Tensor) -> Build:
    """Return a function that writes row i of ``vectors [K, P]`` as model i."""

    def build(index: int, out: Tensor) -> None:
        out.copy_(vectors[index])

    return build


class VectorEvaluator(ABC):
    """Base class of evaluators, which score models of one structure that are given as vectors."""

    space: ParameterSpace
    asks_clients = False
    """Whether it asks the clients: then all ranks evaluate all models together."""

    def __call__(self, vectors: Tensor) -> Scores:
        """Evaluate the models in the rows of ``vectors [K, P]``.

        Raises:
            ValueError: vectors of another length.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.space.size:
            raise ValueError(f"expected vectors [K, {self.space.size}], got {list(vectors.shape)}.")
        return self.evaluate(row_builder(vectors), len(vectors))

    @abstractmethod
    def evaluate(self, build: Build, count: int) -> Scores:
        """Evaluate ``count`` models, of which one or a chunk exists at a time; see :data:`Build`."""
