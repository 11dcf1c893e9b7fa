"""The server's part of a round leaves what clients have sent as it is."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flsv.aggregation import Aggregator
from flsv.parameters import ParameterSpace
from flsv.participants import Channel
from flsv.round import FederationState, Round
from flsv.server import ContributionMetrics
from flsv.server.round_server import RoundServer


class First(Aggregator):
    """The first client's model, as it lies in the matrix."""

    def weights(self, round: Round, contributions: Any) -> Tensor:
        return torch.tensor([1.0, 0.0])

    def aggregate(self, round: Round, contributions: Any) -> tuple[Tensor, Tensor]:
        return round.client_vectors[0], self.weights(round, contributions)


def test_an_aggregate_that_is_a_clients_model_leaves_that_model_alone() -> None:
    """Part of the way to it, with buffers all the way, and metrics and clients still see what was sent."""
    space = ParameterSpace(nn.BatchNorm1d(1))
    models = torch.arange(2.0 * space.size).view(2, space.size)
    before = models.clone()
    start = torch.full((space.size,), 10.0)
    aggregator = First(server_lr=0.5)
    server = RoundServer(ContributionMetrics({}), {"aggregator": aggregator}, space, Channel())
    round = Round(0, torch.arange(2), torch.tensor([1, 1]), start, models, space)
    done = server.finish(round, FederationState(2, global_vector=start))
    cut = space.num_parameters
    assert 0 < cut < space.size
    torch.testing.assert_close(done.server_vector[:cut], (before[0, :cut] + 10) / 2)  # type: ignore[index]
    assert torch.equal(done.server_vector[cut:], before[0, cut:])  # type: ignore[index]
    assert torch.equal(done.client_vectors, before)
    assert start.eq(10).all()
