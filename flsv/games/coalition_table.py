"""CoalitionTable: the scores of a round's coalitions, each of which is evaluated only once."""

from __future__ import annotations

import torch
from torch import Tensor

from flsv.core import ALONE, Ranks, Round
from flsv.functional.shapley.game import coalition_keys, first_positions
from flsv.games.coalition_models import CoalitionModels
from flsv.games.scores import Scores
from flsv.games.vector_evaluator import Build, VectorEvaluator


class CoalitionTable:
    """Scores of those coalitions of one round that were evaluated so far.

    Games that differ in the performance measure share all scores. Games that differ in the weighting share only the
    empty coalition's.

    Args:
        round: the round whose clients are the players.
        evaluator: the evaluator of the coalitions' models.
        ranks: the processes among which the evaluations are divided. Each gets all scores. If the evaluator asks
            clients,
            every process evaluates all models.

    Attributes:
        evaluations: the number of models evaluated so far.
    """

    def __init__(self, round: Round, evaluator: VectorEvaluator, ranks: Ranks = ALONE) -> None:
        self.round, self.evaluator = round, evaluator
        self._ranks = ALONE if evaluator.asks_clients else ranks
        self._rows: dict[tuple[object, int | bytes], int] = {}
        self._scores: Scores | None = None

    @property
    def evaluations(self) -> int:
        return len(self._rows)

    def scores(self, models: CoalitionModels, masks: Tensor) -> Scores:
        """Return the scores of the K coalitions in ``masks``, bool ``[K, k]`` on the CPU.

        Coalitions that are not in the table yet are evaluated, with models that ``models`` builds, and added.
        """
        has_members = masks.any(1).tolist()
        keys = [(models.key if some else None, mask) for mask, some in zip(coalition_keys(masks), has_members)]
        new = first_positions(keys, self._rows)
        order = list(new.values())
        if order or self._scores is None:
            new_scores = self.evaluate(models.builder(masks[order]), len(order))
            self._scores = new_scores if self._scores is None else Scores.cat([self._scores, new_scores])
            # Stored last: after an error the coalitions can be evaluated again.
            self._rows |= {key: len(self._rows) + place for place, key in enumerate(new)}
        return self._scores[torch.tensor([self._rows[key] for key in keys], dtype=torch.int64)]

    def evaluate(self, build: Build, count: int) -> Scores:
        """Return the scores of ``count`` models, divided among the ranks, without storing them."""
        rank, size = self._ranks.rank, self._ranks.size
        if size == 1 or count < size:
            return self.evaluator.evaluate(build, count)
        mine = range(rank, count, size)
        part = self.evaluator.evaluate(lambda index, out: build(mine[index], out), len(mine))
        parts = self._ranks.all_gather(part, "scores of coalitions")
        order = torch.tensor([index for r in range(size) for index in range(r, count, size)])
        return Scores.cat(parts)[order.argsort()]
