"""The server's half of coalitions that are trained beside a run, each as a federation of its members.

:class:`CoalitionServer` is the server of one coalition, of any kind. :class:`AveragedCoalitions` are the servers of
many coalitions, if they only average models, and :class:`ServedCoalitions` of any kind.
"""

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
)
from flsv.core.strategy import FederationInfo, Strategy
from flsv.filters import OutlierFilter
from flsv.functional.distances import distances
from flsv.functional.outliers import MIN_FACTOR
from flsv.sampling.base import checked_probabilities, coalition_sampler, draw_cohort
from flsv.sampling.uniform import FixedCohort
from flsv.server.checks import check_names
from flsv.server.contribution_metrics import ContributionMetrics
from flsv.server.round_server import NoModel, RoundServer
from flsv.training.algorithms.base import ClientAlgorithm, is_proximal

#: A norm far from those whose squares float32 cannot hold.
_LARGE_NORM = 1e15


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
        """Return whether the coalition keeps its model in all further rounds, where a run of its members would have
        ended: all clients that can be drawn have failed since the last update.
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


def only_averages(federation: FederationInfo) -> bool:
    """Return whether a coalition's server does nothing but average models, by :class:`AveragedCoalitions`."""
    roles = set(federation.strategies)
    algorithm = federation.strategies.get("client_algorithm")
    if isinstance(algorithm, ClientAlgorithm) and is_proximal(algorithm):
        roles.remove("client_algorithm")  # it does nothing at the server
    has_other_strategies = bool(roles - {"aggregator", "sampler"})
    filter_classes = {type(update_filter) for update_filter in federation.filters}
    has_other_filters = bool(filter_classes - {OutlierFilter})
    is_average = type(federation.strategies["aggregator"]) is FedAvg
    return is_average and not has_other_strategies and not has_other_filters


