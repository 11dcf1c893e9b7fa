"""Servers that aggregate the models of many coalitions of clients, each of which is a federation of its own.

The coalitions are trained by clients at sites (:mod:`flsv.retraining.shadow`). For FedAvg each next model is a weighted
sum, to which the clients' models are added one by one. For any other aggregator each coalition has a copy of the
aggregator and, if it uses a metric's values, of this metric.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.attacks import Collusion
from flsv.configuration.federation_config import FederationConfig
from flsv.core import Channel, Client, ClientUpdate, FederationState, LocalData
from flsv.core.strategy import FederationInfo, Strategy
from flsv.server import ContributionMetrics, RoundServer
from flsv.server.checks import check_names
from flsv.server.round_server import NoModel


def servers_of(
    federation: FederationInfo,
    masks: Tensor,
    models: Tensor,
    saved: Mapping[int, Any] | None = None,
) -> Averages | Servers:
    """Make the servers of K coalitions: for plain FedAvg :class:`Averages`, otherwise one :class:`OneServer` for each.

    Args:
        federation: the properties of the whole federation.
        masks: bool ``[K, n]``, the members of each coalition.
        models: ``[K, P]``, the models that the coalitions start from.
        saved: the servers' ``state_dict`` from a checkpoint; None: a new run begins.
    """
    # Without uploads, an outlier filter that excludes nobody drops only updates that are not finite, which `Averages`
    # refuses, too.
    whole = not any(each.excludes or each.bounds for each in federation.filters)
    if type(federation.strategies["aggregator"]) is FedAvg and whole and not federation.uploads:
        return Averages(federation)
    rows = masks.any(1).nonzero().flatten().tolist()
    return Servers({row: OneServer(federation, models[row], None if saved is None else saved[row]) for row in rows})


def read_metrics(federation: FederationConfig | FederationInfo) -> dict[str, Any]:
    """Return ``{name: metric}`` of the metric whose values the aggregator uses, empty if it uses none."""
    read = federation.strategies["aggregator"].metric
    return {name: metric for name, metric in federation.metrics.items() if name == read}


def unlike_alone(config: FederationConfig, algorithm: Any) -> str | None:
    """Return why coalitions' models cannot be trained as rows of one batched model; None if they can.

    Args:
        config: the federation's configuration.
        algorithm: the client algorithm; None: there is none.
    """
    aggregator = config.aggregator
    if config.personalizer is not None:
        return f"personalizer={config.personalizer!r} gives each client a start point of its own"
    if algorithm is not None and not algorithm.entrywise:
        return f"client_algorithm={algorithm!r} gives each client a state of its own, or steps of its own"
    if colluders := [each for each in config.uploads if isinstance(each, Collusion)]:
        return f"{colluders} compare the updates of one cohort"
    if type(aggregator).report is not Strategy.report or aggregator.sends:
        return f"aggregator {aggregator!r} exchanges more than models"
    metrics = ContributionMetrics(read_metrics(config), check_names(config.strategies))
    if asking := dict.fromkeys([*metrics.game_metrics, *metrics.evaluating, *metrics.peer_metrics]):
        return f"metrics {list(asking)} evaluate models in every round"
    if any("losses" in fields.values() for fields in metrics.fields.values()):
        return f"metrics {list(metrics.fields)} look at the losses of the clients' training"
    return None


class Averages:
    """FedAvg's server for many coalitions at once: one weighted sum per coalition, to which clients' models are added.

    Args:
        federation: the properties of the whole federation.
    """

    def __init__(self, federation: FederationInfo) -> None:
        self._aggregator: Any = federation.strategies["aggregator"]
        self._samples = federation.split_sizes["train"]
        self._cut = federation.space.num_parameters

    def begin_round(self, members: Tensor, models: Tensor, round_index: int) -> None:
        """Begin a round of all coalitions, see :meth:`Servers.begin_round`."""
        samples = self._samples if self._aggregator.weighting == "samples" else torch.ones_like(self._samples)
        weights = members.double() * samples.to(members.device)
        self._weights = (weights / weights.sum(1, keepdim=True).clamp(min=1)).to(models)
        self._empty = ~members.any(1).to(models.device)
        self._next = torch.zeros_like(models)

    def receive(self, client: int, rows: Tensor, sent: Tensor, steps: int) -> None:
        """Add a client's models to its coalitions' sums, see :meth:`Servers.receive`."""
        self._next.index_add_(0, rows, sent * self._weights[rows, client, None])

    def end_round(self, models: Tensor, clients: Sequence[Client], server_data: LocalData | None) -> Tensor:
        """Return the coalitions' next models ``[K, P]``, see :meth:`Servers.end_round`."""
        after, rate, cut = self._next, self._aggregator.server_lr, self._cut
        if rate != 1:
            after[:, :cut] = torch.lerp(models[:, :cut], after[:, :cut], rate)
        return torch.where(self._empty[:, None], models, after)  # an index of bools would wait for the device

    def state_dict(self) -> dict[int, Any]:
        """Return an empty state: the next round needs only the coalitions' models."""
        return {}


