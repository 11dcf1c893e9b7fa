"""The server's part of many coalitions that are trained side by side.

Where the aggregator is FedAvg it is a weighted sum, to which every client's models are added. Any other aggregator, and
the metric that it reads, is there once per coalition.
"""

from __future__ import annotations

import copy
import math

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
    return Servers(trainer, data, space, config, masks, seed, models)


class Sums:
    """Where servers average."""

    def __init__(self, averages: CoalitionAverages) -> None:
        self._averages = averages

    def receive(self, client: int, steps: int, rows: Tensor, models: Tensor, sent: Tensor, losses: Tensor) -> None:
        """See :meth:`Servers.receive`."""
        self._averages.receive(client, rows, sent)

    def end_round(self, models: Tensor) -> Tensor:
        """The next models ``[K, P]``."""
        after = self._averages.end_round(models)
        if not after.isfinite().all():
            raise ConfigurationError("some coalitions come to models with NaN.")
        return after


class Servers:
    """A server for each coalition, with an aggregator, filters and metrics of its own."""

    def __init__(
        self,
        trainer: L.Trainer,
        data: FederatedDataModule,
        space: ParameterSpace,
        config: FederationConfig,
        masks: Tensor,
        seed: int,
        models: Tensor,
    ) -> None:
        self._data, self._space, self._uploads, self._seed = data, space, config.uploads, seed
        self._kept: dict[tuple[int, int], State] = {}
        self._round_index = 0
        self._manager = ClientManager(trainer, data, space, ClientStates())
        self._servers: dict[int, tuple[RoundServer, FederationState]] = {}
        for row, members in enumerate(masks):
            if cohort := members.nonzero().flatten().tolist():
                self._servers[row] = self._server(trainer, copy.deepcopy(config), cohort, models[row].clone())
        self._begin()

    def _context(self, row: int, client: int) -> UploadContext:
        kept = self._kept.setdefault((row, client), {})
        clients, cut = self._data.num_clients, self._space.num_parameters
        return UploadContext(client, clients, cut, self._round_index, self._seed, kept)

    def _server(
        self, trainer: L.Trainer, config: FederationConfig, cohort: list[int], start: Tensor
    ) -> tuple[RoundServer, FederationState]:
        data, strategies = self._data, config.strategies
        board = ContributionMetrics(config.metrics, check_names(strategies))
        board.bind(data.num_clients, data.num_classes, data.class_names, data.known_class_counts, data.client_names)
        board.to(start.device)
        parts = list(strategies.values())
        channel = self._manager.channel
        server = RoundServer(board, config.aggregator, None, parts, self._space, channel, filters=config.filters)
        known = federation(
            start, self._space, data, self._seed, trainer.optimizers, strategies, config.local_epochs, config.uploads
        )
        for part in (*parts, *server.filters):
            part.begin(known)
        return server, FederationState(
            num_clients=data.num_clients, seed=self._seed, global_vector=start, cohort=cohort
        )

    def _begin(self) -> None:
        self._updates: dict[int, list[ClientUpdate]] = {row: [] for row in self._servers}
        self._broken: dict[int, list[int]] = {row: [] for row in self._servers}

    def receive(self, client: int, steps: int, rows: Tensor, models: Tensor, sent: Tensor, losses: Tensor) -> None:
        """What a client has made of the models of its coalitions.

        Args:
            client: its number.
            steps: that it took in each.
            rows: int64 ``[R]``, its coalitions.
            models: ``[K, P]``, of all coalitions at the start of the round.
            sent: ``[R, P]``, before its uploads.
            losses: ``[R]``, its mean training losses.
        """
        cut, count = self._space.num_parameters, int(self._data.num_samples[client])
        for row, trained, loss in zip(rows.tolist(), sent, losses.tolist()):
            start, context = models[row], self._context(row, client)
            vector, traffic = upload(self._uploads, trained, start, start, context)
            if not vector.isfinite().all():
                self._broken[row].append(client)
                continue
            norm = distances(vector[None, :cut], start[:cut]).item()
            told = sanitize_report(self._uploads, context, "loss", loss)
            self._updates[row].append(ClientUpdate(client, count, vector, told, steps, norm, {}, traffic))

    def end_round(self, models: Tensor) -> Tensor:
        """The next models ``[K, P]``."""
        models = models.clone()
        for row, (server, state) in self._servers.items():
            updates, instructions = self._updates[row], server.instruct(state.cohort, state)
            server.send(instructions)
            matrix = torch.stack([update.vector for update in updates]) if updates else models[:0]
            manager = self._manager
            round = server.receive(
                updates, matrix, instructions, state, manager.clients, manager.server, broken=self._broken[row]
            )
            round = server.finish(round, state)
            assert round.server_vector is not None
            assert round.aggregation_weights is not None
            state.weights = torch.full((state.num_clients,), math.nan)
            state.weights[round.client_ids.cpu()] = round.aggregation_weights.detach().float().cpu()
            models[row] = state.global_vector = round.server_vector
            state.round_index += 1
        self._round_index += 1
        self._begin()
        return models
