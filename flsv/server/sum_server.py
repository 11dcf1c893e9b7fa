"""SumServer: a RoundServer that is given the cohort's average, and no client's update."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flsv.participants import Client, LocalData
from flsv.round import ClientUpdate, FederationState, Instruction, Round, RowAverages
from flsv.server.round_server import RoundServer


class SumServer(RoundServer):
    """All updates that it collects are the average, so nothing is filtered, and no client has a norm, a loss or a
    number of samples.

    Args:
        sums: gives what there is of the last round beside the average: the sum of its weights, None where all clients
            weigh the same; and the averages of rows that clients have trained beside, or None.
        options: those of :class:`RoundServer`.
    """

    def __init__(self, sums: Callable[[], tuple[float | None, RowAverages | None]], *options: Any, **more: Any) -> None:
        super().__init__(*options, **more)
        self._sums = sums

    def collect(
        self,
        updates: Sequence[ClientUpdate],
        matrix: Tensor,
        instructions: Mapping[int, Instruction],
        state: FederationState,
        clients: Sequence[Client],
        server_data: LocalData | None = None,
        chances: Callable[[], Tensor] | None = None,
        broken: Sequence[int] = (),
    ) -> Round:
        """See :meth:`RoundServer.collect`."""
        model = state.model()
        sum_weight, row_averages = self._sums()
        self._receive(updates)
        self.norms = {}
        return Round(
            round_index=state.round_index,
            client_ids=torch.tensor([update.client_id for update in updates], device=model.device),
            num_samples=torch.ones(len(updates), dtype=torch.long, device=model.device),
            global_vector=model,
            client_vectors=matrix,
            reports=self._reports(updates, model.device),
            clients=tuple(clients[update.client_id] for update in updates),
            server_data=server_data,
            space=self.space,
            seed=state.seed,
            chances=chances,
            games=self.games,
            channel=self.channel,
            sum_weight=sum_weight,
            row_averages=row_averages,
        )