class AveragedCoalitions:
    """The servers of K coalitions at once, which average their clients' models and do nothing else.

    The models are those of K :class:`CoalitionServer`, up to rounding. A round is one product: the cohorts' weights
    ``[K, n]`` times the updates. The updates are added to K sums as clients have trained, and are not kept: call
    :meth:`begin_round`, for each client :meth:`add`, and :meth:`end_round`.

    Args:
        masks: bool ``[K, n]``, the coalitions, each of at least one client.
        federation: the federation of the run, of which :func:`only_averages` is true.

    Attributes:
        models: ``[K, P]``, the model of each coalition after its last round.
        cohorts: bool ``[K, n]``, the clients of each coalition that train in this round.
        is_over: bool ``[K]``, whether a coalition has ended, since all its clients have failed.
        needs_server: bool ``[K]``, whether a coalition has ended because it needs a :class:`CoalitionServer`: a filter
            would exclude an update, or the average is not finite. Its model is not valid.

    Raises:
        ConfigurationError: the run's sampler cannot draw cohorts of a coalition.

    Example:
        >>> from flsv.aggregation import FedAvg
        >>> from flsv.sampling import FullParticipation
        >>> from flsv.testing.rounds import PreparedRounds
        >>> from flsv.testing.samplers import federation_of
        >>> strategies = {"aggregator": FedAvg(), "sampler": FullParticipation()}
        >>> federation = replace(federation_of(PreparedRounds(), 2), strategies=strategies)
        >>> coalitions = AveragedCoalitions(torch.tensor([[True, False], [True, True]]), federation)
        >>> coalitions.begin_round(0, clients=[])
        >>> for client in (0, 1):
        ...     rows = coalitions.rows_of(client)
        ...     coalitions.add(client, rows, coalitions.models[rows] + client)
        >>> coalitions.end_round()
        >>> (coalitions.models - federation.global_vector).mean(1)
        tensor([0.0000, 0.5000])
    """

    def __init__(self, masks: Tensor, federation: FederationInfo) -> None:
        num_coalitions = len(masks)
        global_vector = federation.global_vector
        aggregator: Any = federation.strategies["aggregator"]
        self.models = global_vector.repeat(num_coalitions, 1)
        self.cohorts = torch.zeros_like(masks)
        self.is_over = torch.zeros(num_coalitions, dtype=torch.bool)
        self.needs_server = torch.zeros(num_coalitions, dtype=torch.bool)

        self._state = _state_before_rounds(federation)
        self._num_parameters = federation.space.num_parameters
        self._server_lr = aggregator.server_lr
        self._filters = federation.filters  # OutlierFilters
        self._shares = federation.split_sizes["train"].cpu().double()  # [n]
        if aggregator.weighting == "uniform":
            self._shares = torch.ones_like(self._shares)

        sampler_of_run: Any = federation.strategies["sampler"]
        self._samplers: list[Any] = []
        for mask in masks:
            members = mask.nonzero().flatten().tolist()
            self._samplers.append(coalition_sampler(sampler_of_run, members))
        self._drawable = _masks_of([sampler.members for sampler in self._samplers], masks)
        # Whether clients have failed since their coalition's last update, bool [K, n].
        self._has_failed = torch.zeros_like(masks)
        # Halves would lose the digits of later clients.
        dtype_of_sums = torch.promote_types(self.models.dtype, torch.float32)
        self._sums = torch.zeros_like(self.models, dtype=dtype_of_sums)
        # Norms of this round's updates: infinite if an update is not finite, NaN if there is none.
        self._norms = torch.zeros(masks.shape, dtype=torch.float64, device=global_vector.device)

    def begin_round(self, round_index: int, clients: Sequence[Client]) -> None:
        """Draw the cohorts of a round. ``clients`` are those of the run."""
        self._state.round_index = round_index
        self.cohorts = self._draw(clients)
        self.cohorts[self.is_over] = False
        shares = self.cohorts * self._shares
        self._weights = shares / shares.sum(
            1, keepdim=True
        )  # [K, n], NaN for coalitions that have ended
        self._norms.fill_(torch.nan)
        self._sums.zero_()

    def _draw(self, clients: Sequence[Client]) -> Tensor:
        if all(type(sampler) is FixedCohort for sampler in self._samplers):
            return self._drawable.clone()
        cohorts = [draw_cohort(sampler, self._state, {}, clients) for sampler in self._samplers]
        return _masks_of(cohorts, self.cohorts)

    def rows_of(self, client: int) -> Tensor:
        """Return the coalitions whose cohort has the client, as indices ``[m]`` of :attr:`models`."""
        return self.cohorts[:, client].nonzero().flatten().to(self.models.device)

    def add(
        self,
        client: int,
        rows: Tensor,
        trained_models: Tensor,
        losses: Tensor | None = None,
        num_steps: int = 0,
    ) -> None:
        """Add the models ``[m, P]`` that a client has trained from those of the coalitions ``rows``, int64 ``[m]``, all
        or some of :meth:`rows_of`. Averages need neither the mean losses ``[m]`` nor the number of steps.
        """
        initial_models = self.models[rows]
        num_parameters = self._num_parameters
        norms = distances(trained_models[:, :num_parameters], initial_models[:, :num_parameters])
        is_finite = trained_models.isfinite().all(1)
        self._norms[rows, client] = norms.where(is_finite, torch.inf)

        updates = trained_models.to(self._sums) - initial_models
        updates.masked_fill_(~is_finite[:, None], 0)
        weights = self._weights[:, client].to(updates)[rows]
        self._sums.index_add_(0, rows, weights[:, None] * updates)

    def end_round(self) -> None:
        """Set the next models. A coalition without a finite update keeps its model."""
        norms = self._norms.cpu()
        is_sent = norms.isfinite()  # bool [K, n]
        has_update = is_sent.any(1)
        self.needs_server |= self._filters_may_act(norms, has_update)

        # The weights of the updates that count sum to 1.
        sums_of_weights = self._weights.where(is_sent, 0).sum(1)
        scales = (1 / sums_of_weights).where(has_update, 0).to(self._sums)
        steps = self._sums.mul_(scales[:, None])
        steps[:, : self._num_parameters] *= self._server_lr
        next_models = (self.models + steps).to(self.models)
        is_finite = next_models.isfinite().all(1)
        self.needs_server |= ~is_finite.cpu()
        self.models = next_models.where(is_finite[:, None], self.models)

        self._has_failed = (self._has_failed | self.cohorts) & ~has_update[:, None]
        have_all_failed = (self._has_failed | ~self._drawable).all(1)
        self.is_over = self.needs_server | have_all_failed

    def _filters_may_act(self, norms: Tensor, has_update: Tensor) -> Tensor:
        """Return for each coalition whether a filter may exclude an update of a norm in ``norms [K, n]``, which are not
        finite where there is no update.
        """
        has_length = norms.isfinite() & (norms > 0)
        smallest = norms.where(has_length, torch.inf).amin(1)
        largest = norms.where(has_length, 0).amax(1)
        # Then no update is MIN_FACTOR times the median, and none is so long that rounding loses the others.
        are_similar = (largest <= MIN_FACTOR * smallest) & (largest < _LARGE_NORM)

        may_act = torch.zeros_like(has_update)
        for row in (has_update & ~are_similar).nonzero().flatten().tolist():
            model_norm = float(self.models[row, : self._num_parameters].norm())
            norms_of_row = norms[row][norms[row].isfinite()]
            may_act[row] = any(
                update_filter.may_exclude(norms_of_row, model_norm)
                for update_filter in self._filters
            )
        return may_act


