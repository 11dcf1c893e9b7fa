"""ShapFed's personalization: equation 8, Algorithm 1's order, and what free-riders get from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from toys import Plain, fit, network

from flsv.aggregation import ShapFedWA
from flsv.functional import class_specific_shapley
from flsv.loop import FederatedLoop
from flsv.metrics import ClassSpecificShapley
from flsv.personalization import ShapFedPersonalizer


class Watched(ShapFedPersonalizer):
    """Remembers the rounds."""

    def __init__(self, metric: str = "cssv") -> None:
        super().__init__(metric)
        self.rounds: list[Any] = []

    def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
        self.rounds.append(round)
        return super().personalize(round, contributions, models)


def shapfed(personalizer: ShapFedPersonalizer, **kwargs: Any) -> FederatedLoop:
    metrics = {"cssv": ClassSpecificShapley(momentum=0.5)}
    return FederatedLoop(ShapFedWA("cssv"), metrics, personalizer=personalizer, **kwargs)


def test_equation_8_and_the_order_of_algorithm_1(tmp_path: Path) -> None:
    """Start points, aggregates and contributions of four rounds, recomputed from the clients' vectors alone."""
    personalizer = Watched()
    loop = shapfed(personalizer, seed=1)
    fit(loop, tmp_path, Plain(network(batch_norm=True)), rounds=4)
    starts, share, running = None, torch.full((3,), 1 / 3), None
    for round in personalizer.rounds:
        rows = round.space.head.rows
        begun = round.global_vector.expand(3, -1) if starts is None else starts
        torch.testing.assert_close(share @ round.client_vectors, round.server_vector, rtol=1e-5, atol=1e-6)
        heads = rows(round.client_vectors) - rows(begun)  # updates from where each client started
        now = class_specific_shapley(heads, torch.einsum("k,kmd->md", share, heads))
        running = now if running is None else 0.5 * running + 0.5 * now
        gamma = ((1 + running) / 2).mean(1)
        assert gamma.sum() > 1.2  # not normalized
        starts = gamma[:, None] * round.server_vector + (1 - gamma[:, None]) * round.client_vectors
        share = gamma / gamma.sum()
    for client in range(3):
        torch.testing.assert_close(loop.state.starts[client], starts[client], rtol=1e-5, atol=1e-5)
