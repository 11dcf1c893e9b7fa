"""The server's part of many coalitions that are trained side by side.

Where the aggregator is FedAvg it is a weighted sum, to which every client's models are added. Any other aggregator, and
the metric that it reads, is there once per coalition.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.clients.algorithms.shadow import CoalitionAverages
from flsv.clients.client_manager import ClientManager
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.functional.divergences import distances
from flsv.parameters import ParameterSpace
from flsv.participants import ClientStates, State
from flsv.round import ClientUpdate, FederationState
from flsv.server import ContributionMetrics, RoundServer
from flsv.server.checks import check_names
from flsv.server.config import FederationConfig
from flsv.server.description import federation
from flsv.uploads import UploadContext, sanitize_report, upload


def servers_of(
    trainer: L.Trainer, space: ParameterSpace, config: FederationConfig, masks: Tensor, seed: int, models: Tensor
) -> Sums | Servers:
    """The servers of coalitions ``[K, n]`` that start from the models ``[K, P]``."""
    data: FederatedDataModule = trainer.datamodule  # type: ignore[attr-defined]
    # Whom an outlier filter leaves out, whatever its threshold, sends what an upload changed, or what is not finite,
    # which sums refuse.
    whole = not any(each.excludes or each.bounds for each in config.filters)
    if type(config.aggregator) is FedAvg and whole and not config.uploads:
        return Sums(CoalitionAverages(config.aggregator, data.num_samples, masks, models, space.num_parameters))
    manager = ClientManager(trainer, data, space, ClientStates())
    return Servers(
        {
            row: OneServer(
                trainer, manager, space, copy.deepcopy(config), members.nonzero().flatten().tolist(), seed, model
            )
            for row, (members, model) in enumerate(zip(masks, models))
            if members.any()
        }
    )


class Sums:
    """Where servers average."""

    def __init__(self, averages: CoalitionAverages) -> None:
        self._averages = averages

    def receive(self, client: int, steps: int, rows: Tensor, sent: Tensor, losses: Tensor) -> None:
        """See :meth:`Servers.receive`."""
        self._averages.receive(client, rows, sent)

    def end_round(self, models: Tensor) -> Tensor:
        """The next models ``[K, P]`` after these."""
        after = self._averages.end_round(models)
        if not after.isfinite().all():
            raise ConfigurationError("some coalitions come to models with NaN.")
        return after


class Servers:
    """A server for each coalition, by its row."""

    def __init__(self, servers: Mapping[int, OneServer]) -> None:
        self._servers = servers

    def receive(self, client: int, steps: int, rows: Tensor, sent: Tensor, losses: Tensor) -> None:
        """What a client has made of the models of its coalitions.

        Args:
            client: its number.
            steps: that it took in each.
            rows: int64 ``[R]``, its coalitions.
            sent: ``[R, P]``, before its uploads.
            losses: ``[R]``, its mean training losses.
        """
        for row, trained, loss in zip(rows.tolist(), sent, losses.tolist()):
            self._servers[row].receive(client, steps, trained, loss)

    def end_round(self, models: Tensor) -> Tensor:
        """The next models ``[K, P]`` after these."""
        models = models.clone()
        for row, server in self._servers.items():
            models[row] = server.end_round()
        return models


class OneServer:
    """One coalition's, with an aggregator, filters and metrics of its own.

    Args:
        trainer, space: of the federation.
        manager: of its clients.
        config: of this coalition alone.
        cohort: its members.
        seed: of the run.
        start: ``[P]``, the first model.
    """

    def __init__(
        self,
        trainer: Any,
        manager: ClientManager,
        space: ParameterSpace,
        config: FederationConfig,
        cohort: list[int],
        seed: int,
        start: Tensor,
    ) -> None:
        data, strategies, start = trainer.datamodule, config.strategies, start.clone()
        self._samples, self._cut = data.num_samples, space.num_parameters
        self._manager, self._uploads = manager, config.uploads
        self._kept: dict[int, State] = {}
        self._updates: list[ClientUpdate] = []
        self._broken: list[int] = []
        board = ContributionMetrics(config.metrics, check_names(strategies))
        board.bind(data.num_clients, data.num_classes, data.class_names, data.known_class_counts, data.client_names)
        board.to(start.device)
        parts = list(strategies.values())
        self._server = RoundServer(board, strategies, space, manager.channel, config.filters)
        self._state = FederationState(num_clients=data.num_clients, seed=seed, global_vector=start, cohort=cohort)
        known = federation(start, space, data, seed, trainer.optimizers, config, {})
        for part in (*parts, *self._server.filters):
            part.begin(known)

    def receive(self, client: int, steps: int, trained: Tensor, loss: float) -> None:
        """What a client has made of the model ``[P]``."""
        state, start = self._state, self._state.model()
        kept = self._kept.setdefault(client, {})
        context = UploadContext(client, state.num_clients, self._cut, state.round_index, state.seed, kept)
        vector, traffic = upload(self._uploads, trained, start, start, context)
        if not vector.isfinite().all():
            self._broken.append(client)
            return
        norm = distances(vector[None, : self._cut], start[: self._cut]).item()
        loss = sanitize_report(self._uploads, context, "loss", loss)
        count = int(self._samples[client])
        self._updates.append(ClientUpdate(client, count, vector, loss, steps, norm, {}, traffic))

    def end_round(self) -> Tensor:
        """The next model ``[P]``."""
        server, state, manager = self._server, self._state, self._manager
        updates, broken = self._updates, self._broken
        self._updates, self._broken = [], []
        instructions = server.instruct(state.cohort, state)
        server.send(instructions)
        matrix = torch.stack([update.vector for update in updates]) if updates else state.model()[None][:0]
        round = server.receive(updates, matrix, instructions, state, manager.clients, manager.server, broken=broken)
        round = server.finish(round, state)
        assert round.server_vector is not None
        assert round.aggregation_weights is not None
        state.weights = torch.full((state.num_clients,), math.nan)
        state.weights[round.client_ids.cpu()] = round.aggregation_weights.detach().float().cpu()
        state.global_vector = round.server_vector
        state.round_index += 1
        return round.server_vector