class ServedCoalitions:
    """The servers of K coalitions, of any kind, with the methods of :class:`AveragedCoalitions`.

    Args:
        masks: bool ``[K, n]``, the coalitions, each of at least one client.
        federation: the federation of the run.

    Attributes:
        needs_server: bool ``[K]``, false, since each coalition has a :class:`CoalitionServer`.
    """

    def __init__(self, masks: Tensor, federation: FederationInfo) -> None:
        self.needs_server = torch.zeros(len(masks), dtype=torch.bool)
        self._num_samples = federation.split_sizes["train"].tolist()
        self._servers = []
        for mask in masks:
            members = mask.nonzero().flatten().tolist()
            self._servers.append(CoalitionServer(members, federation))
        # This round's updates by client, and the clients whose model was not finite, of each coalition.
        self._updates: list[dict[int, ClientUpdate]] = []
        self._broken: list[list[int]] = []

    @property
    def models(self) -> Tensor:
        """The model ``[K, P]`` of each coalition after its last round."""
        return torch.stack([server.state.model() for server in self._servers])

    @property
    def cohorts(self) -> Tensor:
        """The clients of each coalition that train in this round, bool ``[K, n]``."""
        cohorts = torch.zeros(len(self._servers), len(self._num_samples), dtype=torch.bool)
        for cohort, server in zip(cohorts, self._servers):
            cohort[server.state.cohort] = True
        return cohorts

    def begin_round(self, round_index: int, clients: Sequence[Client]) -> None:
        """Draw the cohorts of a round. ``clients`` are those of the run."""
        for server in self._servers:
            server.begin_round(round_index, clients)
        self._updates = [{} for _ in self._servers]
        self._broken = [[] for _ in self._servers]

    def rows_of(self, client: int) -> Tensor:
        """Return the coalitions whose cohort has the client, as indices ``[m]`` of :attr:`models`."""
        rows = [row for row, server in enumerate(self._servers) if client in server.state.cohort]
        return torch.tensor(rows, dtype=torch.long)

    def add(
        self,
        client: int,
        rows: Tensor,
        trained_models: Tensor,
        losses: Tensor,
        num_steps: int,
    ) -> None:
        """Add the models ``[m, P]`` that a client has trained from those of the coalitions ``rows``, int64 ``[m]``,
        with their mean losses ``[m]`` and number of steps.
        """
        are_finite = trained_models.isfinite().all(1).tolist()
        num_samples = self._num_samples[client]
        for row, model, loss, is_finite in zip(
            rows.tolist(), trained_models, losses.tolist(), are_finite
        ):
            if not is_finite:
                self._broken[row].append(client)
                continue
            self._updates[row][client] = ClientUpdate(
                client, num_samples, model, loss=loss, num_steps=num_steps
            )

    def end_round(self) -> None:
        """Compute the next models. A coalition without a finite update keeps its model."""
        for server, updates, broken in zip(self._servers, self._updates, self._broken):
            in_order = [updates[client] for client in server.state.cohort if client in updates]
            server.end_round(in_order, broken, server_data=None)


def _masks_of(cohorts: Sequence[Sequence[int]], like: Tensor) -> Tensor:
    """Return bool ``[K, n]``, whether each of K cohorts has each client."""
    masks = torch.zeros_like(like)
    for mask, cohort in zip(masks, cohorts):
        mask[list(cohort)] = True
    return masks
