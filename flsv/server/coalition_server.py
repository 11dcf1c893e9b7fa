"""CoalitionServer: the server's side of a coalition that is trained beside a run, as a federation of its members."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.aggregation import FedAvg
from flsv.configuration.federation_config import FederationConfig
from flsv.core import (
    Channel,
    Client,
    ClientUpdate,
    FederationState,
    Instruction,
    LocalData,
    Round,
)
from flsv.core.strategy import FederationInfo, Strategy
from flsv.filters import OutlierFilter
from flsv.functional.outliers import MIN_FACTOR
from flsv.sampling import ClientSampler
from flsv.sampling.base import checked_probabilities, draw_cohort
from flsv.server.checks import check_names
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.round_server import NoModel, RoundServer

#: A norm far from those whose squares float32 cannot hold.
_LARGE_NORM = 1e15


class CoalitionServer:
    """The server of one coalition, with copies of the run's strategies and filters.

    In each round :meth:`begin_round` returns the instructions for its cohort, and :meth:`end_round` takes the updates.
    Where the clients train is the caller's matter: at sites, or as rows of stacked tensors.
    """

    #: Whether a round whose updates no filter can exclude skips all parts of the server that do nothing.
    skips_idle_parts = True

    def __init__(
        self,
        members: list[int],
        federation: FederationInfo,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        #: Whether no further round can change the model, because all members have failed.
        self.is_over = False
        sampler: Any = federation.strategies["sampler"]
        self._sampler_of_run: ClientSampler = sampler
        self.set_members(members)

        strategies, metrics, filters = _copied_parts(federation)
        reported = check_names(strategies)
        self._metrics = ContributionMetrics(metrics, reported, federation.num_clients)
        self._metrics.reset()
        self.server = RoundServer(self._metrics, strategies, federation.space, Channel(), filters)
        self._parts = [*strategies.values(), *self.server.filters]

        self._only_averages = (
            type(self.server.aggregator) is FedAvg
            and self.server.aggregator.server_lr == 1
            and len(strategies) == 1
            and not metrics
            and {type(part) for part in self.server.filters} <= {OutlierFilter}
        )
        self.state = _state_before_rounds(federation)
        if saved is not None:
            self.state.global_vector = saved["model"].to(federation.global_vector).clone()
        info = replace(
            federation,
            global_vector=self.state.model().clone(),
            strategies={**federation.strategies, **strategies},
            metrics=metrics,
        )
        self._begin_or_resume(info, saved)
        self._metrics.to(federation.global_vector.device)

    def _begin_or_resume(self, info: FederationInfo, saved: Mapping[str, Any] | None) -> None:
        for part in self._parts:
            part.set_up(info)
        if saved is None:
            for part in self._parts:
                part.begin(info)
            return
        self._metrics.load_state_dict(saved["metrics"])
        self.state.load_state_dict(saved["state"])
        for part, state in zip(self._parts, saved["parts"]):
            part.load_state_dict(state)
            part.resume(info)

    def set_members(self, members: list[int]) -> None:
        self.members = members
        self._sampler = self._sampler_of_run.among(members)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the coalition's next round needs, by the keys of checkpoints."""
        state = self.state.state_dict()
        state["incidents"] = []  # saved with the run's state
        return {
            "parts": [part.state_dict() for part in self._parts],
            "metrics": self._metrics.state_dict(),
            "state": state,
            "model": self.state.model(),
        }

    def begin_round(
        self, round_index: int, clients: Sequence[Client], absent: Collection[int] = ()
    ) -> dict[int, Instruction]:
        """Draw the coalition's cohort, and return the instructions for its clients, except ``absent`` ones."""
        self._clients = clients
        self.state.round_index = round_index
        cohort = self._draw_cohort(clients)
        self.state.cohort = [client for client in cohort if client not in absent]
        self.instructions = self.server.instruct(self.state.cohort, self.state)
        return self.instructions

    def _draw_cohort(self, clients: Sequence[Client]) -> list[int]:
        state = self.state
        contributions = self._metrics.with_priors()
        cohort = draw_cohort(self._sampler, state, contributions, clients)
        # Each client's probability to be drawn is only computed if it is needed.
        self._drawing_probabilities = partial(
            checked_probabilities,
            self._sampler,
            state.num_clients,
            contributions=contributions,
            round_index=state.round_index,
            cohort=cohort,
        )
        return cohort

    def end_round(
        self,
        updates: Sequence[ClientUpdate],
        broken: Sequence[int],
        server_data: LocalData | None,
        matrix: Tensor | None = None,
    ) -> bool:
        """Aggregate the cohort's updates. Return False, and keep the model, if there is no next model."""
        is_complete = self._aggregate(updates, broken, server_data, matrix)
        if not is_complete:
            state = self.state
            state.failed = sorted({*state.failed, *state.cohort})
            drawable = self._sampler.members  # as in FederationRun
            if drawable is None:
                drawable = range(state.num_clients)
            self.is_over = set(state.failed).issuperset(drawable)
        return is_complete

    def _aggregate(
        self,
        updates: Sequence[ClientUpdate],
        broken: Sequence[int],
        server_data: LocalData | None,
        matrix: Tensor | None,
    ) -> bool:
        if not updates:
            return False
        if matrix is None:
            matrix = torch.stack([update.vector for update in updates])
        if self.skips_idle_parts and not broken and self._average(updates, matrix):
            return True
        self.server.send(self.instructions)  # only counts the messages
        try:
            received_round = self.server.receive(
                updates,
                matrix,
                instructions=self.instructions,
                state=self.state,
                clients=self._clients,
                server_data=server_data,
                drawing_probabilities=self._drawing_probabilities,
                broken=broken,
            )
            self._accept(set(received_round.client_ids.tolist()))
            finished_round = self.server.finish(received_round, self.state)
        except NoModel:
            return False
        senders = [update.client_id for update in updates]
        self.state.complete(finished_round, [*broken, *senders])
        return True

    def _average(self, updates: Sequence[ClientUpdate], matrix: Tensor) -> bool:
        """End the round by the average of similar updates, where no part of the server does anything else. Return
        False, and change nothing, if the server has such parts or a filter might act.
        """
        if not self._only_averages:
            return False
        state = self.state
        model = state.model()
        num_parameters = self.server.space.num_parameters
        norms = (matrix[:, :num_parameters] - model[:num_parameters]).norm(dim=1)
        smallest, largest = torch.stack(norms.aminmax()).tolist()
        # Then no update is MIN_FACTOR times the median, and none is so long that rounding loses the others.
        if not 0 < largest <= MIN_FACTOR * smallest < _LARGE_NORM:
            return False
        round = Round(
            round_index=state.round_index,
            client_ids=torch.tensor([update.client_id for update in updates]),
            num_samples=torch.tensor([update.num_samples for update in updates]),
            losses=torch.tensor([update.loss for update in updates]),
            num_steps=torch.tensor([update.num_steps for update in updates]),
            global_vector=model,
            client_vectors=matrix,
            starts=[model] * len(updates),
            reports={},
            clients=tuple(self._clients[update.client_id] for update in updates),
            all_clients=self._clients,
            server_data=None,
            space=self.server.space,
            seed=state.seed,
        )
        vector, weights = self.server.aggregator.aggregate(round, {})
        if not vector.sum().isfinite():
            return False
        state.is_aggregate_finite = True
        senders = [update.client_id for update in updates]
        state.complete(round.aggregated(vector, weights), senders)
        return True

    def _accept(self, clients: set[int]) -> None:
        """Let clients keep their states whose updates the filters have left in the round."""


def _copied_parts(
    federation: FederationInfo,
) -> tuple[dict[str, Strategy], dict[str, Any], Sequence[Any]]:
    strategies = dict(federation.strategies)
    strategies.pop("sampler", None)
    strategies.pop("personalizer", None)
    # They are copied together, since they may refer to each other.
    return copy.deepcopy((strategies, metric_of_aggregator(federation), federation.filters))


def _state_before_rounds(federation: FederationInfo) -> FederationState:
    no_counts = torch.zeros(federation.num_clients, dtype=torch.long)
    return FederationState(
        federation.num_clients,
        federation.seed,
        participations=no_counts,
        updates_received=no_counts.clone(),
        global_vector=federation.global_vector.clone(),
    )


def metric_of_aggregator(federation: FederationConfig | FederationInfo) -> dict[str, Any]:
    """Return the metric whose values the aggregator reads, as ``{name: metric}``. Empty if it reads none."""
    metric_name = federation.strategies["aggregator"].metric
    if metric_name is None or metric_name not in federation.metrics:
        return {}
    return {metric_name: federation.metrics[metric_name]}
