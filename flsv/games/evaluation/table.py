"""CoalitionTable: memoises a round's coalition evaluations."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from flsv import counting
from flsv.errors import ConfigurationError
from flsv.games.evaluation.coalition_models import CoalitionModels
from flsv.games.evaluation.evaluator import ModelEvaluator
from flsv.games.evaluation.replica import Build
from flsv.games.evaluation.scores import Scores
from flsv.games.evaluation.validated import NamedScores, ValidatedModels
from flsv.participants import ALONE, Ranks
from flsv.round import Round


class CoalitionTable:
    """All coalition scores of one round that have been requested.

    Utilities of different metrics share its rows; utilities of different weightings share the empty coalition, which is
    the same model for all.

    Args:
        round: the players and their updates.
        evaluator: evaluates their models.
        ranks: processes that share the evaluations out; each has all scores.

    Attributes:
        evaluations: models evaluated so far.
    """

    def __init__(self, round: Round, evaluator: ModelEvaluator | ValidatedModels, ranks: Ranks = ALONE) -> None:
        if round.space.size != evaluator.space.size:
            raise ConfigurationError(
                f"the round's models have {round.space.size} parameters, the evaluator's module has "
                f"{evaluator.space.size}: they are not of the same structure."
            )
        self.round, self.evaluator, self._ranks = round, evaluator, ranks
        self._rows: dict[tuple[object, bytes], int] = {}
        self._scores: Scores | NamedScores | None = None

    @property
    def evaluations(self) -> int:
        return len(self._rows)

    def scores(self, models: CoalitionModels, masks: Tensor) -> Scores | NamedScores:
        """The scores of the coalitions ``masks`` (bool ``[K, k]`` on the CPU), K at least 1; new ones are evaluated."""
        empty = ~masks.any(1)
        keys = [(None if nobody else models.key, mask) for mask, nobody in zip(_bitmasks(masks), empty.tolist())]
        new = {key: position for position, key in reversed(list(enumerate(keys))) if key not in self._rows}
        order = sorted(new.values())
        if order:
            found = self._evaluate(models.builder(masks[order]), len(order))
            self._scores = found if self._scores is None else type(found).cat([self._scores, found])  # type: ignore[list-item]
            # Only now: after an error the coalitions can be asked for again.
            for position in order:
                self._rows[keys[position]] = len(self._rows)
        assert self._scores is not None
        return self._scores[torch.tensor([self._rows[key] for key in keys])]

    def _evaluate(self, build: Build, count: int) -> Scores | NamedScores:
        rank, size = self._ranks.rank, self._ranks.size
        if size == 1 or count < size:
            return self.evaluator.evaluate(_counted(build, count), count)
        mine = range(rank, count, size)
        build_mine = _counted(lambda index, out: build(mine[index], out), len(mine))
        part = self.evaluator.evaluate(build_mine, len(mine))
        parts = self._ranks.everybody(part, "scores of coalitions")
        order = torch.tensor([index for r in range(size) for index in range(r, count, size)])
        return type(part).cat(parts)[order.argsort()]


def _counted(build: Build, count: int) -> Build:
    """The same, and a progress bar sees how many models have been begun."""
    begun: set[int] = set()  # one may be built again, after an error or in parts
    counting.more("coalitions", count)

    def counted(index: int, out: Tensor) -> None:
        build(index, out)
        if index not in begun:
            begun.add(index)
            counting.advance()

    return counted


def _bitmasks(masks: Tensor) -> list[bytes]:
    """A key for every row, of any number of clients."""
    width = -(-masks.shape[1] // 8)
    packed = np.packbits(masks.numpy(), axis=1).tobytes()
    return [packed[start : start + width] for start in range(0, len(packed), width)]
