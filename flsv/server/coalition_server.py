"""The server's half of coalitions that are trained beside a run, each as a federation of its members.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flsv.configuration.federation_config import FederationConfig
from flsv.core import (
    Channel,
    Client,
    ClientUpdate,
    FederationState,
    Instruction,
    LocalData,
)
from flsv.core.strategy import FederationInfo, Strategy
from flsv.sampling.base import checked_probabilities, coalition_sampler, draw_cohort
from flsv.server.checks import check_names
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.round_server import NoModel, RoundServer


class CoalitionServer:
    """The server of one coalition, with copies of the run's strategies and filters.

    In each round :meth:`begin_round` returns the instructions for its cohort, and :meth:`end_round` takes the updates.
    Where the clients train is the caller's matter: at sites, or as rows of stacked tensors.

    Args:
        members: the ids of the coalition's clients, at least one.
        federation: the federation of the run.
        saved: the state of an earlier server, from :meth:`state_dict`. None: the coalition has not begun.

    Attributes:
        state: the coalition's state, with its model.
        server: the server of its rounds.
        instructions: the instructions of this round, ``{client id: instruction}``.

    Raises:
        ConfigurationError: the run's sampler cannot draw cohorts of a coalition.
    """

    def __init__(
        self,
        members: list[int],
        federation: FederationInfo,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        self._sampler_of_run: Any = federation.strategies["sampler"]
        self.set_members(members)

        strategies, metrics, filters = _copied_parts(federation)
        reported = check_names(strategies)
        self._metrics = ContributionMetrics(metrics, reported, federation.num_clients)
        self._metrics.reset()
        self.server = RoundServer(self._metrics, strategies, federation.space, Channel(), filters)
        self._parts = [*strategies.values(), *self.server.filters]

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
        self._sampler = coalition_sampler(self._sampler_of_run, members)

    @property
    def is_over(self) -> bool:
        """Whether the coalition keeps its model in all further rounds, where a run of its members would have ended:
        all clients that can be drawn have failed since the last update.
        """
        return self._sampler.draws_only(self.state.failed, self.state.num_clients)

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
        """Draw the coalition's cohort, and return the instructions for its clients, except ``absent`` ones. A coalition
        that is over has no cohort.

        Args:
            round_index: the round, from 0.
            clients: all n clients of the run.
            absent: ids of clients that cannot take part.
        """
        self._clients = clients
        self.state.round_index = round_index
        cohort = [] if self.is_over else self._draw_cohort(clients)
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
    ) -> list[int]:
        """Compute the next model from the cohort's updates.

        Args:
            updates: the updates that clients have sent, with finite vectors ``[P]``.
            broken: ids of the clients whose model was not finite.
            server_data: the server's validation set.

        Returns:
            The ids of the clients whose updates filters have left in the round. Empty if there is none, so that the
            model stays as it is.
        """
        self.server.send(self.instructions)  # only counts the messages
        senders = [*broken, *(update.client_id for update in updates)]
        if not updates:
            self._add_failed(senders)
            return []
        try:
            received_round = self.server.receive(
                updates,
                torch.stack([update.vector for update in updates]),
                instructions=self.instructions,
                state=self.state,
                clients=self._clients,
                server_data=server_data,
                drawing_probabilities=self._drawing_probabilities,
                broken=broken,
            )
        except NoModel:
            self._add_failed(senders)
            return []
        try:
            finished_round = self.server.finish(received_round, self.state)
        except NoModel:  # for the second time in a row: a run would end
            self._add_failed(self.members)
            return []
        self.state.complete(finished_round, senders)
        accepted: list[int] = received_round.client_ids.tolist()
        return accepted

    def _add_failed(self, clients: Sequence[int]) -> None:
        """Add clients to those that have failed since the last update. A client that has sent nothing is none of them,
        since its next reply may arrive.
        """
        self.state.failed = sorted({*self.state.failed, *clients})


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