class Servers:
    """The servers of many coalitions, one for each.

    Args:
        servers: the server of each non-empty coalition, by the coalition's row in ``masks [K, n]``.
    """

    def __init__(self, servers: Mapping[int, OneServer]) -> None:
        self._servers = servers

    def begin_round(self, members: Tensor, models: Tensor, round_index: int) -> None:
        """Begin a round: give each coalition's server its cohort and its model.

        Args:
            members: bool ``[K, n]``, the members of each coalition that take part in the round.
            models: ``[K, P]``, the models that the coalitions start from.
            round_index: the round's index, from 0.
        """
        for row, server in self._servers.items():
            server.begin_round(members[row].nonzero().flatten().tolist(), models[row], round_index)

    def receive(self, client: int, rows: Tensor, sent: Tensor, steps: int) -> None:
        """Receive the models that a client has trained for the R coalitions that it is a member of.

        Args:
            client: the client's number.
            rows: int64 ``[R]``, the rows of these coalitions.
            sent: ``[R, P]``, the models as the client sends them.
            steps: the number of optimizer steps of each model.
        """
        for row, vector in zip(rows.tolist(), sent):
            self._servers[row].receive(client, vector, steps)

    def end_round(self, models: Tensor, clients: Sequence[Client], server_data: LocalData | None) -> Tensor:
        """End the round and return the coalitions' next models ``[K, P]``.

        Args:
            models: ``[K, P]``, the models at the start of the round, which :meth:`begin_round` got.
            clients: all n clients, for metrics that need their answers.
            server_data: the server's validation set.

        A coalition keeps its model if all its updates, or its next model, are not finite.
        """
        models = models.clone()
        for row, server in self._servers.items():
            with suppress(NoModel):
                models[row] = server.end_round(clients, server_data)
        return models

    def state_dict(self) -> dict[int, Any]:
        """Return the states that the servers need for the next round, beside the models, by the coalition's row."""
        return {row: server.state_dict() for row, server in self._servers.items()}


class OneServer:
    """One coalition's server, with an aggregator, filters and metrics of its own.

    Args:
        federation: the properties of the whole federation.
        start: ``[P]``, the model that the coalition starts from.
        saved: the server's ``state_dict`` from a checkpoint; None: a new run begins.
    """

    def __init__(
        self,
        federation: FederationInfo,
        start: Tensor,
        saved: Mapping[str, Any] | None,
    ) -> None:
        clients = federation.num_clients
        aggregator, metrics, filters = copy.deepcopy(
            (federation.strategies["aggregator"], read_metrics(federation), federation.filters)
        )
        own = {"aggregator": aggregator}
        self._samples = federation.split_sizes["train"]
        self._metrics = ContributionMetrics(metrics, check_names(own), clients)
        self._metrics.reset()
        self._metrics.to(start.device)
        self._server = RoundServer(self._metrics, own, federation.space, Channel(), filters)
        unseen = torch.zeros(clients, dtype=torch.long)
        self._state = FederationState(clients, federation.seed, participations=unseen, updates_received=unseen.clone())
        self._parts = [aggregator, *self._server.filters]
        strategies = {**federation.strategies, **own}
        info = replace(federation, global_vector=start.clone(), strategies=strategies, metrics=metrics)
        if saved is None:
            for part in self._parts:
                part.begin(info)
            return
        self._metrics.load_state_dict(saved["metrics"])
        self._metrics.to(start.device)  # a checkpoint holds them on the CPU
        self._state.load_state_dict(saved["state"])
        for part, state in zip(self._parts, saved["parts"]):
            part.load_state_dict(state)
            part.resume(info)

    def begin_round(self, cohort: list[int], model: Tensor, round_index: int) -> None:
        """Begin a round of the coalition.

        Args:
            cohort: ids of the coalition's members that take part.
            model: ``[P]``, the model that they start from.
            round_index: the round's index, from 0.
        """
        state = self._state
        state.cohort, state.round_index, state.global_vector = cohort, round_index, model.clone()
        self._updates: list[ClientUpdate] = []
        self._broken: list[int] = []

    def receive(self, client: int, vector: Tensor, steps: int) -> None:
        """Receive a client's update; it is ignored if the client does not take part in the round.

        Args:
            client: the client's id.
            vector: ``[P]``, the client's model.
            steps: its number of optimizer steps.
        """
        if client not in self._state.cohort:
            return
        if not vector.isfinite().all():
            self._broken.append(client)
            return
        self._updates.append(ClientUpdate(client, int(self._samples[client]), vector, float("nan"), steps))

    def end_round(self, clients: Sequence[Client], server_data: LocalData | None) -> Tensor:
        """End the round and return the coalition's next model ``[P]``."""
        server, state, updates = self._server, self._state, self._updates
        if not state.cohort:
            return state.model()
        instructions = server.instruct(state.cohort, state)
        server.send(instructions)
        matrix = torch.stack([update.vector for update in updates]) if updates else state.model()[None][:0]
        round = server.receive(updates, matrix, instructions, state, clients, server_data, None, self._broken)
        round = server.finish(round, state)
        state.complete(round, state.cohort)
        return state.model()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the server needs for the next round, beside the model."""
        parts = [part.state_dict() for part in self._parts]
        return {"parts": parts, "metrics": self._metrics.state_dict(), "state": self._state.state_dict()}
