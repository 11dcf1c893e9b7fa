"""VectorEvaluator: the base class of evaluators, which compute scores of models given as vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn

from flsv.core.parameter_space import ParameterSpace
from flsv.games.scores import Scores

#: A function ``build(i, out)`` that writes model i's vector into the tensor ``out [P]``.
Build = Callable[[int, Tensor], None]


def row_builder(vectors: Tensor) -> Build:
    """Return a function that writes row i of ``vectors [K, P]`` into ``out [P]``."""

    def build(index: int, out: Tensor) -> None:
        out.copy_(vectors[index])

    return build


class VectorEvaluator(ABC):
    """Base class of evaluators, which compute scores of models given as vectors ``[P]``.

    :class:`CoalitionGames` calls an evaluator with the models of coalitions. Subclasses override :meth:`evaluate`.
    """

    space: ParameterSpace
    asks_clients = False
    """Whether the evaluator asks the clients; if so, every rank must evaluate every model."""

    def __call__(self, vectors: Tensor, keep: bool = False) -> Scores:
        """Compute the scores of the K models in the rows of ``vectors [K, P]``.

        With ``keep`` the scores hold the models' outputs, if possible.

        Raises:
            ValueError: the vectors have another length.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.space.size:
            raise ValueError(f"expected vectors [K, {self.space.size}], got {list(vectors.shape)}.")
        return self.evaluate(row_builder(vectors), len(vectors), keep)

    @abstractmethod
    def evaluate(self, build: Build, count: int, keep: bool = False) -> Scores:
        """Compute the scores of ``count`` models, which ``build`` writes (see :data:`Build`).

        One model or one chunk of models is in memory at a time. With ``keep`` the scores also hold what coalitions are
        predicted from, if it is known.
        """

    def live(self, module: nn.Module, after_round: int | None = None, keep: bool = False) -> Scores:
        """Compute the scores of the fit's module as it is, with all state that hooks have given it.

        Args:
            module: the fit's module.
            after_round: the index of the round that has just ended, so that the values that the fit's own
                validation has
                logged are those of the module. None: they are not.
            keep: whether the scores also hold the outputs.
        """
        return self(self.space.read(module)[None], keep)
